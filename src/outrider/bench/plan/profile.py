"""A drafter as a prediction needs it: what its drafts came to and what each part of its rounds costs."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from outrider.bench.plan.costs import RoundCosts
from outrider.bench.plan.formulas import best_length, break_even, expected_time
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.core import depths

__all__ = ["Memory", "Profile"]

_NEAR = 128  # recorded drafts that speak for a place in the text
_SLACK = 8  # nodes of room that one of them may have had less


@dataclass(frozen=True, slots=True)
class Memory:
    """What a drafter needs beside the target, in bytes."""

    weights: int
    kv_per_token: int


@dataclass
class Profile:
    """All that is known of a drafter, or of plain decoding (`max_length` = 0)."""

    method: str
    max_length: int
    traces: list[Trace] = field(default_factory=list)
    costs: RoundCosts = field(default_factory=RoundCosts)
    firsts: list[tuple[int, float]] = field(default_factory=list)  # tokens of a prompt, seconds to its first token
    entries: list[tuple[int, float]] = field(default_factory=list)  # likewise, what its first proposal takes beyond others
    memory: Memory = Memory(0, 0)

    @cached_property
    def drafts(self) -> list[DraftRecord]:
        """Every recorded draft."""
        return [draft for trace in self.traces for draft in trace.drafts]

    def outcomes(self, max_length: int) -> Mapping[tuple[int, int], float]:
        """How often each (nodes verified, nodes accepted) occurs, when up to `max_length` may be drafted."""
        if max_length not in self._outcomes:
            counts = Counter(draft.best(max_length) for draft in self.drafts if draft.room >= max_length) if max_length else None
            self._outcomes[max_length] = counts or Counter({(0, 0): 1})
        return self._outcomes[max_length]

    def outcomes_at(self, place: int, max_length: int) -> Mapping[tuple[int, int], float]:
        """The outcomes near a position in the text: lookups draft better the more they have read."""
        able = [draft for draft in self.drafts if max_length and draft.room >= max(max_length - _SLACK, 1)]
        near = sorted(able, key=lambda draft: abs(draft.at - place))[:_NEAR]
        return Counter(_with_room(draft, max_length) for draft in near) or Counter({(0, 0): 1})

    @cached_property
    def _outcomes(self) -> dict[int, Mapping[tuple[int, int], float]]:
        return {}

    @cached_property
    def _spans(self) -> dict[tuple[int, int], tuple[float, float]]:
        return {}

    def tokens(self, length: int) -> float:
        """Expected tokens of a round that may draft `length` nodes."""
        outcomes = self.outcomes(length)
        return 1.0 + sum(accepted * weight for (_, accepted), weight in outcomes.items()) / sum(outcomes.values())

    def round_s(self, length: int, batch: int = 1) -> float:
        """Expected seconds of such a round."""
        outcomes = self.outcomes(length)
        total = sum(weight * self.costs.round_s(length, nodes, batch) for (nodes, _), weight in outcomes.items())
        return total / sum(outcomes.values())

    def request_s(self, prompt: int, tokens: int, length: int) -> tuple[float, float]:
        """Seconds until the first token and in all, for a request with this many output tokens."""
        first = _line(self.firsts, prompt)
        spent, _ = self.decoding(tokens, length)
        return first, first + spent + (_line(self.entries, prompt) if length else 0.0)

    def decoding(self, tokens: int, length: int) -> tuple[float, float]:
        """Seconds and rounds after the first token, the first proposal's extra time left out."""
        if (tokens, length) not in self._spans:
            self._spans[tokens, length] = expected_time(
                tokens - 1,
                lambda room: self.outcomes_at(tokens - 1 - room, min(length, room)),
                lambda room, nodes: self.costs.round_s(min(length, room), nodes),
            )
        return self._spans[tokens, length]

    def speedup(self, plain: Profile, length: int, batch: int = 1) -> float:
        """Against plain rounds, for rounds that draft alike."""
        return self.tokens(length) * plain.round_s(0, batch) / self.round_s(length, batch)

    def best_length(self, batch: int = 1) -> int:
        """The draft length at which tokens come quickest."""
        lengths = range(self.max_length + 1)
        return best_length([self.tokens(k) for k in lengths], [self.round_s(k, batch) for k in lengths])

    def break_even(self, plain: Profile, max_batch: int = 1024) -> int:
        """The largest batch at which some draft length is quicker than none."""
        lengths = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k < self.max_length} | {self.max_length})
        return break_even(lambda batch: max(self.speedup(plain, k, batch) for k in lengths), max_batch)

    def by_position(self, max_length: int = 8) -> list[float]:
        """The chance of each position, once all before it were right, where something was drafted there."""
        out = []
        for depth in range(max_length):
            reached = [draft for draft in self.drafts if len(draft.path) >= depth and _depth(draft) > depth]
            if not reached:
                break
            out.append(sum(len(draft.path) > depth for draft in reached) / len(reached))
        return out

    def ranks(self, max_length: int = 6) -> list[float]:
        """The chance that a node's first, second, ... child, by confidence, is the accepted one."""
        seen, true = 0, [0] * max_length
        for draft in self.drafts:
            children: dict[int, list[int]] = defaultdict(list)
            for node, parent in enumerate(draft.parents):
                children[parent].append(node)
            for parent in (-1, *draft.path):
                if ordered := sorted(children.get(parent, ()), key=lambda i: (-draft.survival[i], i)):
                    seen += 1
                    hit = next((rank for rank, node in enumerate(ordered) if node in draft.path), max_length)
                    if hit < max_length:
                        true[hit] += 1
        return [count / seen for count in true] if seen else []


def _with_room(draft: DraftRecord, max_length: int) -> tuple[int, int]:
    """Nodes and accepted ones, if one that filled all the room it had would have filled a little more as well."""
    nodes, accepted = draft.best(max_length)
    return (max_length if nodes >= draft.room else nodes), accepted


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of a line through the points that a few far ones do not move: medians of slopes and of what is left."""
    if not points:
        return 0.0
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(points) for j, b in points[:n] if i != j]
    slope = statistics.median(slopes) if slopes else 0.0
    return slope * x + statistics.median(y - slope * at for at, y in points)


def _depth(draft: DraftRecord) -> int:
    return 1 + max(depths(draft.parents), default=-1)
