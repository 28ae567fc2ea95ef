"""`rejection`: speculative sampling token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

A draft token x ~ q is kept with probability min(1, p(x) / q(x)); the first one refused is
replaced by a draw from the normalised positive part of p - q. The text has the target's law
as long as draft, coin and replacement are drawn from independent noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Law", "count", "law", "ratios", "residual"]


@dataclass(frozen=True, slots=True)
class Law:
    """What a rule does with one chain of K draft tokens, before any coin is tossed."""

    accept: Tensor  # (K,) float64, chance that the coin of each position succeeds
    next: Tensor  # (K + 1, V) float64, row i: law of the token emitted after exactly i accepted ones


def law(p: Tensor, q: Tensor, tokens: Tensor) -> Law:
    """The rule's coins and corrections; every row of p and q sums to one.

    p (K + 1, V): the target's processed laws, the last one after the whole draft.
    q (K, V): the laws the draft tokens were drawn from, one-hot for a drafter that does not sample.
    tokens (K,) int64.
    """
    p, q = p.double(), q.double()
    excess = (p[:-1] - q).clamp(min=0)
    return Law(ratios(p, q, tokens).clamp(max=1), torch.cat([residual(excess, p[:-1]), p[-1:]]))


def count(law: Law, coins: Tensor) -> int:
    """Draft tokens accepted: those before the first failed coin. coins (K,) uniform in (0, 1)."""
    kept = (coins <= law.accept).to(torch.int64)
    return int(kept.cumprod(0).sum())


def ratios(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x) of the draft tokens, (K,); 0 where q could not have drawn the token."""
    own = tokens[:, None]
    drawn = q.gather(1, own)[:, 0]
    wanted = p[:-1].gather(1, own)[:, 0]
    return torch.where(drawn > 0, wanted / drawn, 0.0)


def residual(excess: Tensor, p: Tensor) -> Tensor:
    """Rows of excess mass, normalised; p where there is none, which the coins then reach by rounding alone."""
    mass = excess.sum(1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)
