"""The GPU's part of `outrider doctor`: what it is, whether rows are invariant on it, what that costs, how fast it reads."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.bench.bandwidth import device_seconds, gpu_bandwidth
from outrider.bench.checks import Check
from outrider.engine.device import missing_gpu

__all__ = ["diagnose_gpu", "gpu_attention", "gpu_linear_is_invariant"]

_SHAPES = ((1024, 512), (512, 1408), (6144, 4096), (4096, 14336))  # columns, inner
_ROW_COUNTS = (1, 2, 3, 8, 16, 17, 33, 64, 130)
_LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of an 8B model
_LAYERS = 4


def diagnose_gpu() -> list[Check]:
    """Findings about the GPU that would serve; one line where there is none."""
    missing = missing_gpu()
    if missing:
        return [Check("gpu", "device", f"none: {missing}; the processor serves")]
    return [*_device(), *_invariance(), *_cost()]


def _device() -> list[Check]:
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    return [
        Check("gpu", "device", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"),
        Check("gpu", "memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"),
        Check("gpu", "software", f"CUDA {torch.version.cuda}, Triton {importlib.metadata.version('triton')}"),
    ]


def _invariance() -> list[Check]:
    equal = sum(gpu_linear_is_invariant(shape, "cuda", torch.bfloat16) for shape in _SHAPES)
    text = f"{equal} of {len(_SHAPES)} shapes give a row the same bits at any row count"
    both = gpu_attention("cuda", torch.bfloat16)
    results = [
        f"{name} {'equal' if same else 'differ from'} decoding one by one"
        for name, same in zip(("prompts", "tree nodes"), both, strict=True)
    ]
    return [
        Check("gpu", "linear bfloat16", text, equal == len(_SHAPES)),
        Check("gpu", "attention bfloat16", "; ".join(results), all(both)),
    ]


def gpu_linear_is_invariant(shape: tuple[int, int], device: str, dtype: torch.dtype) -> bool:
    """Whether rows of a product have the bits they have alone, at the start and at the end of any batch."""
    columns, inner = shape
    weight, x = (
        _random(1, columns, inner, device=device, dtype=dtype),
        _random(2, max(_ROW_COUNTS), inner, device=device, dtype=dtype),
    )
    kernels = _kernels(dtype)

    def product(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), columns, device=device)
        kernels.linear(rows, weight, None, out, "store")
        return out

    alone = torch.cat([product(row[None]) for row in x[:: max(len(x) // 8, 1)]])
    whole = product(x)
    if not torch.equal(whole[:: max(len(x) // 8, 1)], alone):
        return False
    return all(
        torch.equal(product(x[:count]), whole[:count]) and torch.equal(product(x[-count:]), whole[-count:])
        for count in _ROW_COUNTS
    )


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


def _cost() -> list[Check]:
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
                kernels.linear(inputs[weight.shape[1]], weight, None, outs[weight.shape[0]], "store")  # noqa: B023 (used at once)

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

    return Kernels(Shape(256, 4, 2, 64, 64, 1e-5), dtype)


def _random(seed: int, *shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).mul(shape[-1] ** -0.5).to(dtype)
