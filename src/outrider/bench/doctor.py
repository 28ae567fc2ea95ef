"""What this machine is, whether rows are invariant on it, and what exactness costs."""

from __future__ import annotations

import importlib.metadata
import platform as python_platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from outrider._version import __version__
from outrider.bench.checks import Check
from outrider.bench.gpu_doctor import diagnose_gpu
from outrider.ops import (
    Blocked,
    Core,
    Ops,
    PackedLinear,
    Plain,
    Segment,
    find_core,
    paged_attention,
    plan_attention,
    serving_ops,
    threads_used,
)
from outrider.platform import cpu_flags, cpu_name, guard

__all__ = ["Check", "diagnose"]

_SHAPES = ((512, 1536), (1408, 512), (2048, 384), (100, 77))
_ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 48)


def diagnose() -> list[Check]:
    """Everything `outrider doctor` prints, in order. Takes a few seconds."""
    return [*_versions(), *_machine(), *_invariance(), *_cost(), *diagnose_gpu()]


def _versions() -> list[Check]:
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    checks = [Check("versions", "outrider", __version__), Check("versions", "python", python_platform.python_version())]
    return checks + [Check("versions", name, importlib.metadata.version(name)) for name in packages]


def _machine() -> list[Check]:
    state = guard()
    wide = [name for name in ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx2") if name in cpu_flags()]
    return [
        Check("machine", "processor", cpu_name()),
        Check("machine", "instructions", ", ".join(wide) or "baseline"),
        Check("machine", "AMX tiles", f"{state.amx}; {state.action}", state.bf16_products),
        Check("machine", "threads", str(threads_used())),
        Check("kernels", "native core", _core_in_use()),
        Check("kernels", "without it", "torch, products at row counts that agree in every bit, attention by logical position"),
        Check("kernels", "bf16 products", "bf16" if state.bf16_products else "in float32", state.bf16_products),
    ]


def _core_in_use() -> str:
    """Whether the native core serves, and why."""
    core, reason = find_core()
    if core is None:
        return f"not in use: {reason}; torch serves, slower and with the same promises"
    return f"in use: {reason}" if serving_ops().core is not None else "not in use: OUTRIDER_OPS=torch"


def _invariance() -> list[Check]:
    checks = _native_invariance()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and not guard().bf16_products:
            continue
        name = str(dtype).removeprefix("torch.")
        for label, ops in (("torch as it comes", Plain()), ("blocked", Blocked())):
            equal = sum(linear_is_invariant(ops, dtype, shape) for shape in _SHAPES)
            text = f"{equal} of {len(_SHAPES)} shapes give a row the same bits at any row count"
            checks.append(Check("rows", f"linear {name}, {label}", text, equal == len(_SHAPES) or isinstance(ops, Plain)))
    same = attention_is_invariant()
    checks.append(Check("rows", "attention", "tree nodes equal decoding one by one" if same else "differs", same))
    return checks


def _native_invariance() -> list[Check]:
    core = serving_ops().core
    if core is None:
        return []
    checks = []
    for kind in ("float32", "bfloat16", "int8"):
        equal = sum(native_is_invariant(core, kind, shape) for shape in _SHAPES)
        text = f"{equal} of {len(_SHAPES)} shapes give a row the same bits at any row count"
        checks.append(Check("rows", f"linear {kind}, native core", text, equal == len(_SHAPES)))
    return checks


def native_is_invariant(core: Core, kind: str, shape: tuple[int, int]) -> bool:
    """Whether a row keeps its bits among others in a product of the native core."""
    generator = torch.Generator().manual_seed(1)
    product = PackedLinear(core, kind, torch.randn(shape[1], shape[0], generator=generator))
    x = torch.randn(max(_ROW_COUNTS), shape[0], generator=generator)
    alone = torch.cat([product(row[None]) for row in x])
    return all(torch.equal(product(x[-count:]), alone[-count:]) for count in _ROW_COUNTS)


def linear_is_invariant(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    """Whether a row keeps its bits alone, among others, and at every place in the batch."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape[1], shape[0], generator=generator).to(dtype)
    row = torch.randn(shape[0], generator=generator).to(dtype)
    seen: Tensor | None = None
    for count in _ROW_COUNTS:
        for place in {0, count // 2, count - 1}:
            x = torch.randn(count, shape[0], generator=generator).to(dtype)
            x[place] = row
            out = ops.linear(x, weight)[place]
            if seen is None:
                seen = out
            elif not torch.equal(out, seen):
                return False
    return True


def attention_is_invariant() -> bool:
    """Whether a node of a draft tree gives the bits of the same token decoded alone."""
    generator = torch.Generator().manual_seed(2)
    size, width, root = 16, 64, 29
    keys, values = (torch.randn(6, 2, size, width, generator=generator) for _ in range(2))
    query = torch.randn(5, 4, width, generator=generator)
    pages, parents = (4, 1, 3), (-1, -1, 0, 1)
    tree = paged_attention(query, keys, values, plan_attention([Segment(0, root, 1, pages, parents)], size, frozenset({None})))
    # node 3 (child of node 1) alone: its parent's KV moved to the position it stands for
    for pool in (keys, values):
        page = pool[pages[(root + 1) // size]]
        page[:, (root + 1) % size] = page[:, (root + 2) % size].clone()
        last, node = pool[pages[(root + 2) // size]], pool[pages[(root + 4) // size]]
        last[:, (root + 2) % size] = node[:, (root + 4) % size].clone()
    alone = paged_attention(query[4:], keys, values, plan_attention([Segment(0, root + 2, 1, pages)], size, frozenset({None})))
    return torch.equal(tree[4], alone[0])


def _cost() -> list[Check]:
    """Milliseconds of a 40M-parameter layer stack's products for one row, exact against as it comes."""
    dtype = torch.bfloat16 if guard().bf16_products else torch.float32
    weights = [torch.randn(o, i).to(dtype) for i, o in ((512, 1024), (512, 512), (512, 2816), (1408, 512)) for _ in range(12)]
    row = {i: torch.randn(1, i).to(dtype) for i in (512, 1408)}

    def sweep(ops: Ops) -> None:
        for weight in weights:
            ops.linear(row[weight.shape[1]], weight)

    plain, exact = _interleaved(lambda: sweep(Plain()), lambda: sweep(Blocked()))
    text = f"{exact:.1f} ms against {plain:.1f} ms for one row"
    return [Check("cost", "exactness, 40M bf16 products", text)]


def _interleaved(first: Callable[[], None], second: Callable[[], None], repeats: int = 15) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, spent in zip((first, second), times, strict=True):
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])
