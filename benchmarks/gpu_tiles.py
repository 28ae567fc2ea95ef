"""`python -m benchmarks.gpu_tiles`: times of tiles of products with quantised matrices, for `ops/cuda/quantised_tiles.py`.

Weights are walked through, so that the L2 cache does not serve, inside a CUDA graph.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.command import run
from benchmarks.synthetic_forms import random_matrix
from outrider.engine.device import Device
from outrider.ops import Grouped, ScaledFloats
from outrider.options import numbers

if TYPE_CHECKING:
    from outrider.ops.cuda.quantised_matrix import QuantisedMatrix
    from outrider.ops.cuda.quantised_tiles import QuantisedTile

__all__ = ["SHAPES", "Product", "candidates", "compile_tiles", "measure_tiles"]

SHAPES = {
    "8b qkv": (6144, 4096), "8b out": (4096, 4096), "8b gate_up": (28672, 4096), "8b down": (4096, 14336),
    "70b qkv": (10240, 8192), "70b out": (8192, 8192), "70b gate_up": (57344, 8192), "70b down": (8192, 28672),
}  # fmt: skip
_WALKED = 400e6  # bytes of weights, beyond what the L2 cache holds
_REPEATS = 12
_SHARED = 220e3  # bytes of shared memory of a program
# Columns, inner step, warps and stages; of kinds whose step is fixed, and of others.
_SETTINGS = {
    False: ((64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4), (128, 128, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3),
            (128, 128, 8, 6)),
    True: ((64, 256, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4), (128, 256, 8, 3), (128, 128, 4, 4), (64, 256, 4, 3)),
}  # fmt: skip


def on_device(kind: str, columns: int, inner: int) -> QuantisedMatrix:
    """A random matrix in the form it is multiplied in."""
    from outrider.ops.cuda.quantised_matrix import fp8_matrix, grouped_matrix

    place = torch.device("cuda")
    stored = random_matrix(kind.replace("_weights", "s" if "block" in kind else ""), columns, inner)
    made = fp8_matrix(stored, place, not kind.endswith("weights")) if isinstance(stored, ScaledFloats) else None
    made = grouped_matrix(stored, place) if isinstance(stored, Grouped) else made
    assert made is not None
    return made


def candidates(kind: str, rows: int) -> Iterator[QuantisedTile]:
    """Tiles that are worth trying for a row count, the likely ones first."""
    from outrider.ops.cuda.quantised_tiles import QuantisedTile

    height = next((size for size in (16, 32, 64, 128) if rows <= size), 128)
    eight_bits, decoded = kind in ("fp8", "int8", "fp8_blocks"), kind.startswith(("int4", "bytes")) or kind.endswith("weights")
    for columns, warps, stages in ((64, 4, 6), (128, 4, 5), (64, 4, 4)) if rows <= 8 and kind.startswith("int4") else ():
        yield QuantisedTile(8, columns, 128, warps, stages)
    for columns, step, warps, stages in _SETTINGS[kind in ("fp8", "int8")]:
        if stages * ((2 * 2 if kind.startswith("int4") else 2 if decoded else 1) * height + columns) * step < _SHARED:
            yield QuantisedTile(height, columns, step, warps, stages)
    for columns, warps, stages in ((128, 8, 3), (128, 4, 4), (256, 8, 3)) if eight_bits and rows >= 64 else ():
        yield QuantisedTile(height, columns, 128, warps, stages, swapped=False)
        if rows >= 128:
            yield QuantisedTile(64, columns, 128, warps, stages, swapped=False)


class Product(NamedTuple):
    """A product that is timed with several tiles."""

    shape: str
    kind: str
    rows: int

    def tiles(self, table_only: bool) -> list[QuantisedTile]:
        """The table's tile, then others."""
        from outrider.ops.cuda.quantised_tiles import quantised_tile_for

        first = quantised_tile_for("int4" if self.kind == "int4_zeros" else self.kind, self.rows, SHAPES[self.shape][0])
        return [first, *(tile for tile in candidates(self.kind, self.rows) if not table_only and tile != first)]

    def runs(self, weights: Sequence[QuantisedMatrix]) -> Callable[[QuantisedTile], None]:
        """Multiplies by the next of the weights with a tile."""
        from outrider.ops.cuda.launch import Kernels, Shape
        from outrider.ops.cuda.matrix import Epilogue

        columns, inner = SHAPES[self.shape]
        kernels, walk = Kernels(Shape(32, 8, 128, 64), torch.bfloat16), itertools.cycle(weights)
        x, out = (torch.randn(self.rows, width, device="cuda").bfloat16() for width in (inner, columns // 2))

        def multiply(tile: QuantisedTile) -> None:
            if "gate_up" in self.shape:
                next(walk).multiply(x, out, Epilogue("gated", activation="silu"), tile)
            else:
                kernels.parts(x, next(walk), tile)

        return multiply


def compile_tiles(products: Sequence[Product], table_only: bool, part: int, parts: int) -> None:
    """Compile every `parts`-th kernel into Triton's cache on disk."""
    jobs = [(product, tile) for product in products for tile in product.tiles(table_only)][part::parts]
    for product, group in itertools.groupby(jobs, key=lambda job: job[0]):
        multiply = product.runs([on_device(product.kind, *SHAPES[product.shape])])
        for _, tile in group:
            with contextlib.suppress(Exception):  # a tile that does not fit the device; timing names it
                multiply(tile)


def measure_tiles(products: Sequence[Product], table_only: bool) -> Iterator[dict[str, Any]]:
    """The table's tile of every product, and the best one of all that were tried."""
    for (shape, kind), group in itertools.groupby(products, key=lambda product: (product.shape, product.kind)):
        columns, inner = SHAPES[shape]
        size = columns * inner * (0.5 if kind.startswith("int4") else 1)
        first = on_device(kind, columns, inner)
        weights = [first, *(first.over([tensor.clone() for tensor in first.tensors]) for _ in range(int(_WALKED // size) + 1))]
        for product in group:
            multiply, found, failed = product.runs(weights), [], []
            for tile in product.tiles(table_only):
                try:
                    found.append((_seconds(multiply, tile), tile))
                except Exception as error:
                    failed.append(f"{tuple(tile)}: {str(error)[:120]}")
            found.sort()
            row = {"shape": shape, "kind": kind, "rows": product.rows, "failed": failed}
            times = [(round(seconds * 1e6, 1), *tile) for seconds, tile in found[:3]]
            table = next((round(s * 1e6, 1) for s, tile in found if tile == product.tiles(True)[0]), None)
            yield row | {"table_us": table, "best": times, "tb_s": round(size / found[0][0] / 1e12, 2) if found else None}
        del weights, first
        torch.cuda.empty_cache()


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
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of matrices.")] = "fp8,int4,fp8_blocks,int4_zeros",
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,32,64,128",
    shapes: Annotated[str, typer.Option(help="Comma-separated names of shapes.")] = "8b gate_up,8b down,8b qkv",
    table_only: Annotated[bool, typer.Option(help="Time the table's tiles alone.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that compile kernels first.")] = 14,
    part: Annotated[int, typer.Option(help="Compile this part of the kernels alone.", hidden=True)] = -1,
) -> None:
    """Times of tiles of products with quantised matrices on a GPU; one JSON line per product."""
    Device.resolve("cuda")
    named = itertools.product(shapes.split(","), kinds.split(","), numbers("--rows", rows, int))
    products = [Product(*names) for names in named]
    if part >= 0:
        return compile_tiles(products, table_only, part, processes)
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu_tiles", "--kinds", kinds, "--rows", rows, "--shapes", shapes]
    command += ["--processes", str(processes), *(["--table-only"] if table_only else [])]
    for process in [subprocess.Popen([*command, "--part", str(i)]) for i in range(processes)]:
        process.wait()
    print(json.dumps({"what": "compiled", "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
    for row in measure_tiles(products, table_only):
        print(json.dumps(row), flush=True)
    return None


if __name__ == "__main__":
    run(main)
