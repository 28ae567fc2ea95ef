"""The policy decides who drafts and how far. It never touches tokens, only numbers."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from outrider.core import Arm, Drafts, Plan

__all__ = ["FixedLength", "Load", "Policy", "RoundStats"]


class Load(NamedTuple):
    """What a round has to carry, per sequence and in all."""

    room: Seq[int]  # draft nodes it has room for; 0 where drafting is impossible: reading its prompt, near its end, fallen back
    keys: Seq[Hashable]  # who they are
    rows: int  # rows of the forward without any draft
    context: int  # tokens those rows attend to
    emitting: int  # sequences that emit a token whatever is drafted
    arms: Seq[Seq[int] | None] = ()  # arms a sequence may use; None: all
    temperature_buckets: Seq[int] = ()  # of each: what is accepted under one temperature says little about another
    remaining: Seq[int] = ()  # tokens that each may still emit; where it is empty, as many as there is room for


class RoundStats(NamedTuple):
    """What a round brought, per sequence, and what it cost."""

    drafted: Seq[int]  # nodes judged
    paths: Seq[Seq[int]]  # those accepted, from the root down
    rows: int = 0  # of the forward, drafts included; 0: its time is not to be compared with others'
    propose_s: float = 0.0
    forward_s: float = 0.0
    rest_s: float = 0.0  # of the round, after its forward: verifying, committing
    think_s: float = 0.0  # the controller's overhead: planning, choosing among nodes, learning from the round before
    experts: float = 0.0  # distinct ones that its forward read, the mean over layers that have some; 0: no layer has


class Policy(Protocol):
    """Who drafts, with what, how far."""

    @property
    def arms(self) -> Seq[Arm]:
        """The ways to draft that plans choose among; none where there is one way only."""

    def arms_named(self, method: str) -> list[int]:
        """The arms a request may use that asked for one method."""

    def plan(self, load: Load) -> Plan:
        """Before anything is drafted."""

    def plan_next(self, load: Load) -> Plan | None:
        """The plan of the round after the one in flight, which is not observed yet; None where it depends on that."""

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        """After propose, before the forward or while it runs: keep what pays."""

    def observe(self, stats: RoundStats) -> None:
        """After the round. Rounds are observed in the order of their plans; a plan that nothing came of never is."""

    def forget(self, key: Hashable) -> None:
        """A sequence is over."""


class FixedLength:
    """The same draft length for every sequence that has room for it."""

    arms: Seq[Arm] = ()

    def __init__(self, length: int, rule: str = "match") -> None:
        self._length = length
        self._rule = rule
        self._keep_q = rule in ("rejection", "block")

    def arms_named(self, method: str) -> list[int]:  # noqa: ARG002
        return [0]

    def plan(self, load: Load) -> Plan:
        lengths = tuple(min(self._length, room) for room in load.room)
        return Plan(lengths, self._rule, self._keep_q, verify_all=self._rule == "match")

    def plan_next(self, load: Load) -> Plan | None:
        return self.plan(load)

    def select(self, drafts: Drafts, load: Load) -> Drafts:  # noqa: ARG002
        return drafts

    def observe(self, stats: RoundStats) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        pass
