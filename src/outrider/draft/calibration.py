"""How often guesses of each kind came true. Numbers alone: nothing of any text is kept."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Calibration"]


class Calibration:
    """Measured chances by kind of guess, starting from a prior and fading with time.

    A prior counts as `weight` observations. A kind that was seen `memory` times has its counts halved,
    so what happened lately weighs more.
    """

    def __init__(self, weight: float = 4.0, memory: float = 400.0) -> None:
        self._weight = weight
        self._memory = memory
        self._seen: dict[Hashable, tuple[float, float]] = {}  # kind -> came true, tried

    def chance(self, kind: Hashable, prior: float) -> float:
        """The chance that a guess of this kind comes true."""
        true, tried = self._seen.get(kind, (0.0, 0.0))
        return (true + self._weight * prior) / (tried + self._weight)

    def record(self, kind: Hashable, came_true: bool) -> None:
        true, tried = self._seen.get(kind, (0.0, 0.0))
        if tried >= self._memory:
            true, tried = true / 2, tried / 2
        self._seen[kind] = (true + came_true, tried + 1)
