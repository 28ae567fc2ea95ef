"""The arithmetic of speculation: expected tokens, the best draft, where it stops paying. Pure functions, no torch.

s_j is the chance that the first j guesses of a chain are all right (its survival), E the expected tokens of a round,
R its time, T the time of a plain one. The speed-up is E * T / R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

__all__ = [
    "FORMULAS",
    "best_length",
    "best_tree",
    "break_even",
    "closed_form_length",
    "expected_tokens",
    "survival_of",
]

FORMULAS = """\
s_j = a_1 * a_2 * ... * a_j               survival: a_i is the chance of guess i once all before it were right
E(K) = 1 + s_1 + ... + s_K                expected tokens of a round that drafts K, the target's token included
E(tree) = 1 + sum of survival over nodes  a node's survival is the product of the chances along its path
R(K) = propose(K) + forward(1 + K) + host the time of a round; forward by rows, as measured
speed-up = E(K) * R(0) / R(K)             against plain rounds of the same engine
best K: go on while s_j / E(j - 1) > (R(j) - R(j - 1)) / R(j - 1)
closed form (one chance a, draft cost c in plain passes, rows free): K = (u - 1) / L - 1 / c
        with L = -ln a and u = -W(-exp(-1 - L (1 / c - 1))), W the lower branch of Lambert's function
batch B: speed-up = E(K) * R(0, B) / R(K, B), with forward(B (1 + K)); break-even is the last B where some K pays
best tree (ranks p_1 >= p_2 >= ...: the chance that the j-th candidate is right): dynamic programming over nodes,
        T(m) = 1 + F(m - 1, 1), F(n, j) = max over 1 <= y <= n of p_j T(y) + F(n - y, j + 1)"""


def survival_of(chances: float | Sequence[float], length: int) -> list[float]:
    """s_1 .. s_length from one chance for all positions, or chances by position, the last going on."""
    shares = [chances] if isinstance(chances, int | float) else list(chances)
    out, alive = [], 1.0
    for i in range(length):
        alive *= shares[min(i, len(shares) - 1)]
        out.append(alive)
    return out


def expected_tokens(survival: Sequence[float], length: int | None = None) -> float:
    """E(K) of a chain."""
    return 1.0 + sum(survival[:length])


def best_length(tokens: Sequence[float], times: Sequence[float]) -> int:
    """The K that makes E(K) / R(K) largest; `tokens` and `times` begin with K = 0."""
    return max(range(len(tokens)), key=lambda k: (tokens[k] / times[k], -k))


def closed_form_length(chance: float, cost: float) -> float:
    """The best K where every guess has the same chance and costs the same, and rows are free; 0 where none pays."""
    if chance <= cost:
        return 0.0
    if chance >= 1.0 or cost <= 0.0:
        return math.inf
    slope = -math.log(chance)
    return max((_minus_lambert(1.0 + slope * (1.0 / cost - 1.0)) - 1.0) / slope - 1.0 / cost, 0.0)


def _minus_lambert(y: float) -> float:
    """u > 1 with u - ln u = y: that is -W(-exp(-y)) on the lower branch, which neither over- nor underflows."""
    u = y + math.log(y) + 1.0
    for _ in range(50):
        u -= (u - math.log(u) - y) / (1.0 - 1.0 / u)
    return u


def break_even(speedup: Callable[[int], float], max_batch: int = 4096) -> int:
    """The largest batch at which drafting still pays; 0: not even alone. `speedup` falls as batches grow."""
    low, high = 0, 1
    while high <= max_batch and speedup(high) > 1.0:
        low, high = high, 2 * high
    high = min(high, max_batch + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if speedup(middle) > 1.0 else (low, middle)
    return low


def best_tree(ranks: Sequence[float], nodes: int, depth: int | None = None) -> tuple[float, list[int]]:
    """Expected tokens and parents of the best static tree, where a node's j-th child is right with chance `ranks[j]`."""
    chances, deepest = tuple(ranks), depth if depth is not None else nodes

    @cache
    def subtree(size: int, left: int) -> float:
        """Tokens expected below an accepted node, itself counted, with `size` nodes in all."""
        return 1.0 + forest(size - 1, 0, left)[0]

    @cache
    def forest(size: int, rank: int, left: int) -> tuple[float, int]:
        """The best use of `size` nodes as children from a rank on: tokens, and the size of the first."""
        if size == 0 or rank == len(chances) or left == 0:
            return 0.0, 0
        first = (chances[rank] * subtree(y, left - 1) + forest(size - y, rank + 1, left)[0] for y in range(1, size + 1))
        tokens, y = max((value, -y) for y, value in enumerate(first, 1))
        return tokens, -y

    parents: list[int] = []

    def plant(parent: int, size: int, left: int) -> None:
        rank = 0
        while size and (first := forest(size, rank, left)[1]):
            parents.append(parent)
            plant(len(parents) - 1, first - 1, left - 1)
            size, rank = size - first, rank + 1

    plant(-1, nodes, deepest)
    return subtree(nodes + 1, deepest), parents
