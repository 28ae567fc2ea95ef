"""`outrider doctor`: what this machine and its GPU are, whether rows are invariant on them, and what exactness costs."""

from __future__ import annotations

import importlib.metadata
import platform as python_platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider._version import __version__
from outrider.bench.bandwidth import device_seconds, gpu_bandwidth
from outrider.bench.feature_specs import FEATURE_SPECS, keeps_bits, random_decoder
from outrider.engine.device import missing_gpu
from outrider.model import Runner, open_decoder
from outrider.model.bundled import bundled_model
from outrider.model.listing import loaded_line
from outrider.model.memory import kv_pool
from outrider.ops import (
    Blocked,
    Grouped,
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
from outrider.ops.group import backends
from outrider.platform import cpu_flags, cpu_name, guard

__all__ = ["Check", "attention_is_invariant", "diagnose", "gpu_attention", "gpu_linear_is_invariant", "linear_is_invariant"]

_INSTRUCTIONS = ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "bf16", "i8mm", "asimddp")
_SHAPES = ((1536, 512), (512, 1408), (384, 2048), (77, 100))  # columns, inner
_ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 48)
_GPU_SHAPES = ((1024, 512), (512, 1408), (6144, 4096), (4096, 14336))
_GPU_ROW_COUNTS = (1, 2, 3, 8, 16, 17, 33, 64, 130)
_GPU_ROWS_ALONE = 8  # of the largest batch
_LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of an 8B model
_LAYERS = 4
_PAGES = 8  # of the small models' KV
Product = Callable[[Tensor], Tensor]
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Check:
    """What was measured or compared, and whether it is as it should be."""

    section: str
    name: str
    value: str
    good: bool = True


def diagnose() -> list[Check]:
    """Everything `outrider doctor` prints, in order. Takes a few seconds."""
    missing = missing_gpu()
    gpu = [Check("gpu", "device", f"none: {missing}; the processor serves")] if missing else _gpu()
    return [*_versions(), *_machine(), *_invariance(), *_cost(), *gpu]


def _versions() -> list[Check]:
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    checks = [Check("versions", "outrider", __version__), Check("versions", "python", python_platform.python_version())]
    return checks + [Check("versions", name, importlib.metadata.version(name)) for name in packages]


def _machine() -> list[Check]:
    state = guard()
    wide = [name for name in _INSTRUCTIONS if name in cpu_flags()]
    return [
        Check("machine", "processor", cpu_name()),
        Check("machine", "instructions", ", ".join(wide) or "baseline"),
        Check("machine", "AMX tiles", f"{state.amx}; {state.action}", state.bf16_products),
        Check("machine", "threads", str(threads_used())),
        Check("kernels", "native core", _core_in_use()),
        Check("kernels", "without it", "torch, products at row counts that agree in every bit, attention by logical position"),
        Check("kernels", "tensor parallel", backends()),
        Check("kernels", "bundled model", _bundled()),
        Check("kernels", "bf16 products", "bf16" if state.bf16_products else "in float32", state.bf16_products),
    ]


def _core_in_use() -> str:
    """Whether the native core serves, and why."""
    core, reason = find_core()
    if core is None:
        return f"not in use: {reason}; torch serves, slower and with the same promises"
    return f"in use: {reason}" if serving_ops().core is not None else "not in use: OUTRIDER_OPS=torch"


def _bundled() -> str:
    """What the model is that commands use without --model."""
    decoder = open_decoder(bundled_model())
    return loaded_line(Runner(decoder, kv_pool(decoder.spec, 1, 64)))


