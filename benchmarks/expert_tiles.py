"""`python -m benchmarks.expert_tiles`: which tile is quickest for the products of experts, by shape and rows, on a GPU."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from outrider.bench.bandwidth import device_seconds
from outrider.engine.device import Device
from outrider.ops.cuda.tiles import Tile
from outrider.options import numbers

__all__ = ["SHAPES", "candidates"]

_TURNS = 12  # launches with rows of their own, so that the L2 does not serve
_SHARED_MEMORY = 227 * 1024


class Shape(NamedTuple):
    """Experts, how many a row chooses, and widths."""

    experts: int
    chosen: int
    hidden: int
    width: int


SHAPES = {"qwen3-30b-a3b": Shape(128, 8, 2048, 768), "gpt-oss-20b": Shape(32, 4, 2880, 2880)}


def candidates(rows: int) -> list[Tile]:
    """Tiles of so many rows that fit in shared memory."""
    if rows > 16:
        sizes = [(n, k, w, s) for n in (64, 128) for k in (64, 128) for w in (4, 8) for s in (3, 4) if n >= rows or w == 4]
    else:
        sizes = [(16, 128, 2, 4), (16, 128, 4, 3), (32, 32, 2, 6), (32, 64, 2, 3), (32, 64, 2, 4), (32, 64, 4, 3), (32, 64, 4, 4),
                 (32, 128, 4, 2), (32, 128, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3),
                 (128, 32, 4, 3), (128, 32, 8, 4)]  # fmt: skip
    chains = 4 if rows <= 16 else 1
    return [Tile(rows, *size) for size in sizes if chains * size[3] * (rows + size[0]) * size[1] * 2 <= _SHARED_MEMORY]


class Bench:
    """Weights of a shape's experts and rows that choose at random."""

    def __init__(self, shape: Shape, rows: int) -> None:
        from outrider.ops.cuda.experts_launch import ExpertKernels, ExpertRouter, ExpertWeights, Opening

        torch.manual_seed(rows)
        self.shape, self.opening = shape, Opening("silu", True)
        opened = torch.empty(shape.experts * 2 * shape.width, shape.hidden, dtype=torch.bfloat16, device="cuda").normal_()
        closing = torch.empty(shape.experts * shape.hidden, shape.width, dtype=torch.bfloat16, device="cuda").normal_()
        self.weights = ExpertWeights(opened, closing)
        matrix = torch.randn(shape.experts, shape.hidden, device="cuda")
        self.router = ExpertRouter(matrix, None, None, shape.experts, shape.chosen, "softmax", 1, 1, True, 1.0, 0.0)
        self.kernels = ExpertKernels(torch.bfloat16, torch.device("cuda"), 1)
        self.rows = [torch.randn(rows, shape.hidden, device="cuda").bfloat16() for _ in range(_TURNS)]
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.out = torch.empty(shape.chosen, rows, shape.hidden, device="cuda")

    def route(self, x: Tensor, tiles: tuple[Tile, Tile] | None) -> Any:
        return self.kernels.route(x, self.router, self.slots, 1 << 30, 0, tiles)

    def seconds(self, tiles: tuple[Tile, Tile] | None, second: bool) -> float:
        """Of one of the products of one launch, or of the router without tiles."""
        if tiles is None:
            return device_seconds(lambda: [self.route(x, None) for x in self.rows]) / _TURNS
        routes = [self.route(x, tiles) for x in self.rows]
        inner = [self.kernels.open(x, one, self.weights, self.opening) for x, one in zip(self.rows, routes, strict=True)]

        def work() -> None:
            for x, one, held in zip(self.rows, routes, inner, strict=True):
                if second:
                    self.kernels.close(held, one, self.weights, self.out)
                else:
                    self.kernels.open(x, one, self.weights, self.opening)

        return device_seconds(work) / _TURNS

    def touched_bytes(self, second: bool) -> float:
        """Mean bytes of the experts that one product reads."""
        counts = [len(set(self.route(x, None).experts.flatten().tolist())) for x in self.rows]
        return statistics.mean(counts) * self.shape.hidden * self.shape.width * 2 * (1 if second else 2)


def _compiled(name: str, tile: Tile) -> None:
    """Bring the kernels of a tile into Triton's cache."""
    bench = Bench(SHAPES[name], rows=1)
    bench.kernels.parts(bench.rows[0], bench.route(bench.rows[0], (tile, tile)), bench.weights, bench.opening, bench.out)
    torch.cuda.synchronize()


def measure(name: str, counts: list[int], tiles_of: dict[int, list[Tile]]) -> Iterator[dict[str, Any]]:
    """The router, and each product by tile, quickest first."""
    for rows in counts:
        bench = Bench(SHAPES[name], rows)
        yield {"what": "router", "shape": name, "rows": rows, "us": bench.seconds(None, False) * 1e6}
        for second in (False, True):
            timed, read = [], bench.touched_bytes(second)
            for tile in tiles_of[rows]:
                try:
                    timed.append((bench.seconds((tile, tile), second), tile))
                except (RuntimeError, ValueError, AssertionError) as error:
                    yield {"what": "error", "tile": tile, "error": str(error)[:200]}
            timed.sort()
            yield {
                "what": "down" if second else "gate_up", "shape": name, "rows": rows, "read_mb": read / 1e6,
                "tiles": [[round(seconds * 1e6, 1), round(read / seconds / 1e12, 2), *tile] for seconds, tile in timed[:6]],
            }  # fmt: skip


def main(
    shapes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SHAPES),
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,4,32,256",
    jobs: Annotated[int, typer.Option(help="Processes that compile.")] = 8,
) -> None:
    """Microseconds and TB/s of the products of experts by tile; one JSON line for each shape, row count and product."""
    Device.resolve("cuda")
    counts = numbers("--rows", rows, int)
    names = shapes.split(",")
    tiles_of = {count: candidates(16 if count <= 64 else 64) for count in counts}
    wanted = {(name, tile) for name in names for tiles in tiles_of.values() for tile in tiles}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_compiled, name, tile) for name, tile in sorted(wanted)]:
            if (error := future.exception()) is not None:
                print(json.dumps({"what": "not compiled", "error": str(error)[:200]}), flush=True)
    for name in names:
        for row in measure(name, counts, tiles_of):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
