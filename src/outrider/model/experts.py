"""Mixtures of experts in torch: which experts a row goes through, and the sum of what they give.

A row's bits do not depend on the other rows: each product is of one expert and the rows that chose it, and a row's experts are
added in order of their numbers, the shared expert last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.model.spec import FeedForward, Router
from outrider.ops import Ops

if TYPE_CHECKING:
    from outrider.model.decoder import Layer

__all__ = ["Routes", "activated", "mixed_experts", "routes_of"]

_TINY = 1e-20  # added to a sum of weights that may be zero


class Routes(NamedTuple):
    """The experts of rows, in order of their numbers, and the weights of their results."""

    experts: Tensor  # (N, chosen)
    weights: Tensor  # (N, chosen) float32


def mixed_experts(layer: Layer, x: Tensor, ops: Ops) -> Tensor:
    """What the experts of each row give, weighted and added, (N, hidden) float32."""
    m, router = layer.spec.mlp, layer.spec.mlp.router
    assert router is not None
    assert layer.router is not None
    logits = ops.linear(x, layer.router).float()
    routes = routes_of(logits[:, : router.experts], router, layer.router_bias, layer.correction, ops)
    out = x.new_zeros(x.shape[0], x.shape[1], dtype=torch.float32)
    for expert in sorted(set(routes.experts.flatten().tolist())):
        layer.touched += 1
        rows, places = torch.where(routes.experts == expert)
        opened, closing = layer.expert_products(expert)
        given = ops.linear(activated(ops.linear(x[rows], *opened), m, ops), *closing).float()
        out = out.index_add(0, rows, given * routes.weights[rows, places, None])
    if layer.shared_gate_up is None or layer.shared_down is None:
        return out
    shared = ops.linear(activated(ops.linear(x, layer.shared_gate_up), m, ops), layer.shared_down).float()
    return out + (shared * ops.sigmoid(logits[:, router.experts :]) if m.shared_gate else shared)


def activated(x: Tensor, m: FeedForward, ops: Ops) -> Tensor:
    """What follows the first product of a feed-forward part, float32."""
    if m.gate_scale != 1.0:
        gate, up = x.float().chunk(2, dim=-1)
        x = torch.cat((gate * m.gate_scale, up), -1)
    if m.clamp is None:
        return ops.activate(x, m.activation, m.gated)
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=m.clamp.limit), up.clamp(-m.clamp.limit, m.clamp.limit)
    return (up + 1.0) * (gate * ops.sigmoid(gate * m.clamp.alpha))


def routes_of(logits: Tensor, router: Router, bias: Tensor | None, correction: Tensor | None, ops: Ops) -> Routes:
    """Experts and weights of rows by their logits (N, experts) float32."""
    if bias is not None:
        logits = logits + bias
    if router.scores == "sparsemixer":
        return _in_order(*_sparsemixer(logits, router.closeness), router)
    scores = ops.sigmoid(logits) if router.scores == "sigmoid" else (logits - logits.amax(-1, keepdim=True)).exp()
    choosing = scores if router.scores == "sigmoid" else logits  # softmax keeps their order, but may round two to one
    if correction is not None:
        choosing = (scores if router.scores == "sigmoid" else scores / _total(scores)) + correction
    if router.groups > 1:
        choosing = _within_groups(choosing, router)
    experts = _best(choosing, router.chosen)
    if not router.normalised and router.scores == "softmax":
        scores = scores / _total(scores)
    return _in_order(experts, scores.gather(1, experts), router)


def _in_order(experts: Tensor, weights: Tensor, router: Router) -> Routes:
    """Routes by rising number, with the weights that they end up with."""
    experts, order = experts.sort(dim=1)
    weights = weights.gather(1, order)
    if router.normalised and router.scores != "sparsemixer":
        weights = weights / (_total(weights) + _TINY)
    return Routes(experts, weights * router.scale if router.scale != 1.0 else weights)


def _best(scores: Tensor, count: int) -> Tensor:
    """The numbers of the largest scores of each row, ties to the lower one."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _total(x: Tensor) -> Tensor:
    """The sum of each row, one value after the other."""
    return x.cumsum(-1)[..., -1:]


def _within_groups(scores: Tensor, router: Router) -> Tensor:
    """The scores of experts in the best groups; others are never chosen."""
    by_group = scores.view(len(scores), router.groups, -1)
    best = by_group.sort(dim=-1, descending=True).values
    kept = _best(best[..., 0] + best[..., 1], router.chosen_groups)
    open_groups = torch.zeros(len(scores), router.groups, dtype=torch.bool, device=scores.device).scatter(1, kept, True)
    masked: Tensor = by_group.masked_fill(~open_groups[..., None], -torch.inf)
    return masked.flatten(1)


def _sparsemixer(logits: Tensor, closeness: float) -> tuple[Tensor, Tensor]:
    """The best expert and the second; the weight of each is its softmax among those that are close to it (arXiv 2409.12136)."""
    experts, weights, left = [], [], logits
    for _ in range(2):
        expert = _best(left, 1)
        top = left.gather(1, expert)
        far = (top - logits) / logits.abs().maximum(top) > closeness
        close = (left.masked_fill(far, -torch.inf) - top).exp()
        experts.append(expert)
        weights.append(close.gather(1, expert) / _total(close))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(experts, 1), torch.cat(weights, 1)
