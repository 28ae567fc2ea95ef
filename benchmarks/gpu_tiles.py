"""`python -m benchmarks.gpu_tiles`: times of tiles of products with quantised matrices, for `ops/cuda/quantised_tiles.py`.

Weights are walked through, so that the L2 cache does not serve, inside a CUDA graph.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from benchmarks.command import run
from outrider.engine.device import Device
from outrider.ops import ScaledFloats
from outrider.options import numbers

if TYPE_CHECKING:
    from outrider.ops.cuda.quantised_matrix import QuantisedMatrix
    from outrider.ops.cuda.quantised_tiles import QuantisedTile

__all__ = ["SHAPES", "measure_tiles", "random_matrix"]

SHAPES = {
    "8b qkv": (6144, 4096), "8b out": (4096, 4096), "8b gate_up": (28672, 4096), "8b down": (4096, 14336),
    "70b qkv": (10240, 8192), "70b out": (8192, 8192), "70b gate_up": (57344, 8192), "70b down": (8192, 28672),
}  # fmt: skip
_WALKED = 400e6  # bytes of weights, beyond what the L2 cache holds
_REPEATS = 12


def random_matrix(kind: str, columns: int, inner: int, device: str = "cuda") -> QuantisedMatrix:
    """A random matrix, made in the form it is multiplied in: "int4_zeros" is "int4" with zero points."""
    from outrider.ops.cuda.quantised_matrix import fp8_matrix, grouped_matrix
    from outrider.ops.groups import Grouped

    place = torch.device(device)
    if kind.startswith("fp8"):
        in_blocks = kind.startswith("fp8_block")
        codes = torch.randn(columns, inner, device=place).to(torch.float8_e4m3fn).view(torch.uint8)
        block = torch.arange(columns, dtype=torch.int32, device=place) // (128 if in_blocks else 1)
        size = 128 if in_blocks else inner
        scale = torch.full((int(block[-1]) + 1, -(-inner // size)), 0.02 / inner**0.5, device=place)
        made = fp8_matrix(ScaledFloats(codes, scale, block, size), place, not kind.endswith("weights"))
    else:
        bits = 8 if kind in ("int8", "bytes") else 4
        size = inner if kind == "int8" else 32 if kind == "bytes" else 128
        codes = torch.randint(0, 2**bits, (columns, inner), dtype=torch.uint8, device=place)
        scale = torch.full((columns, -(-inner // size)), 2.0**-8, device=place)
        least = scale * torch.randint(0, 16, scale.shape, device=place) if kind == "int4_zeros" else None
        made = grouped_matrix(Grouped(codes, scale, least, 0 if least is not None else 2 ** (bits - 1), bits, size), place)
    assert made is not None
    return made


def candidates(kind: str, rows: int) -> Iterator[QuantisedTile]:
    """Tiles that are worth trying for a row count."""
    from outrider.ops.cuda.quantised_tiles import QuantisedTile

    height = next((size for size in (16, 32, 64, 128) if rows <= size), 128)
    grouped = kind.startswith(("int4", "bytes", "fp8_block"))
    steps = (128,) if grouped else (64, 128) if kind == "fp8_weights" else (128, 256)
    for columns, step, warps, stages in itertools.product((64, 128), steps, (4, 8), (3, 4, 6)):
        bytes_of = (2 if kind.endswith("weights") or kind.startswith(("int4", "bytes")) else 1) * height + columns
        if stages * bytes_of * step > 200e3 or (warps == 8 and columns == 64 and height < 64):
            continue
        yield QuantisedTile(height, columns, step, warps, stages)
        if rows >= 64 and kind in ("fp8", "int8", "fp8_blocks"):
            yield QuantisedTile(height, columns, step, warps, stages, swapped=False)


def measure_tiles(
    kinds: list[str], rows: list[int], shapes: list[str], seconds: float, table_only: bool
) -> Iterator[dict[str, Any]]:
    """The best tile of every kind, shape and row count beside the table's; with `table_only` the table's alone."""
    from outrider.ops.cuda.launch import Kernels, Shape
    from outrider.ops.cuda.quantised_tiles import quantised_tile_for

    kernels = Kernels(Shape(32, 8, 128, 64), torch.bfloat16)
    share = seconds / (len(kinds) * len(shapes) * len(rows))
    for shape, kind in itertools.product(shapes, kinds):
        columns, inner = SHAPES[shape]
        size = columns * inner * (0.5 if kind.startswith("int4") else 1)
        first = random_matrix(kind, columns, inner)
        weights = [first, *(first.over([tensor.clone() for tensor in first.tensors]) for _ in range(int(_WALKED // size) + 1))]
        for count in rows:
            begun = time.perf_counter()
            x, walk = torch.randn(count, inner, device="cuda").bfloat16(), itertools.cycle(weights)
            tables, found = quantised_tile_for(first.kind, count, columns), []

            def multiply(tile: QuantisedTile) -> None:
                w = next(walk)  # noqa: B023 (used at once)
                if "gate_up" in shape:  # noqa: B023
                    out = torch.empty(count, columns // 2, device="cuda", dtype=torch.bfloat16)  # noqa: B023
                    w.multiply(x, out, _gated(), tile)  # noqa: B023
                else:
                    kernels.parts(x, w, tile)  # noqa: B023

            for tile in (tables, *(() if table_only else candidates(kind, count))):
                if found and time.perf_counter() - begun > share:
                    break
                try:
                    found.append((_seconds(multiply, tile), tile))
                except Exception as error:  # a tile that does not fit the device
                    if tile == tables:
                        yield {"shape": shape, "kind": kind, "rows": count, "tile": tuple(tile), "error": str(error)[:300]}
            if not found:
                continue
            best = min(found)
            yield {
                "shape": shape, "kind": kind, "rows": count, "us": round(found[0][0] * 1e6, 1), "best_us": round(best[0] * 1e6, 1),
                "best": tuple(best[1]), "tried": len(found), "tb_s": round(size / best[0] / 1e12, 2),
            }  # fmt: skip
        del weights, first
        torch.cuda.empty_cache()


def _gated() -> Any:
    from outrider.ops.cuda.matrix import Epilogue

    return Epilogue("gated", activation="silu")


def _seconds(multiply: Callable[[QuantisedTile], None], tile: QuantisedTile) -> float:
    """Seconds of a product, of a graph of many."""
    multiply(tile)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            multiply(tile)
    graph.replay()
    times = []
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / _REPEATS / 1e3)
    return min(times)


def main(
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of matrices.")] = "fp8,fp8_blocks,int4,int4_zeros,int8",
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,32,64,128,256",
    shapes: Annotated[str, typer.Option(help="Comma-separated names of shapes, or parts of them.")] = "8b",
    seconds: Annotated[float, typer.Option(help="Time for all of it.")] = 90.0,
    table_only: Annotated[bool, typer.Option(help="Time the table's tiles alone.")] = False,
) -> None:
    """Times of tiles of products with quantised matrices on a GPU; one JSON line per product."""
    Device.resolve("cuda")
    chosen = [name for name in SHAPES if any(part in name for part in shapes.split(","))]
    for row in measure_tiles(kinds.split(","), numbers("--rows", rows, int), chosen, seconds, table_only):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
