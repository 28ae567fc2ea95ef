"""What the experts of a mixture cost: how many distinct ones a forward reads, and the seconds of one more. No torch.

A forward's time by rows is that of the experts which rounds of so many rows usually read. A draft that continues the text reads
fewer than one that does not, so drafters differ. Counts are means over the layers that have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.control.curve import Curve

__all__ = ["ExpertCosts"]

_PLAIN, _ALL = "", "*"  # rounds that nobody drafts for; all rounds
_FADING = 1 - 1 / 64  # of what is known of the seconds of an expert, with every forward
_STRONG = 4.0  # forwards that the curve over rows counts for, as a first guess of these


class ExpertCosts:
    """Counts by drafter and rows, and the seconds of one expert more in every layer. Dense models leave it empty."""

    def __init__(self, counts: Mapping[str, Curve] | None = None) -> None:
        self.counts = dict(counts or {})
        self._products = self._squares = 0.0  # of how far counts and seconds were off their means, at the same rows

    def observe(self, rows: int, experts: float, drafter: str | None) -> None:
        """A forward read so many. None: several drafters had their part in it."""
        for name in (_ALL,) if drafter is None else (_ALL, drafter):
            self.counts.setdefault(name, Curve()).observe(rows, experts)

    def learn(self, rows: int, experts: float, seconds: float) -> None:
        """A forward took so many seconds longer than those of so many rows usually do."""
        more = self.excess(rows, experts)
        self._products = self._products * _FADING + more * seconds
        self._squares = self._squares * _FADING + more * more

    def usual(self, rows: float) -> float | None:
        """Experts that forwards of so many rows read."""
        return self.counts[_ALL].time(rows) if _ALL in self.counts else None

    def excess(self, rows: float, experts: float | None) -> float:
        """How many these are beyond the usual ones, perhaps below zero; 0 where nothing is known."""
        usual = self.usual(rows)
        return 0.0 if usual is None or experts is None else experts - usual

    def of(self, rows: float, drafter: str) -> float | None:
        """Experts that rounds with a drafter's drafts read; of plain rounds for ""."""
        return self.counts[drafter].time(rows) if drafter in self.counts else None

    def seconds(self, time: Callable[[float], float | None], rows: float) -> float:
        """Of one expert more, at so many rows. The first guess: rows cost what their experts do."""
        rows = max(rows, 2)
        low, high, short, long = self.usual(1), self.usual(rows), time(1), time(rows)
        if low is None or high is None or short is None or long is None or high <= low:
            return 0.0
        weight, guess = _STRONG * ((high - low) / rows) ** 2, (long - short) / (high - low)
        return max((weight * guess + self._products) / (weight + self._squares), 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Counts by drafter and rows, for JSON."""
        return {name: curve.as_dict() for name, curve in sorted(self.counts.items())}