def _invariance() -> list[Check]:
    checks = []
    if (core := serving_ops().core) is not None:
        for kind in ("float32", "bfloat16", "int8"):
            products = (PackedLinear(core, kind, _random(1, *shape)) for shape in _SHAPES)
            equal = (rows_keep_bits(product, _rows(shape), _ROW_COUNTS) for product, shape in zip(products, _SHAPES, strict=True))
            checks.append(_linear_check("rows", f"linear {kind}, native core", equal))
        for bits in (4, 8):
            groups = (PackedLinear(core, "bfloat16", Grouped.of(_random(1, *shape), 32, bits)) for shape in _SHAPES)
            equal = (rows_keep_bits(product, _rows(shape), _ROW_COUNTS) for product, shape in zip(groups, _SHAPES, strict=True))
            checks.append(_linear_check("rows", f"linear with groups of {bits} bits, native core", equal))
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and not guard().bf16_products:
            continue
        name = str(dtype).removeprefix("torch.")
        for label, ops, promised in (("torch as it comes", Plain(), False), ("blocked", Blocked(), True)):
            equal = (linear_is_invariant(ops, dtype, shape) for shape in _SHAPES)
            checks.append(_linear_check("rows", f"linear {name}, {label}", equal, promised))
    same = attention_is_invariant()
    checks.append(Check("rows", "attention", "tree nodes equal decoding one by one" if same else "differs", same))
    return [*checks, *(_features_check(dtype) for dtype in ("float32", "bfloat16"))]


def _features_check(dtype: str) -> Check:
    """Small models that together have every feature of a model spec, by the backend that serves them."""
    equal, page_size = [], 16
    for spec in FEATURE_SPECS.values():
        runner = Runner(random_decoder(spec, dtype), kv_pool(spec, _PAGES + 1, page_size))
        equal.append(keeps_bits(runner, _PAGES, page_size))
    text = f"{sum(equal)} of {len(equal)} models give the same bits in prompts, decoding and draft trees"
    return Check("rows", f"features of models {dtype}", text, all(equal))


def _linear_check(section: str, name: str, results: Iterable[bool], promised: bool = True) -> Check:
    equal = list(results)
    text = f"{sum(equal)} of {len(equal)} shapes give a row the same bits at any row count"
    return Check(section, name, text, all(equal) or not promised)


