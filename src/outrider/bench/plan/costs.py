"""What the parts of a round cost, measured or given. The only file of the planner that knows the controller's cost model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.bench.plan.trace import RecordedRound
from outrider.control import Costs
from outrider.control.costs import Curve
from outrider.core import Arm

__all__ = ["RoundCosts", "controller_costs", "steady_mean"]

_PROMPT_ROWS = 64  # rows above which a forward that reads prompts is learned from
_STALL = 5.0  # a time this many times the median counts as this many: a stall is not a cost


class RoundCosts:
    """Seconds of a round's parts: forwards by rows, proposals by length and the host by rows, each at batches seen."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, dict[int, list[float]]]] = {part: {} for part in ("propose", "forward", "host")}
        self._curves: dict[str, dict[int, Curve]] | None = None

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

    def add(self, part: str, batch: int, size: int, seconds: float) -> None:
        batch = 1 if part == "forward" else batch  # a forward depends on its rows, not on whose they are
        self._seen[part].setdefault(batch, {}).setdefault(size, []).append(seconds)
        self._curves = None

    def round_s(self, length: int, nodes: int, batch: int = 1) -> float:
        """A round that drafts up to `length` nodes and verifies `nodes`, for each of `batch` sequences."""
        rows = batch * (1 + nodes)
        proposal = self.time("propose", batch, length) if length else 0.0
        return proposal + self.time("forward", batch, rows) + self.time("host", batch, rows)

    def time(self, part: str, batch: int, size: int) -> float:
        """Between batches that were seen it is interpolated; beyond, a proposal grows with the batch."""
        if self._curves is None:
            self._curves = {name: {b: _curve(sizes) for b, sizes in batches.items()} for name, batches in self._seen.items()}
        curves = self._curves[part]
        if not curves:
            return 0.0
        if part == "forward":
            return _at(curves[1], size)
        known = sorted(curves)
        low = max((b for b in known if b <= batch), default=known[0])
        high = min((b for b in known if b >= batch), default=known[-1])
        first, second = (
            _at(curves[b], size) if part == "propose" else _within(curves[b], size * b // batch) for b in (low, high)
        )
        if low == high:
            return first * (batch / low if batch > low else 1.0)
        return first + (second - first) * (batch - low) / (high - low)

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
    table = Costs()
    for rows, seconds in RoundCosts.forwards(costs.values()).as_dict()["forward"].get("1", {}).items():
        table.observe_forward(int(rows), 0, seconds)
    for batch in (1, 8):
        table.observe_rest(batch, costs[plain].time("host", batch, batch))
    for arm in arms:
        for batch, sizes in costs[arm.name].as_dict()["propose"].items():
            for length, seconds in sizes.items():
                table.observe_proposal(arm.name, int(batch), int(length), seconds)
    return table


def _at(curve: Curve, size: int) -> float:
    return curve.time(size) or 0.0


def _within(curve: Curve, size: int) -> float:
    """At the nearest size seen, where the size lies beyond them: the host's time need not grow with it."""
    return _at(curve, min(max(size, min(curve.means)), max(curve.means)))


def _curve(sizes: Mapping[int, Sequence[float]]) -> Curve:
    return Curve(
        {size: steady_mean(times) for size, times in sizes.items()},
        {size: float(len(times)) for size, times in sizes.items()},
    )


def steady_mean(times: Sequence[float]) -> float:
    """The mean, a stall counting for little more than any other time."""
    limit = _STALL * statistics.median(times)
    return statistics.fmean(min(time, limit) for time in times)
