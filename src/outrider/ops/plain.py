"""Linear, norm, rotary and activation in plain torch.

Row invariance on a CPU: torch picks other kernels (other bits) for small row counts, so `Blocked`
runs every product in blocks of exactly BLOCK rows. Activations avoid torch's fused silu, whose
scalar tail differs from its vector body; exp, division and multiplication do not.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.ops.native import Core, find_core

__all__ = ["BLOCK", "Blocked", "Native", "Ops", "Plain", "rotate", "serving_ops", "threads_used"]

_PATHS = ("auto", "native", "torch")

BLOCK = 16  # rows of every product; batches are padded to a multiple of it


class Ops(Protocol):
    """What the decoder asks of a device. Rows are tokens: x is (N, width)."""

    core: Core | None  # runs whole stacks and packed products where there is one

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gated(self, gate_up: Tensor) -> Tensor: ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class Plain:
    """Ordinary torch. Differentiable; rows may know their neighbours."""

    core: Core | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times weight transposed, computed in the weight's dtype."""
        return F.linear(x.to(weight.dtype), weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, in float32."""
        x = x.float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half, in float32."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding of (N, heads, head_dim), in float32."""
        return rotate(x, cos, sin)


class Blocked(Plain):
    """Torch with rows that do not know their neighbours. x has a multiple of BLOCK rows."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Every product has BLOCK rows, so that every row meets the same kernel."""
        x = x.to(weight.dtype)
        rows = x.shape[0]
        assert rows % BLOCK == 0, f"{rows} rows are not a multiple of {BLOCK}"
        if rows == BLOCK:
            return F.linear(x, weight, bias)
        out = x.new_empty(rows, weight.shape[0])
        for start in range(0, rows, BLOCK):
            out[start : start + BLOCK] = F.linear(x[start : start + BLOCK], weight, bias)
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu by exp and division: their bits do not depend on where in memory an element lies."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return gate / torch.exp(-gate).add_(1.0) * up


class Native(Blocked):
    """The native core for stacks and products, torch for what is left."""

    def __init__(self, core: Core) -> None:
        self.core = core


def serving_ops(path: str | None = None) -> Ops:
    """What serves: "native", "torch", or "auto" for the core where there is one. Default: OUTRIDER_OPS, or auto."""
    path = path or os.environ.get("OUTRIDER_OPS", "auto")
    if path not in _PATHS:
        raise InvalidParameter("ops", f"unknown {path!r}; known: {', '.join(_PATHS)}")
    core, found = (None, "") if path == "torch" else find_core()
    if core is None and path == "native":
        raise InvalidParameter("ops", f"the native core cannot serve: {found}")
    if core is None:
        return Blocked()
    core.take_threads()
    return Native(core)


def threads_used() -> int:
    """Processor threads that products run on."""
    core = find_core()[0]
    return max(torch.get_num_threads(), 1 if core is None else core.threads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of the last dimension; cos and sin are (N, head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
