"""Measuring costs before anybody waits for them: a policy that tries every size in turn. No torch."""

from __future__ import annotations

import math
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.control.costs import Costs
from outrider.control.policy import Load, RoundStats
from outrider.core import Arm, Drafts, Plan

__all__ = ["Survey"]

_NODES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # beside one row
_PROPOSALS = (2, 8)  # nodes asked of every arm
_WARM_UP = 12  # rounds
_PASSES = 3  # over all sizes, so that no disturbance meets one size alone
_REPEATS = 2  # of a size in a pass; the first of them is not counted: it catches up
_WEIGHT = 4  # observations that a time found here counts for


class _Trial(NamedTuple):
    nodes: int
    arm: int | None  # None: made-up nodes, whose forward is timed
    counts: bool


class Survey:
    """Runs through forwards of growing row counts, then through proposals of every arm.

    Drafts whose forward is to be timed are made up: what is right about them does not matter, and the
    tokens of the requests it is run with are thrown away.
    """

    def __init__(self, arms: Seq[Arm], costs: Costs, forwards: bool = True) -> None:
        self.arms = arms
        self._costs = costs
        sizes: list[tuple[int, int | None]] = [(nodes, None) for nodes in _NODES] if forwards else []
        sizes += [(min(nodes, arm.most), i) for i, arm in enumerate(arms) for nodes in _PROPOSALS]
        self._left = [_Trial(0, None, counts=False)] * _WARM_UP
        self._left += [_Trial(*size, counts=time > 0) for size in sizes * _PASSES for time in range(_REPEATS)]
        self._took: dict[tuple[int | None, int], float] = {}  # (arm, size) -> the least seconds: noise only adds
        self._rest = math.inf
        self._trial: _Trial | None = None
        self._load: Load | None = None

    @property
    def rounds(self) -> int:
        """Tokens a request must have room for: one a round, those that may be accepted, and the last draft."""
        accepted = sum(trial.nodes for trial in self._left if self._is_whole(trial.arm))
        return len(self._left) + accepted + max(_NODES) + 2

    @property
    def done(self) -> bool:
        return not self._left

    def arms_named(self, method: str) -> list[int]:  # noqa: ARG002
        return []

    def plan(self, load: Load) -> Plan:
        self._load, self._trial = load, None
        if all(load.room) and self._left:  # everyone has read its prompt
            self._trial = self._left.pop(0)
        nodes, arm = (0, None) if self._trial is None else self._trial[:2]
        lengths = tuple(min(nodes, room) for room in load.room)
        again = bool(self._left) and self._left[0][:2] == (nodes, arm) and (arm is not None or not nodes)  # as in service
        return Plan(lengths, arms=(arm or 0,) * len(load.room), whole=self._is_whole(arm), again=again)

    def _is_whole(self, arm: int | None) -> bool:
        return arm is not None and self.arms[arm].ahead

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        if self._trial is not None and self._is_whole(self._trial.arm):
            return drafts  # under way already
        if self._trial is None or self._trial.arm is not None:
            return Drafts.empty(len(load.room))
        return Drafts.chains([[0] * min(self._trial.nodes, room) for room in load.room])

    def observe(self, stats: RoundStats) -> None:
        if self._trial is None or self._load is None:
            return
        (nodes, arm, counts), load = self._trial, self._load
        if counts:
            key, seconds = ((arm, stats.rows), stats.forward_s) if arm is None else ((arm, nodes), stats.propose_s)
            self._took[key] = min(seconds, self._took.get(key, seconds))
            self._rest = min(self._rest, stats.rest_s)
        if self.done:
            self._tell(load)

    def _tell(self, load: Load) -> None:
        for _ in range(_WEIGHT):
            self._costs.observe_rest(len(load.room), self._rest)
        for (arm, size), seconds in self._took.items():
            for _ in range(_WEIGHT):
                if arm is None:
                    self._costs.observe_forward(size, load.context, seconds)
                else:
                    self._costs.observe_proposal(self.arms[arm].name, len(load.room), size, seconds)

    def forget(self, key: Hashable) -> None:
        pass
