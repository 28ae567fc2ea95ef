"""A policy that times forwards and proposals of every size in turn, before anybody waits for them. No torch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.control.costs import Costs
from outrider.control.policy import Load, RoundStats
from outrider.core import Arm, Drafts, Plan

__all__ = ["Calibration"]

# Draft nodes beside the one row of plain decoding. The sizes that say most come first: a slow model has time for few.
_NODES = (0, 7, 15, 3, 1, 31, 11, 5, 2, 23, 63, 47)
_PROPOSALS = (8, 2)  # nodes that every drafter is timed with, in this order
_FIRST_FORWARDS = 2  # sizes of forwards that are timed before any proposal
_WARM_UP = 12  # rounds
_PASSES = 3  # over all sizes, so that no disturbance hits one size alone
_REPEATS = 2  # rounds of a size in one pass; the first is not counted, because a drafter catches up in it
_WEIGHT = 4  # observations that one calibrated time counts for in the cost table


class _Measurement(NamedTuple):
    nodes: int
    arm: int | None  # None: the draft is made up, and the target's forward is timed
    counts: bool


class Calibration:
    """Times forwards of growing row counts and proposals of every drafter, until all are timed or the deadline passes.

    The tokens of a draft whose forward is timed are made up: whether they are accepted does not matter, and the
    output of the requests that carry them is discarded.
    """

    def __init__(
        self,
        arms: Seq[Arm],
        costs: Costs,
        tokens: Seq[int] = (0,),  # of made-up drafts, in turn; without any no forward is timed
        deadline: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arms = arms
        self._tokens = tokens
        self._costs = costs
        self._deadline, self._clock = deadline, clock
        self._pending = [_Measurement(0, None, counts=False)] * _WARM_UP
        self._pending += [
            _Measurement(*size, counts=repeat > 0) for size in _sizes(arms, bool(tokens)) * _PASSES for repeat in range(_REPEATS)
        ]
        # (arm, size) -> the minimum, as noise only adds time, and the experts that were read in it
        self._seconds: dict[tuple[int | None, int], tuple[float, float]] = {}
        self._overhead = math.inf  # seconds of a round beside the forward and the proposal
        self._current: _Measurement | None = None
        self._unobserved: deque[tuple[Load, _Measurement | None]] = deque()  # rounds that are planned

    @property
    def rounds(self) -> int:
        """Tokens a request must have room for: one a round, those that may be accepted, and the last draft."""
        accepted = sum(pending.nodes for pending in self._pending if self._verifies_all(pending.arm))
        return len(self._pending) + accepted + max(_NODES) + 2

    @property
    def done(self) -> bool:
        return not self._pending

    def arms_named(self, method: str) -> list[int]:  # noqa: ARG002
        return []

    def plan(self, load: Load) -> Plan:
        self._unobserved.clear()
        return self._planned(load)

    def plan_next(self, load: Load) -> Plan | None:
        """Rounds of one kind overlap, as they do in service."""
        if self._current is None or not self._pending or not all(load.room):
            return None
        nodes, arm, _ = self._pending[0]
        if (nodes, arm) != self._current[:2] or (arm is None and nodes):
            return None
        return self._planned(load)

    def _planned(self, load: Load) -> Plan:
        self._current = None
        if all(load.room) and self._pending:  # every sequence has read its prompt
            self._current = self._pending.pop(0)
        self._unobserved.append((load, self._current))
        nodes, arm = (0, None) if self._current is None else self._current[:2]
        lengths = tuple(min(nodes, room) for room in load.room)
        return Plan(lengths, arms=(arm or 0,) * len(load.room), verify_all=self._verifies_all(arm))

    def _verifies_all(self, arm: int | None) -> bool:
        return arm is not None and self.arms[arm].can_overlap

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        if self._current is not None and self._verifies_all(self._current.arm):
            return drafts  # its verification has been launched already
        if self._current is None or self._current.arm is not None:
            return Drafts.empty(len(load.room))
        made_up = [self._tokens[i % len(self._tokens)] for i in range(self._current.nodes)]
        return Drafts.chains([made_up[:room] for room in load.room])

    def observe(self, stats: RoundStats) -> None:
        load, measurement = self._unobserved.popleft() if self._unobserved else (None, None)
        if measurement is None or load is None:
            return
        nodes, arm, counts = measurement
        if counts:
            key, seconds = ((arm, stats.rows), stats.forward_s) if arm is None else ((arm, nodes), stats.propose_s)
            self._seconds[key] = min((seconds, stats.experts), self._seconds.get(key, (math.inf, 0.0)))
            self._overhead = min(self._overhead, stats.rest_s)
        if self._clock() >= self._deadline:
            self._pending.clear()
        if self.done and self._seconds:
            self._enter(load)

    def _enter(self, load: Load) -> None:
        """Write what was timed into the cost table."""
        for _ in range(_WEIGHT):
            self._costs.observe_rest(len(load.room), self._overhead)
        for (arm, size), (seconds, experts) in self._seconds.items():
            for _ in range(_WEIGHT):
                if arm is None:
                    self._costs.observe_forward(size, load.context, seconds, experts)
                else:
                    self._costs.observe_proposal(self.arms[arm].name, len(load.room), size, seconds)

    def forget(self, key: Hashable) -> None:
        pass


def _sizes(arms: Seq[Arm], forwards: bool) -> list[tuple[int, int | None]]:
    """(nodes, arm) of one pass, in the order in which they are timed."""
    nodes = [(count, None) for count in _NODES] if forwards else []
    long, short = ([(min(count, arm.max_nodes), i) for i, arm in enumerate(arms)] for count in _PROPOSALS)
    return [*nodes[:_FIRST_FORWARDS], *long, *nodes[_FIRST_FORWARDS:], *short]
