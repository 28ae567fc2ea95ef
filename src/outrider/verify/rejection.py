"""`rejection`: speculative sampling token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

A draft token x ~ q is accepted with probability min(1, p(x) / q(x)); the first one rejected is
replaced by a draw from the normalised positive part of p - q. The text has the target's distribution
as long as draft, coin and replacement are drawn from independent noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AcceptanceTest", "acceptance", "count", "ratios", "rejection_sample", "residual"]


def rejection_sample(p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: float) -> list[int]:
    """Speculative sampling of one chain of K draft tokens: the tokens to emit, between 1 and K + 1 of them.

    These are the accepted draft tokens, then one token of the target: a *recovered* token in the place of the first one
    rejected, or a *bonus* token where all were accepted. The function is pure, because all randomness is passed in.
    If the draft was drawn from q, and the coins and `last` are independent of it and uniform in (0, 1), the tokens have
    exactly the target's distribution.

    Args:
        p: (K + 1, V), the target's probabilities at each position, the last row after the whole draft.
        q: (K, V), the probabilities that each draft token was drawn from; one-hot for a drafter that does not sample.
        tokens: (K,) int64, the draft.
        coins: (K,), one number for each draft token, which is accepted where its coin is at most p(x) / q(x).
        last: the number that draws the token after the accepted ones.

    >>> p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    >>> q = torch.tensor([[0.2, 0.7, 0.1]])
    >>> draft = torch.tensor([1])  # the drafter likes token 1 more than the target: accepted with probability 0.3 / 0.7
    >>> rejection_sample(p, q, draft, coins=torch.tensor([0.4]), last=0.5)  # accepted, and a bonus token
    [1, 1]
    >>> rejection_sample(p, q, draft, coins=torch.tensor([0.9]), last=0.5)  # rejected: drawn from (p - q)+, [0.75, 0, 0.25]
    [0]
    """
    rule = acceptance(p, q, tokens)
    accepted = count(rule, coins)
    cumulative = rule.next[accepted].cumsum(0)
    final = int(torch.searchsorted(cumulative, last * float(cumulative[-1])))
    return [*tokens[:accepted].tolist(), final]


@dataclass(frozen=True, slots=True)
class AcceptanceTest:
    """What a rule does with one chain of K draft tokens, before any coin is tossed."""

    accept: Tensor  # (K,) float64, chance that the coin of each position succeeds
    next: Tensor  # (K + 1, V) float64, row i: probabilities of the token emitted after exactly i accepted ones


def acceptance(p: Tensor, q: Tensor, tokens: Tensor) -> AcceptanceTest:
    """The rule's coins and corrections, for p, q and tokens as in `rejection_sample`; every row of p and q sums to one."""
    p, q = p.double(), q.double()
    excess = (p[:-1] - q).clamp(min=0)
    return AcceptanceTest(ratios(p, q, tokens).clamp(max=1), torch.cat([residual(excess, p[:-1]), p[-1:]]))


def count(rule: AcceptanceTest, coins: Tensor) -> int:
    """Draft tokens accepted: those before the first failed coin. coins (K,) uniform in (0, 1)."""
    return int((coins <= rule.accept).long().cumprod(0).sum())


def ratios(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """p(x) / q(x) of the draft tokens, (K,); 0 where q could not have drawn the token."""
    columns = tokens[:, None]
    drafted = q.gather(1, columns)[:, 0]
    target = p[:-1].gather(1, columns)[:, 0]
    return torch.where(drafted > 0, target / drafted, 0.0)


def residual(excess: Tensor, p: Tensor) -> Tensor:
    """Rows of excess mass, normalised; p where there is none, which the coins then reach by rounding alone."""
    mass = excess.sum(1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)
