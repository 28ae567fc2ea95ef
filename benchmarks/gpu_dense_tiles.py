"""`python -m benchmarks.gpu_dense_tiles`: the fastest tiles of exact products by shape and rows, beside cuBLAS.

Kernels are compiled by processes side by side, then every tile is timed in a CUDA graph over weights that the L2 cache does not
hold. A product whose parts `finish` adds is timed with it. All tiles of as many parts must give the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.cuda.launch import Kernels, RowNorm, Shape
from outrider.ops.cuda.matrix import DenseMatrix, Epilogue
from outrider.ops.cuda.tiles import Tile

__all__ = ["measure_tiles"]

_LAYERS = 32
_SHAPES = {  # columns, inner: of an 8B Llama
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "logits": (128256, 4096),
}
_FORMS = {  # forms and parts that are tried
    "qkv": (("qkv", 4), ("qkv", 2)),
    "out": (("split_k", 4), ("store", 4), ("split_k", 2), ("store", 2)),
    "gate_up": (("gated", 4), ("gated", 1), ("gated", 2)),
    "down": (("split_k", 4), ("store", 4), ("split_k", 2), ("store", 2)),
    "logits": (("store", 4), ("store", 1)),
}
_FEW = (
    Tile(16, 32, 64, 2, 4), Tile(16, 32, 128, 4, 3), Tile(16, 64, 64, 4, 3), Tile(16, 64, 64, 4, 5), Tile(16, 64, 128, 4, 4),
)  # fmt: skip
_SOME = (
    Tile(64, 64, 128, 4, 4), Tile(64, 128, 64, 4, 4), Tile(64, 32, 128, 4, 5), Tile(64, 128, 128, 4, 3), Tile(64, 256, 64, 8, 3),
    Tile(64, 128, 64, 8, 4), Tile(64, 64, 64, 4, 6),
)  # fmt: skip
_MANY = (
    Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(128, 64, 128, 8, 3), Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 128, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3),
    Tile(128, 128, 64, 4, 4), Tile(128, 64, 64, 8, 5),
)  # fmt: skip
_ROWS = (1, 16, 32, 64, 128, 192, 256, 512)
_PROCESSES = 14
_DEVICE = "cuda"
_HEADS, _PAGE = (32, 8, 128), 64


class Candidate(NamedTuple):
    """A tile for a product in some form."""

    shape: str
    form: str
    parts: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class _Parted(DenseMatrix):
    """A matrix whose inner dimension is summed in another number of parts."""

    count: int = 4

    @property
    def parts(self) -> int:
        return self.count


class Product:
    """One product of the 8B shape: weights, inputs and what follows it."""

    def __init__(self, name: str, rows: int) -> None:
        torch.manual_seed(0)
        self.columns, self.inner = _SHAPES[name]
        copies = max(2, int(250e6 // (2 * self.columns * self.inner)) + 1) if rows > 1 else 1
        self.weights = [torch.randn(self.columns, self.inner, device=_DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        self._x = torch.randn(rows, self.inner, device=_DEVICE, dtype=torch.bfloat16)
        self._stream = torch.zeros(rows, 4096, device=_DEVICE)
        self._norm = RowNorm("rms", 1e-5, torch.ones(4096, device=_DEVICE))
        self.kernels = Kernels(Shape(*_HEADS, _PAGE), torch.bfloat16)
        pool = [torch.zeros(rows // _PAGE + 1, 8, _PAGE, 128, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        places = torch.arange(rows, device=_DEVICE, dtype=torch.int32)
        turns = [torch.rand(rows, 64, device=_DEVICE) for _ in range(2)]
        self._placed = (*pool, places, places, *turns)

    def run(self, candidate: Candidate, rows: int, weight: Tensor) -> Tensor:
        """The product of some rows, with what adds its parts."""
        form, parts = candidate.form, candidate.parts
        x, matrix = self._x[:rows], _Parted(weight, parts)
        if form == "qkv":
            out = x.new_empty(rows, 4096)
            then = Epilogue("qkv", placed=self._placed, heads=(*_HEADS, _PAGE))
        elif form == "gated":
            out, then = x.new_empty(rows, self.columns // 2), Epilogue("gated", activation="silu")
        else:
            out, then = x.new_empty(parts if form == "split_k" else 1, rows, self.columns, dtype=torch.float32), Epilogue(form)
        matrix.multiply(x, out if out.dim() == 2 else out.view(-1, self.columns), then, candidate.tile)
        if self.columns == 4096:
            return self.kernels.finish(out, None, self._stream[:rows], self._norm)
        return out

    def by_cublas(self, rows: int, weight: Tensor) -> Tensor:
        return F.linear(self._x[:rows], weight)


def measure_tiles(rows: Sequence[int] = _ROWS, seconds: float = 85.0) -> Iterator[dict[str, Any]]:
    """The three fastest tiles of every shape, form, number of parts and row count, and what whole models take with the best."""
    begun = time.perf_counter()
    candidates = [one for one in _candidates() if any(_fits(one.tile, count) for count in rows)]
    compiled = _compile(candidates, deadline=begun + 0.65 * seconds)
    yield {"compiled": len(compiled), "candidates": len(candidates), "seconds": round(time.perf_counter() - begun, 1)}
    best: dict[tuple[str, int, int], float] = {}
    for name in _SHAPES:
        product, of_shape = Product(name, max(rows)), [one for one in compiled if one.shape == name]
        for count in rows:
            if time.perf_counter() - begun > seconds:
                return
            cublas = _micros(partial(product.by_cublas, count), product.weights)
            for (form, parts), group in itertools.groupby(of_shape, lambda one: (one.form, one.parts)):
                fitting = [one for one in group if _fits(one.tile, count)]
                timed, unequal = _timed(product, fitting, count)
                if not timed:
                    continue
                best[name, parts, count] = min(best.get((name, parts, count), 1e9), timed[0][0])
                yield {"shape": name, "form": form, "parts": parts, "rows": count, "cublas_us": round(cublas, 1),
                       "best": [(round(us, 1), *tile) for us, tile in timed[:3]], "unequal": unequal}  # fmt: skip
        del product
        torch.cuda.empty_cache()
    for count in rows:
        layers = {name: {p: best[name, p, count] for p in (1, 2, 4) if (name, p, count) in best} for name in _SHAPES}
        us = sum(min(layers[name].values(), default=0.0) for name in ("qkv", "out", "gate_up", "down"))
        yield {"rows": count, "all_layers_ms": round(us * _LAYERS / 1e3, 2), "by_parts": layers}


def _candidates() -> Iterator[Candidate]:
    for tiles in (_MANY, _SOME, _FEW):
        for name, forms in _FORMS.items():
            for form, parts in forms:
                for tile in tiles:
                    too_large = parts > 1 and tile.rows * tile.columns > 128 * 128  # two sums in registers
                    if not too_large and tile.stages * (tile.rows + tile.columns) * tile.inner * 2 <= 220_000:
                        yield Candidate(name, form, parts, tile)


def _fits(tile: Tile, rows: int) -> bool:
    """Whether a tile is worth trying for so many rows."""
    return tile.rows == 16 if rows <= 16 else 64 <= tile.rows <= max(rows, 64)


def _compile(candidates: Sequence[Candidate], deadline: float) -> list[Candidate]:
    """Candidates whose kernels were compiled in time, in order; the cache on disk has them then."""
    context = multiprocessing.get_context("spawn")
    done: set[Candidate] = set()
    with context.Pool(_PROCESSES) as pool:
        results = pool.imap_unordered(_compile_one, candidates)
        while len(done) < len(candidates) and time.perf_counter() < deadline:
            try:
                done.add(results.next(timeout=max(deadline - time.perf_counter(), 0.1)))
            except multiprocessing.TimeoutError:
                break
            except StopIteration:
                break
        pool.terminate()
    return [one for one in sorted(candidates, key=lambda one: (one.shape, one.form, one.parts)) if one in done]


_products: dict[str, Product] = {}  # of a process that compiles


def _compile_one(candidate: Candidate) -> Candidate:
    if candidate.shape not in _products:
        _products.clear()
        _products[candidate.shape] = Product(candidate.shape, 1)
    product = _products[candidate.shape]
    try:
        product.run(candidate, 1, product.weights[0])
    except Exception as error:  # too much shared memory, say: it is not among the compiled ones
        return _unusable(candidate, error)
    return candidate


def _unusable(candidate: Candidate, error: Exception) -> Candidate:
    """A candidate that stands for one that cannot run."""
    print(json.dumps({"cannot": str(candidate), "error": str(error)[:200]}), flush=True)
    return candidate._replace(tile=candidate.tile._replace(stages=0))


def _timed(product: Product, candidates: Sequence[Candidate], rows: int) -> tuple[list[tuple[float, Tile]], int]:
    """Microseconds of every candidate, the fastest first, and how many gave other bits than the first."""
    expected: Tensor | None = None
    times, unequal = [], 0
    for candidate in candidates:
        product._stream.zero_()
        out = product.run(candidate, rows, product.weights[0]).clone()
        expected = out if expected is None else expected
        unequal += not torch.equal(out, expected)
        times.append((_micros(partial(product.run, candidate, rows), product.weights), candidate.tile))
    return sorted(times), unequal


def _micros(call: Callable[[Tensor], object], weights: Sequence[Tensor], repeats: int = 3) -> float:
    """Microseconds of a call in a CUDA graph, over the weights in turn; the best of several."""
    call(weights[0])
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), max(len(weights), 6)
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(weights[i % len(weights)])
    best = 1e9
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / calls * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(map(str, _ROWS)))
    parser.add_argument("--seconds", type=float, default=85.0)
    options = parser.parse_args()
    for row in measure_tiles([int(count) for count in options.rows.split(",")], options.seconds):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
