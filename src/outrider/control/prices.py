"""What rounds cost, as plans and choices ask for it: worked out once and good for many rounds. No torch."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.control.costs import Costs
from outrider.control.policy import Load
from outrider.control.record import LENGTHS, Record
from outrider.core import Arm

__all__ = ["REPLAN", "PriceList", "Prices"]

REPLAN = 12  # rounds a plan stands
_THOUGHTS = 32  # rounds over which the time that thinking takes is averaged


class Prices(NamedTuple):
    """What rounds cost when so many sequences draft, in seconds."""

    base: float  # a plain one
    each: list[list[float]]  # by arm and length: what it costs one of the sequences when all draft so
    hopes: list[float]  # by arm: tokens a second if every guess came true


class PriceList:
    """Prices by load. They stand until they are dropped, whatever the costs behind them become meanwhile."""

    def __init__(self, arms: Seq[Arm], costs: Costs, record: Record) -> None:
        self._arms, self._costs, self._record = arms, costs, record
        self._thought: dict[tuple[int, bool], float] = {}  # seconds of deciding in a round, by sequences and whether it plans
        self.drop()

    def drop(self) -> None:
        """Ask the costs again from now on."""
        self._known: dict[tuple[int, ...], Prices] = {}
        self._times: dict[tuple[int, int, int], list[float]] = {}  # of a round with 0, 1, ... further rows

    def note_thinking(self, many: int, planned: bool, seconds: float) -> None:
        usual = self._thought.get((many, planned), 0.0)  # at first it is taken to cost nothing: else it would never be tried
        self._thought[many, planned] = usual + (seconds - usual) / _THOUGHTS

    def thinking(self, many: int) -> float:
        """Seconds that deciding about drafts takes in a round."""
        return self._thought.get((many, False), 0.0) + self._thought.get((many, True), 0.0) / REPLAN

    def base(self, load: Load) -> float:
        """Seconds of a plain round of those who emit. Prompts read beside them make no draft worth more."""
        rest = self._costs.rest(len(load.keys))
        return self._costs.forward(min(load.emitting or load.rows, load.rows), load.context) + rest

    def of(self, load: Load, able: int) -> Prices:
        """What it costs when so many may draft."""
        kind = load.kinds[0] if load.kinds else 0
        found = self._known.get(key := (load.rows, load.emitting, able, load.context.bit_length(), kind))
        if found is None:
            found = self._known[key] = self._priced(load, able)
        return found

    def _priced(self, load: Load, able: int) -> Prices:
        base, read = self.base(load), self._costs.forward(load.rows, load.context)
        read -= self.thinking(len(load.keys))
        each = []
        for a, arm in enumerate(self._arms):
            nodes = self._record.nodes(load.keys[0], a)[: bisect(LENGTHS, arm.most)]
            rows = [self._costs.forward(load.rows + own * able, load.context) - read for own in nodes]
            drafts = self._costs.proposals(arm.name, able, nodes, load.context)
            each.append([(seconds + extra) / able for seconds, extra in zip(drafts, rows, strict=True)])
        hopes = [
            max((load.emitting + able * length) / (base + price * able) for length, price in zip(LENGTHS, own, strict=False))
            for own in each
        ]
        return Prices(base, each, hopes)

    def drafts(self, load: Load, arm: int, length: int, many: int) -> float:
        """Seconds that drafts of so many sequences, and no others, add to a round."""
        extra = self._costs.forward(load.rows + length * many, load.context) - self._costs.forward(load.rows, load.context)
        return extra + self._costs.proposal(self._arms[arm].name, many, length, load.context)

    def node(self, load: Load, arm: int, many: int) -> float:
        """Seconds that drawing and verifying one node more takes, where so many sequences draft."""
        few, more = self._costs.proposals(self._arms[arm].name, many, (2, 8), load.context)
        short, long = (self._costs.forward(load.rows + own * many, load.context) for own in (2, 8))
        return (more - few + long - short) / (6 * many)

    def times(self, load: Load, count: int) -> list[float]:
        """Seconds of a round with 0, 1, ... further rows."""
        known = self._times.setdefault((load.rows, len(load.keys), load.context.bit_length()), [])
        if len(known) < count:
            rest = self._costs.rest(len(load.keys))
            known += (self._costs.forward(load.rows + n, load.context) + rest for n in range(len(known), max(count, 17)))
        return known
