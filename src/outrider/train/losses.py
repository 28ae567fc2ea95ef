"""Losses: how far the draft distribution q is from the target distribution p, per drafted token.

The acceptance of one drafted token is the overlap of the two distributions, 1 - TV. KL learns fast from fresh weights, but
TV decides acceptance: "mix" goes from KL to TV as acceptance grows (LK losses, 2602.23881). "greedy" is about the target's
most probable token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import UnknownMethod

__all__ = ["LOSSES", "Divergence", "divergence"]

LOSSES = ("kl", "mix", "lk", "greedy")
_MIX_RATE = 3.0

Divergence = str


def divergence(kind: Divergence, target: Tensor, draft: Tensor, counted: Tensor | None = None, depths: int = 1) -> Tensor:
    """Mean over rows of (N, V) logits; `counted` (N,) are weights of rows.

    kl: KL(p, q). mix: w KL + (1 - w) TV with w = exp(-3 acceptance). lk: -log acceptance.
    Row i is of depth i % depths; `mix` has a weight w for each depth.
    greedy: -log q of p's most probable token.
    """
    if kind not in LOSSES:
        raise UnknownMethod("loss", kind, list(LOSSES))
    log_q = torch.log_softmax(draft.float(), -1)
    if kind == "greedy":
        return _mean(-log_q.gather(-1, target.argmax(-1, keepdim=True))[..., 0], counted)
    log_p = torch.log_softmax(target.float(), -1)
    p = log_p.exp()
    if kind == "kl":
        return _mean((p * (log_p - log_q)).sum(-1), counted)
    variation = 0.5 * (p - log_q.exp()).abs().sum(-1)
    if kind == "lk":
        return _mean(-torch.log((1.0 - variation).clamp_min(1e-6)), counted)
    weight = torch.exp(-_MIX_RATE * _by_depth(1.0 - variation.detach(), counted, depths)).repeat(len(variation) // depths)
    return _mean(weight * (p * (log_p - log_q)).sum(-1) + (1.0 - weight) * variation, counted)


def _mean(values: Tensor, counted: Tensor | None) -> Tensor:
    return _by_depth(values, counted, 1)[0]


def _by_depth(values: Tensor, counted: Tensor | None, depths: int) -> Tensor:
    """The means (depths,) of values (N,)."""
    by_depth = values.view(-1, depths)
    if counted is None:
        return by_depth.mean(0)
    weights = counted.view(-1, depths)
    return (by_depth * weights).sum(0) / weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
