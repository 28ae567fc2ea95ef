"""What the parts of a round cost, measured or assumed: samples by size, summed up in the controller's cost table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from outrider.bench.plan.trace import RecordedRound
from outrider.control import Costs
from outrider.control.curve import steady_mean
from outrider.core import Arm

__all__ = ["RoundCosts", "controller_costs"]

_PROMPT_ROWS = 64  # rows above which a forward that reads prompts is learned from
_DRAFTER = "drafter"  # the name of the only one in a method's table
_LARGEST_BATCH = 1024  # that the controller's table tells from larger ones
_SHORTEST = 1e-12  # seconds: a table has no time of 0


class RoundCosts:
    """Seconds of a round's parts under one method: forwards by rows, proposals by batch and length, the host by batch."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, dict[int, list[float]]]] = {part: {} for part in ("propose", "forward", "host")}
        self._table: Costs | None = None
        self._experts: list[float] = []  # of rounds of one sequence

    @property
    def experts(self) -> float:
        """Distinct experts that a round of one sequence reads, the mean over layers; 0 where the model has none."""
        return fmean(self._experts) if self._experts else 0.0

    def learn(self, rounds: Iterable[RecordedRound]) -> None:
        """Add measured rounds; of those that read prompts, only forwards of many rows: they are no round's rows."""
        for round_ in rounds:
            if round_.prefill:
                if round_.rows > _PROMPT_ROWS:
                    self.add("forward", round_.batch, round_.rows, round_.forward_s)
            else:
                if round_.length:
                    self.add("propose", round_.batch, round_.length, round_.propose_s)
                self.add("forward", round_.batch, round_.rows, round_.forward_s)
                self.add("host", round_.batch, round_.rows, round_.host_s)
                if round_.experts and round_.batch == 1:
                    self._experts.append(round_.experts)

    def add(self, part: str, batch: int, size: int, seconds: float) -> None:
        batch = 1 if part == "forward" else batch  # a forward depends on its rows, not on whose they are
        self._seen[part].setdefault(batch, {}).setdefault(size, []).append(seconds)
        self._table = None

    def round_s(self, length: int, nodes: int, batch: int = 1) -> float:
        """A round that drafts up to `length` nodes and verifies `nodes`, for each of `batch` sequences."""
        rows = batch * (1 + nodes)
        proposal = self.time("propose", batch, length) if length else 0.0
        return proposal + self.time("forward", batch, rows) + self.time("host", batch, rows)

    def time(self, part: str, batch: int, size: int) -> float:
        """Expected seconds of a proposal (`size` nodes for each of `batch` sequences), a forward (`size` rows) or the host."""
        if not self._seen[part]:
            return 0.0
        table = self.table
        if part == "forward":
            return table.forward(size, 0)
        return table.rest(batch) if part == "host" else self._proposal(batch, size)

    def _proposal(self, batch: int, size: int) -> float:
        """Beyond the largest batch that was timed a proposal grows as between the last two, or with the root of the batch."""
        largest = max(self._seen["propose"])
        seconds = self.table.proposal(_DRAFTER, min(batch, _LARGEST_BATCH), size)
        if batch <= largest:
            return seconds
        guess = self.table.proposal(_DRAFTER, largest, size) * math.sqrt(batch / largest)
        return max(seconds * max(batch / _LARGEST_BATCH, 1.0), guess)

    @property
    def table(self) -> Costs:
        """The controller's table, as if it had measured these costs."""
        if self._table is None:
            self._table = _table_of(self.as_dict(), {_DRAFTER: self})
        return self._table

    @classmethod
    def forwards(cls, tables: Iterable[RoundCosts]) -> RoundCosts:
        """The target's forwards of several tables: they do not depend on the drafter."""
        costs = cls()
        for table in tables:
            for size, times in table._seen["forward"].get(1, {}).items():
                for seconds in times:
                    costs.add("forward", 1, size, seconds)
        return costs

    def as_dict(self) -> dict[str, Any]:
        """{"forward": {batch: {rows: seconds}}, "propose": {batch: {length: seconds}}, "host": {batch: {rows: seconds}}}."""
        return {
            part: {
                str(b): {str(size): steady_mean(times) for size, times in sorted(sizes.items())}
                for b, sizes in sorted(seen.items())
            }
            for part, seen in self._seen.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RoundCosts:
        costs = cls()
        for part in costs._seen:
            for batch, sizes in data.get(part, {}).items():
                for size, seconds in sizes.items():
                    costs.add(part, int(batch), int(size), float(seconds))
        return costs


def controller_costs(arms: Iterable[Arm], plain: str, costs: Mapping[str, RoundCosts]) -> Costs:
    """The controller's table, as if it had measured these costs earlier; `plain` names plain decoding's."""
    shared = RoundCosts.forwards(costs.values()).as_dict() | {"host": costs[plain].as_dict()["host"]}
    return _table_of(shared, {arm.name: costs[arm.name] for arm in arms})


def _table_of(shared: Mapping[str, Any], drafters: Mapping[str, RoundCosts]) -> Costs:
    """A cost table from the forwards and the host's time of one table, and from the proposals of several."""
    rest = {batch: max(steady_mean(list(sizes.values())), _SHORTEST) for batch, sizes in shared["host"].items()}
    propose = {name: {b: _positive(sizes) for b, sizes in one.as_dict()["propose"].items()} for name, one in drafters.items()}
    forward = _positive(shared["forward"].get("1", {}))
    return Costs.from_dict({"forward": forward, "context": {}, "rest": rest, "propose": propose})


def _positive(times: Mapping[str, float]) -> dict[str, float]:
    return {size: max(seconds, _SHORTEST) for size, seconds in times.items()}
