"""What a model pair costs before anything is loaded: bytes read, arithmetic, memory, and the draft length that pays.

A forward takes as long as its slower part: reading the weights and the KV, or the arithmetic of its rows. Both are counted
in bytes: a device does the arithmetic of `ridge` rows in the time in which it reads the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.bench.plan.formulas import best_length, break_even, expected_tokens, survival_of
from outrider.model.published import Measured, Published

__all__ = ["CONTEXT", "PairCosts", "Shape", "chance_of", "guessed_chance"]

CONTEXT = 4096
_WEIGHT = 2  # bytes, as bfloat16
_LONGEST = 16
_MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by what its forwards read and compute."""

    parameters: int
    kv_bytes_per_token: int
    active: int  # weights that one token uses; all of them where there are no experts
    experts: tuple[int, int] = (1, 1)  # of each layer, and how many of them a token uses

    @classmethod
    def of(cls, model: Published) -> Shape:
        kv = 2 * model.layers * model.kv_heads * model.head_dim * _WEIGHT
        return cls(model.parameters, kv, (model.active or model.millions) * 10**6, model.experts)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _WEIGHT

    def forward(self, rows: int, sequences: int, ridge: float) -> float:
        """Time of a forward, in bytes read."""
        every, used = self.experts
        weights = float(self.parameters)
        if every > used:  # more rows touch more experts
            expert = (self.parameters - self.active) / (every - used)
            weights = self.active + expert * (every * (1.0 - (1.0 - used / every) ** rows) - used)
        reading = weights * _WEIGHT + sequences * CONTEXT * self.kv_bytes_per_token
        return max(reading, self.active * _WEIGHT * rows / ridge)


@dataclass(frozen=True, slots=True)
class PairCosts:
    """A target and its draft model on a device that does the arithmetic of `ridge` rows while it reads the weights once."""

    target: Shape
    draft: Shape
    ridge: float
    in_blocks: bool = False  # a draft of any length is one forward, of as many rows

    def speedup(self, chance: float, length: int, batch: int = 1) -> float:
        """A draft token is a forward of the draft model over all sequences, so proposals grow with the batch too."""
        tokens = expected_tokens(survival_of(chance, length))
        plain = self.target.forward(batch, batch, self.ridge)
        forwards, rows = (1, batch * length) if self.in_blocks else (length, batch)
        proposal = forwards * self.draft.forward(rows, batch, self.ridge)
        return tokens * plain / (proposal + self.target.forward(batch * (1 + length), batch, self.ridge))

    def best(self, chance: float, batch: int = 1) -> tuple[int, float]:
        """The draft length with the highest speed-up; 0 and 1 where none pays."""
        speedups = [1.0, *(self.speedup(chance, length, batch) for length in range(1, _LONGEST + 1))]
        length = best_length(speedups, [1.0] * len(speedups))
        return length, speedups[length]

    def pays(self, chance: float, room: int) -> tuple[int, int]:
        """The first and the last batch size, up to `room`, of the range in which drafting pays most; 0 and 0 where there is none.

        With experts there may be two ranges: one sequence reads few of them, and many sequences read all of them anyway.
        """
        sizes = [size for size in _DOUBLED if size < room] + [room] if room else []
        gains = [self.best(chance, size)[1] for size in sizes]
        if max(gains, default=1.0) <= 1.0:
            return 0, 0
        best = gains.index(max(gains))
        first = next((i + 1 for i in range(best, -1, -1) if gains[i] <= 1.0), 0)
        last = next((i - 1 for i in range(best, len(gains)) if gains[i] <= 1.0), len(gains) - 1)
        if last == len(gains) - 1:
            return sizes[first], room
        beyond = break_even(lambda more: self.best(chance, sizes[last] - 1 + more)[1], sizes[last + 1] - sizes[last])
        return sizes[first], sizes[last] - 1 + beyond

    def concurrency(self, memory: float, with_draft: bool = True) -> int:
        """Sequences of `CONTEXT` tokens whose KV fits beside the weights."""
        models = (self.target, self.draft) if with_draft else (self.target,)
        room = memory - sum(model.weight_bytes for model in models)
        return max(int(room / (CONTEXT * sum(model.kv_bytes_per_token for model in models))), 0)


_DOUBLED = tuple(2**i for i in range(int(math.log2(_MAX_BATCH)) + 1))


def guessed_chance(times_smaller: float, same_line: bool) -> float:
    """A prior for the chance that a draft token is accepted: larger drafts, and those trained alike, are right more often."""
    return max(0.9 - 0.1 * math.log10(max(times_smaller, 1.0)) - (0.0 if same_line else 0.1), 0.3)


def chance_of(measured: Measured, guess: float) -> float:
    """The chance of each token behind a published rate: rate = (a + a^2 + ... + a^K) / K.

    Where the length K is not stated, the rate is only a lower bound of the chance.
    """
    if measured.length is None:
        return max(measured.rate, guess)
    low, high = measured.rate, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        rate = sum(survival_of(middle, measured.length)) / measured.length
        low, high = (middle, high) if rate < measured.rate else (low, middle)
    return round(low, 4)
