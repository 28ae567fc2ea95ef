"""Linear, norm, rotary and activation in plain torch.

Row invariance on a CPU: torch uses other kernels, with other bits, for some row counts. So `Blocked` runs products only at
row counts whose bits were seen to agree (ops/products.py, ops/row_counts.py). Activations avoid torch's fused silu, whose
scalar tail differs from its vector body; those of exp, division and multiplication agree.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.ops.native import Core, Threads, find_core
from outrider.ops.products import Product
from outrider.ops.scan import Paths, ScanRows, native_scan, scan

__all__ = ["Blocked", "Native", "Ops", "Plain", "missing_core", "serving_ops", "threads_used"]

_PATHS = ("auto", "native", "torch")
_CUBIC, _TWICE_ROOT = 0.044715, -2.0 * math.sqrt(2.0 / math.pi)  # of the tanh approximation of gelu
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class Ops(Protocol):
    """The operations that the decoder needs. Rows are tokens: x is (N, width)."""

    core: Core | None  # runs whole stacks and packed products where there is one

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def activate(self, x: Tensor, activation: str, gated: bool) -> Tensor: ...

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def scan(
        self, x: ScanRows, memories: Sequence[Tensor], paths: Paths, kept: frozenset[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]: ...


class Plain:
    """Ordinary torch: differentiable, and not row-invariant."""

    core: Core | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times weight transposed, computed in the weight's dtype."""
        return F.linear(x.to(weight.dtype), weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, in float32."""
        x = x.float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension, in float32."""
        scaled = F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
        return scaled if bias is None else scaled + bias.float()

    def activate(self, x: Tensor, activation: str, gated: bool) -> Tensor:
        """The activation of x, or of its first half times the second half, in float32."""
        if not gated:
            return self._activation(x.float(), activation)
        gate, up = x.float().chunk(2, dim=-1)
        return self._activation(gate, activation) * up

    def _activation(self, x: Tensor, activation: str) -> Tensor:
        return _ACTIVATIONS[activation](x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x)) in float32."""
        return x.float().sigmoid()

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs (i, i + half) of the last dimension of (N, heads, head_dim), in float32.

        cos and sin are (N, 1, head_dim): both dimensions of a pair have its cosine, the first its negative sine.
        """
        x = x.float()
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin

    def scan(
        self, x: ScanRows, memories: Sequence[Tensor], paths: Paths, kept: frozenset[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """A linear recurrence; see ops/scan.py."""
        return scan(x, memories, paths, kept)


class Blocked(Plain):
    """Row-invariant torch. Recurrences are run by a native core, where one is given."""

    def __init__(self, scans: Core | None = None) -> None:
        self._scans = None if scans is None else (scans, Threads(scans))
        self._products: dict[int, Product] = {}  # by the id of a matrix that is alive

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product at row counts whose bits agree. A matrix is prepared at its first use."""
        product = self._products.get(id(weight))
        if product is None:
            product = self._products[id(weight)] = Product(weight, bias)
            weakref.finalize(weight, self._products.pop, id(weight), None)
        return product(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The operations of `Plain.rms_norm` in one call of torch, which runs them one by one on a CPU."""
        return torch.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)

    def _activation(self, x: Tensor, activation: str) -> Tensor:
        """The fused kernels' bits depend on where in memory an element lies; those of exp, erf and division do not."""
        if activation == "silu":
            return x / x.neg().exp_().add_(1.0)
        if activation == "gelu_tanh":  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 u)
            return x / torch.exp(x * (x * x * _CUBIC + 1.0) * _TWICE_ROOT).add_(1.0)
        if activation == "gelu":
            return torch.erf(x * math.sqrt(0.5)).add_(1.0) * x * 0.5
        return super()._activation(x, activation)

    def scan(
        self, x: ScanRows, memories: Sequence[Tensor], paths: Paths, kept: frozenset[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        if self._scans is None:
            return super().scan(x, memories, paths, kept)
        return native_scan(*self._scans, x, memories, paths, kept)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.float().neg().exp_().add_(1.0).reciprocal_()


class Native(Blocked):
    """The native core for stacks and products, torch for all other operations."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core


def serving_ops(path: str | None = None) -> Ops:
    """The ops that serve: "native", "torch", or "auto" for the core where it is available. Default: OUTRIDER_OPS, or auto."""
    path = path or os.environ.get("OUTRIDER_OPS", "auto")
    if path not in _PATHS:
        raise InvalidParameter("ops", f"unknown {path!r}; known: {', '.join(_PATHS)}")
    core, reason = (None, "") if path == "torch" else find_core()
    if core is None and path == "native":
        raise InvalidParameter("ops", f"the native core cannot serve: {reason}")
    if core is None:
        return Blocked()
    core.take_threads()
    return Native(core)


def missing_core() -> str | None:
    """Why torch decodes and not the native core, and what to do about it; None where the core does."""
    if serving_ops().core is not None:
        return None
    core, reason = find_core()
    if core is not None:
        return "OUTRIDER_OPS=torch is set; unset it to use the core"
    cure = "install a C++ compiler, then outrider again" if reason.startswith("not built") else "`outrider doctor` says more"
    return f"{reason}; {cure}"


def threads_used() -> int:
    """Processor threads that products run on."""
    core = find_core()[0]
    return max(torch.get_num_threads(), 1 if core is None else core.threads)
