"""Optimisers: Muon for the matrices between hidden rows, AdamW for embeddings, outputs and norms.

Muon (Jordan et al. 2024) orthogonalises the momentum of each matrix by a quintic Newton-Schulz
iteration. Fused matrices (q/k/v, gate/up) are orthogonalised part by part, equal shapes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.model.decoder import Layer

__all__ = ["Muon", "OptimOptions", "build_optimizers", "orthogonalise", "scale_rates"]

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_BY_TOKEN = ("embedding", "output", "left", "right")  # matrices with a row per token; AdamW's


@dataclass(frozen=True, slots=True)
class OptimOptions:
    """Peak learning rates and decay. `kind` is "muon" or "adamw" (every parameter by AdamW)."""

    kind: str = "muon"
    lr: float = 0.012  # of matrices under Muon
    adam_lr: float = 2.5e-3  # of everything under AdamW
    weight_decay: float = 0.1  # times the learning rate, on matrices
    momentum: float = 0.95


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised. `parts[i]` are the row counts parameter i is cut into."""

    def __init__(self, params: Sequence[nn.Parameter], parts: Sequence[Sequence[int]], options: OptimOptions) -> None:
        super().__init__(params, {"lr": options.lr, "weight_decay": options.weight_decay, "momentum": options.momentum})
        self._parts = list(parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter."""
        assert closure is None, "Muon takes no closure"
        (group,) = self.param_groups
        params: list[Tensor] = group["params"]
        grads = [param.grad for param in params if param.grad is not None]
        assert len(grads) == len(params), "every matrix needs a gradient"
        momenta = [self._momentum(param) for param in params]
        torch._foreach_lerp_(momenta, grads, 1.0 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
        targets, directions = self._cut(params), self._cut(nesterov)
        updates = _orthogonalise_all(directions)
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(targets, updates, alpha=-group["lr"])

    def _momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"]
        return momentum

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [part for tensor, rows in zip(tensors, self._parts, strict=True) for part in torch.split(tensor, list(rows))]


def orthogonalise(stack: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to a stack (n, rows, columns), approximately."""
    a, b, c = _QUINTIC
    tall = stack.shape[-2] > stack.shape[-1]
    x = (stack.mT if tall else stack).to(torch.bfloat16 if stack.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(stack.dtype)
    return out


def build_optimizers(module: nn.Module, options: OptimOptions) -> list[torch.optim.Optimizer]:
    """Muon over the matrices between hidden rows and AdamW over the other parameters, or AdamW over all."""
    trained = [param for param in module.parameters() if param.requires_grad]
    parts = {} if options.kind == "adamw" else _matrix_parts(module)
    matrices = [param for param in trained if param in parts]
    others = [param for param in trained if param not in parts]
    decayed = [param for param in others if param.dim() > 1 and options.kind == "adamw"]
    kept = [param for param in others if not (param.dim() > 1 and options.kind == "adamw")]
    groups: list[dict[str, Any]] = [
        {"params": kept, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": options.weight_decay},
    ]
    fused = all(param.is_cuda for param in others)
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=options.adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)
    built: list[torch.optim.Optimizer] = [adam]
    if matrices:
        built.append(Muon(matrices, [parts[param] for param in matrices], options))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return built


def scale_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def _matrix_parts(module: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """Matrices between hidden rows, and the row counts of what is fused in those of layers."""
    parts: dict[Tensor, tuple[int, ...]] = {}
    for layer in module.modules():
        if isinstance(layer, Layer):
            a, m = layer.spec.attention, layer.spec.mlp
            parts |= {layer.qkv: (a.q_width, a.kv_width, a.kv_width), layer.gate_up: (m.width,) * (2 if m.gated else 1)}
            parts |= {matrix: (matrix.shape[0],) for matrix in (layer.out, layer.down)}
    for name, param in module.named_parameters():
        if param.dim() == 2 and param not in parts and name.rsplit(".", 1)[-1] not in _BY_TOKEN:
            parts[param] = (param.shape[0],)
    return {param: rows for param, rows in parts.items() if param.requires_grad}


def _orthogonalise_all(directions: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonal updates of many matrices, equal shapes in one stack, scaled for their aspect."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, direction in enumerate(directions):
        by_shape.setdefault(direction.shape, []).append(i)
    updates: dict[int, Tensor] = {}
    for shape, members in by_shape.items():
        scale = math.sqrt(max(1.0, shape[0] / shape[1]))
        stack = orthogonalise(torch.stack([directions[i] for i in members])).mul_(scale)
        updates |= dict(zip(members, stack.unbind(), strict=True))
    return [updates[i] for i in range(len(directions))]
