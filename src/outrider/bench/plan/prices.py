"""What a round's parts cost, measured or given."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.bench.plan.trace import Round
from outrider.control.costs import Curve

__all__ = ["Prices", "steady_mean"]

_MANY = 64  # rows
_STALL = 5.0  # a time this many times the median counts as this many: a stall is not a cost


class Prices:
    """Seconds of a round's parts: forwards by rows, proposals by length and the host by rows, each at batches seen."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, dict[int, list[float]]]] = {part: {} for part in ("propose", "forward", "host")}
        self._curves: dict[str, dict[int, Curve]] | None = None

    def learn(self, rounds: Iterable[Round]) -> None:
        """Add measured rounds; of those that read prompts, only forwards of many rows: they are no round's rows."""
        for own in rounds:
            if own.prefill:
                if own.rows > _MANY:
                    self.add("forward", own.batch, own.rows, own.forward_s)
            else:
                if own.asked:
                    self.add("propose", own.batch, own.asked, own.propose_s)
                self.add("forward", own.batch, own.rows, own.forward_s)
                self.add("host", own.batch, own.rows, own.host_s)

    def add(self, part: str, batch: int, size: int, seconds: float) -> None:
        batch = 1 if part == "forward" else batch  # rows are rows, whosever they are
        self._seen[part].setdefault(batch, {}).setdefault(size, []).append(seconds)
        self._curves = None

    def round_s(self, asked: int, nodes: int, batch: int = 1) -> float:
        """A round that asks for so many nodes and verifies so many, for each of `batch` sequences."""
        rows = batch * (1 + nodes)
        proposal = self.time("propose", batch, asked) if asked else 0.0
        return proposal + self.time("forward", batch, rows) + self.time("host", batch, rows)

    def time(self, part: str, batch: int, size: int) -> float:
        """Between batches that were seen it is interpolated; beyond, a proposal grows with the batch."""
        if self._curves is None:
            self._curves = {name: {b: _curve(sizes) for b, sizes in own.items()} for name, own in self._seen.items()}
        curves = self._curves[part]
        if not curves:
            return 0.0
        if part == "forward":
            return _at(curves[1], size)
        known = sorted(curves)
        low = max((b for b in known if b <= batch), default=known[0])
        high = min((b for b in known if b >= batch), default=known[-1])
        first, second = (
            _at(curves[own], size) if part == "propose" else _within(curves[own], size * own // batch) for own in (low, high)
        )
        if low == high:
            return first * (batch / low if batch > low else 1.0)
        return first + (second - first) * (batch - low) / (high - low)

    @classmethod
    def forwards(cls, several: Iterable[Prices]) -> Prices:
        """All that is known of the target's forward, whoever drafted."""
        prices = cls()
        for own in several:
            for size, times in own._seen["forward"].get(1, {}).items():
                for seconds in times:
                    prices.add("forward", 1, size, seconds)
        return prices

    def as_dict(self) -> dict[str, Any]:
        """{"forward": {batch: {rows: seconds}}, "propose": {batch: {length: seconds}}, "host": {batch: {rows: seconds}}}."""
        return {
            part: {
                str(b): {str(size): steady_mean(times) for size, times in sorted(own.items())} for b, own in sorted(seen.items())
            }
            for part, seen in self._seen.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prices:
        prices = cls()
        for part in prices._seen:
            for batch, sizes in data.get(part, {}).items():
                for size, seconds in sizes.items():
                    prices.add(part, int(batch), int(size), float(seconds))
        return prices


def _at(curve: Curve, size: int) -> float:
    return curve.time(size) or 0.0


def _within(curve: Curve, size: int) -> float:
    """At the nearest size that was seen, where it lies outside them all: nothing says that the host's time grows so."""
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
