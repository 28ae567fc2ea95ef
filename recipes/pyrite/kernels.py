"""Which fused attention kernel pretraining runs on: measured once, on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.model import ModelSpec
from outrider.train.attention import causal_attend

__all__ = ["fastest_kernel", "kernel"]

_CANDIDATES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_REPEATS = 4


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """Run attention on the named kernel; "default" leaves the choice to torch."""
    if name == "default":
        yield
        return
    with sdpa_kernel(_CANDIDATES[name]):
        yield


def fastest_kernel(config: ModelSpec, rows: int, context: int, device: torch.device) -> str:
    """The fused kernel whose forward and backward is quickest here; "default" off CUDA."""
    if device.type != "cuda":
        return "default"
    runs: dict[str, _KernelRun] = {}
    for name in _CANDIDATES:
        try:
            runs[name] = _try_kernel(name, config, rows, context)
        except RuntimeError as error:  # this build or shape has no such kernel
            print(f"attention: {name} is not usable ({str(error).splitlines()[0]})", flush=True)
    if not runs:
        return "default"
    best = min(runs, key=lambda name: runs[name].seconds)
    if best != "flash" and "flash" in runs and not _agree(runs[best].gradient, runs["flash"].gradient):
        print(f"attention: gradients of {best} differ from flash, so flash is used", flush=True)
        best = "flash"
    print("attention: " + ", ".join(f"{k} {t.seconds * 1e3:.2f} ms" for k, t in runs.items()) + f"; using {best}", flush=True)
    return best


@dataclass(frozen=True, slots=True)
class _KernelRun:
    seconds: float
    gradient: Tensor  # of the keys


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() < 0.05 * other.norm())


def _try_kernel(name: str, config: ModelSpec, rows: int, context: int) -> _KernelRun:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (rows * context, heads, config.head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, k, v = random(config.heads), random(config.kv_heads), random(config.kv_heads)
    attend = causal_attend(rows, context)
    begin = 0.0
    with kernel(name):
        for i in range(_REPEATS + 2):
            if i == 2:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            k.grad = None
            out = attend(0, q, k, v)
            torch.autograd.backward(out, v.detach().repeat_interleave(config.heads // config.kv_heads, dim=1))
    torch.cuda.synchronize()
    assert k.grad is not None
    return _KernelRun((time.perf_counter() - begin) / _REPEATS, k.grad.float())