def rows_keep_bits(product: Product, x: Tensor, counts: Sequence[int], alone: int | None = None) -> bool:
    """Whether rows of a product have the bits they have alone, at the start and at the end of batches of these sizes.

    `alone` is how many of the rows are computed alone; None: all.
    """
    whole, step = product(x), max(len(x) // (alone or len(x)), 1)
    if not torch.equal(whole[::step], torch.cat([product(row[None]) for row in x[::step]])):
        return False
    return all(
        torch.equal(product(x[:count]), whole[:count]) and torch.equal(product(x[-count:]), whole[-count:]) for count in counts
    )


def linear_is_invariant(ops: Ops, dtype: torch.dtype, shape: Shape) -> bool:
    """Whether a row keeps its bits alone, among others, and at every place in the batch; `shape` is columns, inner."""
    weight = _random(1, *shape).to(dtype)
    return rows_keep_bits(lambda x: ops.linear(x, weight), _rows(shape).to(dtype), _ROW_COUNTS)


def _rows(shape: Shape) -> Tensor:
    return _random(2, max(_ROW_COUNTS), shape[1])


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


def _gpu() -> list[Check]:
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    linear = (gpu_linear_is_invariant(shape, "cuda", torch.bfloat16) for shape in _GPU_SHAPES)
    both = gpu_attention("cuda", torch.bfloat16)
    results = [
        f"{name} {'equal' if same else 'differ from'} decoding one by one"
        for name, same in zip(("prompts", "tree nodes"), both, strict=True)
    ]
    return [
        Check("gpu", "device", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"),
        Check("gpu", "memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"),
        Check("gpu", "software", f"CUDA {torch.version.cuda}, Triton {importlib.metadata.version('triton')}"),
        _linear_check("gpu", "linear bfloat16", linear),
        Check("gpu", "attention bfloat16", "; ".join(results), all(both)),
        *_gpu_cost(),
    ]


def gpu_linear_is_invariant(shape: Shape, device: str, dtype: torch.dtype) -> bool:
    """Whether a row keeps its bits alone, among others, and at every place in the batch; `shape` is columns, inner."""
    weight, kernels = _random(1, *shape, device=device, dtype=dtype), _kernels(dtype)

    def product(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), shape[0], device=device)
        kernels.linear(rows, weight, None, out)
        return out

    x = _random(2, max(_GPU_ROW_COUNTS), shape[1], device=device, dtype=dtype)
    return rows_keep_bits(product, x, _GPU_ROW_COUNTS, _GPU_ROWS_ALONE)


class Attention(NamedTuple):
    """Whether rows have the bits of the same tokens decoded one by one."""

    prompts: bool
    nodes: bool


def gpu_attention(device: str, dtype: torch.dtype, root: int = 77) -> Attention:
    """A prompt's rows and a tree's last node against decoding."""
    from outrider.ops.cuda.launch import AttentionMetadata

    kernels, width = _kernels(dtype), 64
    pool = (_random(3, 4, 2, 64, width, device=device, dtype=dtype), _random(4, 4, 2, 64, width, device=device, dtype=dtype))
    q = _random(5, root + 1, 4 * width, device=device, dtype=dtype)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=device)

    def decoded(rows: Tensor, positions: list[int], roots: list[int], ancestors: list[list[int]]) -> Tensor:
        where, known, slots = (torch.tensor(values, dtype=torch.int32, device=device) for values in (positions, roots, ancestors))
        none = torch.zeros_like(where)
        meta = AttentionMetadata(none, none, where, known, none, none, table, slots, none.float(), none.long())
        out = torch.empty_like(rows)
        kernels.attend_rows(rows, pool, meta, out, None)
        return out

    every = list(range(root + 1))
    single = decoded(q, every, every, [[0, 0]] * len(every))
    chunks = [(i, min(kernels.chunk_tokens, root + 1 - i), i, 0, 0) for i in range(0, root + 1, kernels.chunk_tokens)]
    prompt = torch.empty_like(q)
    kernels.attend_chunks(q, pool, table, torch.tensor(chunks, dtype=torch.int32, device=device), prompt, None)
    # the last two positions once more, as nodes of a draft whose KV lies in a separate page
    for part in pool:
        for slot, position in ((0, root - 1), (2, root)):
            part[1, :, slot] = part[int(table[0, position // 64]), :, position % 64]
    node = decoded(q[root:], [root], [root - 2], [[64, 66]])
    return Attention(torch.equal(prompt, single), torch.equal(node[0], single[root]))


def _gpu_cost() -> list[Check]:
    """Products of some 8B layers, ours against cuBLAS, and the bytes they read per second."""
    weights = [_random(6, *shape, device="cuda", dtype=torch.bfloat16) for shape in _LAYER for _ in range(_LAYERS)]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    kernels = _kernels(torch.bfloat16)
    checks: list[Check] = []
    for rows in (1, 32):
        inputs = {inner: _random(7, rows, inner, device="cuda", dtype=torch.bfloat16) for inner in {shape[1] for shape in _LAYER}}
        outs = {columns: torch.empty(rows, columns, device="cuda") for columns in {shape[0] for shape in _LAYER}}

        def exact() -> None:
            for weight in weights:
                kernels.linear(inputs[weight.shape[1]], weight, None, outs[weight.shape[0]])  # noqa: B023 (used at once)

        def fast() -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)  # noqa: B023 (used at once)

        ours, theirs = device_seconds(exact), device_seconds(fast)
        text = f"{ours * 1e3:.2f} ms against cuBLAS's {theirs * 1e3:.2f} ms ({ours / theirs - 1:+.1%})"
        text += f"; {size / ours / 1e9:.0f} GB/s read"
        checks.append(Check("gpu", f"exactness, {_LAYERS} layers of 8B, {rows} row{'s' * (rows > 1)}", text))
    speed = gpu_bandwidth(1 << 30)
    return [*checks, Check("gpu", "memory bandwidth", f"{speed / 1e9:.0f} GB/s read by a matrix-vector product over 1 GiB")]


def _kernels(dtype: torch.dtype):  # type: ignore[no-untyped-def]
    from outrider.ops.cuda.launch import Kernels, Shape

    return Kernels(Shape(4, 2, 64, 64), dtype)


def _random(seed: int, *shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).mul(shape[-1] ** -0.5).to(dtype)
