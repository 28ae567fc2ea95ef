"""A drafter as a prediction needs it: what its guesses were worth and what each part of its rounds costs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from outrider.bench.plan.formulas import best_length, break_even, expected_time
from outrider.bench.plan.prices import Prices
from outrider.bench.plan.trace import Guess, Trace

__all__ = ["Memory", "Profile"]

_NEAR = 128  # recorded guesses that speak for a place in the text
_SLACK = 8  # nodes of room that one of them may have had less


@dataclass(frozen=True, slots=True)
class Memory:
    """What a drafter needs beside the target, in bytes."""

    weights: int
    kv_per_token: int


@dataclass
class Profile:
    """All that is known of a drafter, or of plain decoding (`most` = 0)."""

    method: str
    most: int
    traces: list[Trace] = field(default_factory=list)
    prices: Prices = field(default_factory=Prices)
    firsts: list[tuple[int, float]] = field(default_factory=list)  # tokens of a prompt, seconds to its first token
    entries: list[tuple[int, float]] = field(default_factory=list)  # likewise, what its first proposal takes beyond others
    memory: Memory = Memory(0, 0)

    @cached_property
    def guesses(self) -> list[Guess]:
        """Every recorded guess."""
        return [guess for trace in self.traces for guess in trace.guesses]

    def law(self, most: int) -> Mapping[tuple[int, int], float]:
        """How often so many nodes are verified and so many of them accepted, when `most` may be drafted."""
        if most not in self._laws:
            found = Counter(guess.best(most) for guess in self.guesses if guess.room >= most) if most else None
            self._laws[most] = found or Counter({(0, 0): 1})
        return self._laws[most]

    def law_at(self, place: int, most: int) -> Mapping[tuple[int, int], float]:
        """The same after so many tokens: lookups guess better the more they have read."""
        able = [guess for guess in self.guesses if most and guess.room >= max(most - _SLACK, 1)]
        near = sorted(able, key=lambda guess: abs(guess.at - place))[:_NEAR]
        return Counter(_with_room(guess, most) for guess in near) or Counter({(0, 0): 1})

    @cached_property
    def _laws(self) -> dict[int, Mapping[tuple[int, int], float]]:
        return {}

    @cached_property
    def _spans(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def tokens(self, length: int) -> float:
        """Expected tokens of a round that may draft `length` nodes."""
        law = self.law(length)
        return 1.0 + sum(accepted * weight for (_, accepted), weight in law.items()) / sum(law.values())

    def round_s(self, length: int, batch: int = 1) -> float:
        """Expected seconds of such a round."""
        law = self.law(length)
        total = sum(weight * self.prices.round_s(length, nodes, batch) for (nodes, _), weight in law.items())
        return total / sum(law.values())

    def request_s(self, prompt: int, tokens: int, length: int) -> tuple[float, float]:
        """Seconds until the first token and in all, for a request of so many tokens."""
        first = _line(self.firsts, prompt)
        spent, _ = self.decoding(tokens, length)
        return first, first + spent + (_line(self.entries, prompt) if length else 0.0)

    def decoding(self, tokens: int, length: int) -> tuple[float, float]:
        """Seconds and rounds after the first token, the first proposal's extra time left out."""
        if (tokens, length) not in self._spans:
            self._spans[tokens, length] = expected_time(
                tokens - 1,
                lambda room: self.law_at(tokens - 1 - room, min(length, room)),
                lambda room, nodes: self.prices.round_s(min(length, room), nodes),
            )
        return self._spans[tokens, length]

    def speedup(self, plain: Profile, length: int, batch: int = 1) -> float:
        """Against plain rounds, for rounds that draft alike."""
        return self.tokens(length) * plain.round_s(0, batch) / self.round_s(length, batch)

    def best_length(self, batch: int = 1) -> int:
        """The draft length at which tokens come quickest."""
        lengths = range(self.most + 1)
        return best_length([self.tokens(k) for k in lengths], [self.round_s(k, batch) for k in lengths])

    def break_even(self, plain: Profile, most: int = 1024) -> int:
        """The largest batch at which some draft length is quicker than none."""
        lengths = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k < self.most} | {self.most})
        return break_even(lambda batch: max(self.speedup(plain, k, batch) for k in lengths), most)

    def by_position(self, most: int = 8) -> list[float]:
        """The chance of each position, once all before it were right, where something was guessed there."""
        out = []
        for depth in range(most):
            reached = [guess for guess in self.guesses if len(guess.path) >= depth and _depth(guess) > depth]
            if not reached:
                break
            out.append(sum(len(guess.path) > depth for guess in reached) / len(reached))
        return out

    def ranks(self, most: int = 6) -> list[float]:
        """The chance that a node's first, second, ... child, by claim, is the one that came true."""
        seen, true = 0, [0] * most
        for guess in self.guesses:
            children: dict[int, list[int]] = defaultdict(list)
            for node, parent in enumerate(guess.parents):
                children[parent].append(node)
            for parent in (-1, *guess.path):
                if own := sorted(children.get(parent, ()), key=lambda i: (-guess.survival[i], i)):
                    seen += 1
                    hit = next((rank for rank, node in enumerate(own) if node in guess.path), most)
                    if hit < most:
                        true[hit] += 1
        return [count / seen for count in true] if seen else []


def _with_room(guess: Guess, most: int) -> tuple[int, int]:
    """Nodes and accepted ones, if one that filled all the room it had would have filled a little more as well."""
    nodes, accepted = guess.best(most)
    return (most if nodes >= guess.room else nodes), accepted


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of a line through the points that a few far ones do not move: medians of slopes and of what is left."""
    if not points:
        return 0.0
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[:n] if i != j]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope * x + statistics.median(y - slope * own for own, y in points)


def _depth(guess: Guess) -> int:
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
