"""`block`: block verification of one chain (Sun et al. 2403.10444).

A later success redeems an earlier failure, which accepts at least as many tokens as `rejection`
for every p and q, and as many as any rule can for one sampled chain. The text has the target's distribution.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from outrider.verify.rejection import AcceptanceTest, ratios, residual

__all__ = ["acceptance", "count"]


def acceptance(p: Tensor, q: Tensor, tokens: Tensor) -> AcceptanceTest:
    """The rule's coins and corrections; shapes and meanings as in `rejection.acceptance`.

    With r_0 = 1 and r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), coin i succeeds with chance
    h_i = S_i / (S_i + 1 - r_i), where S_i is the mass of (r_i p_{i+1} - q_{i+1})+, and h_K = r_K.
    The correction after i tokens is that positive part, normalised.
    """
    p, q = p.double(), q.double()
    r = _running(ratios(p, q, tokens))
    excess = (r[:-1, None] * p[:-1] - q).clamp(min=0)
    after = torch.cat([residual(excess, p[:-1]), p[-1:]])
    mass, inner = excess.sum(1)[1:], r[1:-1]
    chance = torch.where(inner >= 1, 1.0, mass / (mass + 1 - inner))
    return AcceptanceTest(torch.cat([chance, r[1:][-1:]]), after)


def count(rule: AcceptanceTest, coins: Tensor) -> int:
    """Draft tokens accepted: up to the last coin that succeeds, whatever came before it. coins (K,)."""
    kept = torch.nonzero(coins <= rule.accept)
    return int(kept[-1]) + 1 if len(kept) else 0


def _running(ratio: Tensor) -> Tensor:
    """r_0 .. r_K, (K + 1,)."""
    steps = accumulate(ratio.tolist(), lambda r, step: min(r * step, 1.0), initial=1.0)  # in this order NaN stays NaN
    return torch.tensor(list(steps), dtype=torch.float64)
