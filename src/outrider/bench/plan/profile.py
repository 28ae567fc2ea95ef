"""A drafter as a prediction needs it: what its drafts came to and what each part of its rounds costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from outrider.bench.plan.costs import RoundCosts
from outrider.bench.plan.formulas import best_length, break_even
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.core import depths

__all__ = ["Memory", "Profile"]


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

    @cached_property
    def _outcomes(self) -> dict[int, Mapping[tuple[int, int], float]]:
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


def _depth(draft: DraftRecord) -> int:
    return 1 + max(depths(draft.parents), default=-1)
