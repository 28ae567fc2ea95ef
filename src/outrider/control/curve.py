"""A quantity by size, learned from observations at any sizes: typical values at fixed steps, made monotone. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from statistics import fmean, median_low
from types import MappingProxyType

__all__ = ["FLOOR", "LONGEST", "TOLERANCE", "Curve", "Typical", "steady_mean", "step_of"]

_STEPS = (*range(1, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_MEMORY = 16  # observations of a size that are remembered
_IN_A_ROW = 3  # observations far off the others after which times have changed
FLOOR = 0.25  # of the time at the smallest size seen
LONGEST = 3600.0  # seconds of anything timed
TOLERANCE = 2.0  # an observation this many times off the median counts as this many


class Typical:
    """A time as it usually is, from its last observations.

    One far off the (lower) median counts as one less far off: a stall is not a cost. Where several in a row are far off, times
    have changed, and those before are forgotten.
    """

    def __init__(self, seconds: Seq[float] = ()) -> None:
        self._recent = deque(seconds, _MEMORY)
        self._mean: float | None = None

    def observe(self, seconds: float) -> None:
        usual = self.mean if self._recent else seconds
        self._recent.append(seconds)
        self._mean = None
        last = list(self._recent)[-_IN_A_ROW:]
        if min(last) > usual * TOLERANCE or max(last) < usual / TOLERANCE:
            self._recent = deque(last, _MEMORY)

    @property
    def count(self) -> int:
        return len(self._recent)

    @property
    def mean(self) -> float:
        if self._mean is None:
            self._mean = steady_mean(self._recent)
        return self._mean


class Curve:
    """Seconds by size, learned from observations at any sizes: typical times at fixed steps, made monotone, interpolated."""

    def __init__(self, times: Mapping[int, float] = MappingProxyType({}), count: int = 1) -> None:
        """`times` count for so many observations each."""
        self._steps = {size: Typical([seconds] * count) for size, seconds in times.items()}
        self._fitted: tuple[list[int], list[float]] | None = None  # sizes and times

    @property
    def sizes(self) -> list[int]:
        """The steps that were observed."""
        return sorted(self._steps)

    def observe(self, size: int, seconds: float) -> None:
        """One measurement. Old ones are forgotten."""
        step = step_of(size)
        seconds *= min(step / size, 1.0)  # beyond the largest step
        if step not in self._steps:
            between = len(self._steps) > 1 and min(self._steps) < step < max(self._steps)
            self._steps[step] = Typical([self.time(step) or seconds] if between else ())
        self._steps[step].observe(seconds)
        self._fitted = None

    def time(self, size: float) -> float | None:
        """Expected seconds at a size; None where nothing was seen.

        Beyond the largest size seen, time grows with it, as between the last two or faster; below the smallest it may be
        much less, so that the small sizes are tried too.
        """
        sizes, times = self._fitted or self._fit()
        if not sizes:
            return None
        i = bisect_right(sizes, size)
        if i == 0:
            return times[0] * (FLOOR + (1 - FLOOR) * size / sizes[0])
        if i < len(sizes):
            return times[i - 1] + (times[i] - times[i - 1]) * (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        guess = times[-1] * math.sqrt(size / sizes[-1])  # between free and proportional: neighbours say little of what is far off
        if len(sizes) == 1:
            return guess
        return max(guess, times[-1] + (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * (size - sizes[-1]))

    def as_dict(self) -> dict[str, float]:
        """Typical seconds by step, as a file spells them."""
        return {str(step): typical.mean for step, typical in sorted(self._steps.items()) if 0.0 < typical.mean <= LONGEST}

    def _fit(self) -> tuple[list[int], list[float]]:
        """Steps with their times, made monotone by pooling adjacent violators (isotonic regression)."""
        pools: list[list[float]] = []  # mean, weight, how many steps
        for _, typical in sorted(self._steps.items()):
            pools.append([typical.mean, typical.count, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                high, low = pools.pop(), pools.pop()
                weight = high[1] + low[1]
                pools.append([(high[0] * high[1] + low[0] * low[1]) / weight, weight, high[2] + low[2]])
        self._fitted = self.sizes, [mean for mean, _, count in pools for _ in range(int(count))]
        return self._fitted


def steady_mean(times: Collection[float]) -> float:
    """The mean, where a time far off the (lower) median counts as one less far off."""
    middle = median_low(times)
    return fmean(min(max(time, middle / TOLERANCE), middle * TOLERANCE) for time in times)


def step_of(size: int) -> int:
    """The smallest step not below a size: kernels and graphs round up, and a plain round's own size stays its own."""
    return int(_STEPS[min(bisect_left(_STEPS, size), len(_STEPS) - 1)])
