"""The policy decides who drafts and how far. It never touches tokens, only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.core import Drafts, Plan

__all__ = ["FixedLength", "Load", "Policy", "RoundStats"]


class Load(NamedTuple):
    """What a round has to carry: how many draft nodes each sequence has room for."""

    room: Sequence[int]  # 0 where drafting is impossible: reading its prompt, near its end, or fallen back


class RoundStats(NamedTuple):
    """What a round brought, per sequence."""

    drafted: Sequence[int]
    accepted: Sequence[int]


class Policy(Protocol):
    """Who drafts, with what, how far."""

    def plan(self, load: Load) -> Plan:
        """Before anything is drafted."""

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        """After propose, before score: keep what pays."""

    def observe(self, stats: RoundStats) -> None:
        """After the round."""


class FixedLength:
    """The same draft length for every sequence that has room for it."""

    def __init__(self, length: int, rule: str = "match") -> None:
        self._length = length
        self._rule = rule
        self._keep_q = rule in ("rejection", "block")

    def plan(self, load: Load) -> Plan:
        return Plan(tuple(min(self._length, room) for room in load.room), self._rule, self._keep_q)

    def select(self, drafts: Drafts, load: Load) -> Drafts:  # noqa: ARG002
        return drafts

    def observe(self, stats: RoundStats) -> None:
        pass
