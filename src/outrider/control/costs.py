"""What things cost on this machine: measured, monotone, kept on disk. No torch."""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median_low
from types import MappingProxyType
from typing import Any

__all__ = ["Costs", "Curve", "steady_mean"]

_STEPS = (*range(1, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
_CONTEXTS = (512, 2048, 8192, 32768)  # tokens attended to by all rows of a forward, in bins up to each
_FEW = 64  # rows of a round that reads no prompt, mostly
_SLOWLY = 1 / 32  # how readily a context's share is learnt
_READILY = 1 / 2  # how readily the drift correction is
_MEMORY = 16  # observations of a size that are remembered
_IN_A_ROW = 3  # observations far off the others after which times have changed
_KEPT = 2  # observations that a time from a file counts for: as many slow rounds do not change it, as many quick ones do
_OFTEN = 3  # observations after which a drafter's times are known
_FLOOR = 0.25  # of the time at the smallest size seen
_LONGEST = 3600.0  # seconds of anything timed
_TOLERANCE = 2.0  # an observation this many times off the median counts as this many
_logger = logging.getLogger(__name__)


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
        if min(last) > usual * _TOLERANCE or max(last) < usual / _TOLERANCE:
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
        step = _step(size)
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
            return times[0] * (_FLOOR + (1 - _FLOOR) * size / sizes[0])
        if i < len(sizes):
            return times[i - 1] + (times[i] - times[i - 1]) * (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        guess = times[-1] * math.sqrt(size / sizes[-1])  # between free and proportional: neighbours say little of what is far off
        if len(sizes) == 1:
            return guess
        return max(guess, times[-1] + (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * (size - sizes[-1]))

    def as_dict(self) -> dict[str, float]:
        """Typical seconds by step, as a file spells them."""
        return {str(step): typical.mean for step, typical in sorted(self._steps.items()) if 0.0 < typical.mean <= _LONGEST}

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
    return fmean(min(max(time, middle / _TOLERANCE), middle * _TOLERANCE) for time in times)


class Costs:
    """Times of a round's parts: the target's forward by rows and context, every drafter's proposal by batch and length,
    and the rest by batch.

    Filled by a measurement at start-up or by the rounds themselves, and refined by every round. Where
    nothing was measured the guesses are cautious: more rows cost more, a proposal costs a whole forward.
    A machine is slower in one minute than in the next: its drift is learnt from every forward and holds for all times, so
    that those seen now compare with those seen long ago.
    """

    def __init__(self, sizes: Seq[int] = ()) -> None:
        self.sizes = sizes  # of captured graphs: as many rows or sequences as the next of them holds are run; none: as they come
        self._drift = 1.0
        self._forward = Curve()
        self._context: dict[int, float] = {}  # seconds that a longer context adds, by bin
        self._rest = Curve()
        self._propose: dict[str, dict[int, Curve]] = {}  # by drafter, then by batch step; the curve is by length
        self._timed: dict[str, int] = {}  # observations of each drafter
        self._switch: dict[str, Typical] = {}  # by drafter: seconds per token of the text that a sequence begins with it after
        self.accepted: dict[str, Any] = {}  # a controller's record, kept beside them

    def observe_forward(self, rows: int, context: int, seconds: float) -> None:
        rows = int(self._run_as(rows))
        known, added = self._forward.time(rows), self._added(context)
        if known is not None and rows <= _FEW and _step(rows) in self._forward.sizes:
            self._drift *= min(max(seconds / self._drift / (known + added), 1 / _TOLERANCE), _TOLERANCE) ** _READILY
        seconds /= self._drift
        if known is not None and rows <= _FEW and (own := _context(context)):  # a prompt's own time says nothing of its context
            self._context[own] = min(max(added + (seconds - known - added) * _SLOWLY, 0.0), known)
        self._forward.observe(rows, max(seconds - added, _FLOOR * seconds))

    def observe_rest(self, batch: int, seconds: float) -> None:
        self._rest.observe(batch, seconds / self._drift)

    def observe_proposal(self, drafter: str, batch: int, length: int, seconds: float) -> None:
        curves, step = self._propose.setdefault(drafter, {}), _step(int(self._run_as(batch)))
        self._timed[drafter] = self._timed.get(drafter, 0) + 1
        if step not in curves:  # it begins as its neighbours say: one observation may be a stall
            known = sorted({size for curve in curves.values() for size in curve.sizes})
            curves[step] = Curve(dict(zip(known, _between(curves, step, known), strict=True)) if curves else {})
        curves[step].observe(length, seconds / self._drift)

    def observe_switch(self, drafter: str, tokens: float, seconds: float) -> None:
        """Sequences began with a drafter, which read so many tokens."""
        self._switch.setdefault(drafter, Typical()).observe(seconds / self._drift / max(tokens, 1.0))

    def switch(self, drafter: str, tokens: float) -> float:
        """Seconds that a drafter takes to read so many tokens when a sequence begins with it."""
        return self._drift * self._switch[drafter].mean * tokens if drafter in self._switch else 0.0

    def forward(self, rows: float, context: int) -> float:
        """Seconds of a target forward."""
        rows = self._run_as(rows)
        time = self._forward.time(rows)
        return 0.01 * max(rows / 16, 1.0) if time is None else self._drift * (time + self._added(context))

    def _added(self, context: int) -> float:
        """By a context of this length: what is known of it, or of shorter ones."""
        return max((seconds for own, seconds in self._context.items() if own <= _context(context)), default=0.0)

    def rest(self, batch: int) -> float:
        """Seconds of a round beside the forward and the drafts."""
        return self._drift * (self._rest.time(batch) or 0.0)

    def proposal(self, drafter: str, batch: int, length: float, context: int = 0) -> float:
        """Seconds of a proposal of `length` nodes for each of `batch` sequences."""
        return self.proposals(drafter, batch, (length,), context)[0]

    def proposals(self, drafter: str, batch: int, lengths: Seq[float], context: int = 0) -> list[float]:
        """The same for several lengths."""
        curves = self._propose.get(drafter)
        if not curves:
            return [self.forward(1, context)] * len(lengths)
        return [self._drift * seconds for seconds in _between(curves, _step(int(self._run_as(batch))), lengths)]

    def _run_as(self, count: float) -> float:
        """So many rows or sequences, filled up to a size that is run."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else count

    def knows_proposal(self, drafter: str, well: bool = False) -> bool:
        """Whether a proposal of it was ever timed; `well`: so often that one stall counts for little."""
        return self._timed.get(drafter, 0) >= (_OFTEN if well else 1)

    def knows_switch(self, drafter: str) -> bool:
        """Whether a sequence was ever seen to begin with it."""
        return drafter in self._switch

    @property
    def knows_forward(self) -> bool:
        return bool(self._forward.sizes)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: seconds by rows, by context, by batch, and by drafter, batch and length."""
        return {
            "forward": self._forward.as_dict(),
            "context": {str(_CONTEXTS[own]): seconds for own, seconds in sorted(self._context.items())},
            "rest": self._rest.as_dict(),
            "propose": {
                name: {str(batch): curve.as_dict() for batch, curve in sorted(curves.items())}
                for name, curves in sorted(self._propose.items())
            },
            "switch": {name: per_token.mean for name, per_token in sorted(self._switch.items())},
            "accepted": self.accepted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """From plain data. What is no table of times raises ValueError, TypeError, KeyError or AttributeError."""
        costs = cls()
        costs._forward, costs._rest = (Curve(_checked(data[part]), _KEPT) for part in ("forward", "rest"))
        costs._context = {_context(size): seconds for size, seconds in _checked(data["context"], least=0.0).items()}
        for name, curves in data["propose"].items():
            if curves:
                costs._propose[name] = {_size(batch): Curve(_checked(curve), _KEPT) for batch, curve in curves.items()}
                costs._timed[name] = _OFTEN
        costs._switch = {name: Typical([_seconds(each, 0.0)] * _KEPT) for name, each in data.get("switch", {}).items()}
        costs.accepted = dict(data.get("accepted", {}))
        return costs

    def save(self, path: Path) -> None:
        """Write atomically; a machine that cannot keep the table only measures again."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.write_text(json.dumps(self.as_dict()))
            fresh.replace(path)
        except OSError:
            pass

    @classmethod
    def load(cls, path: Path) -> Costs:
        """What was kept, or an empty table; a damaged file is named in a warning, and the next save replaces it."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            _logger.warning("%s is damaged (%s: %s); costs are measured afresh", path, type(error).__name__, error)
            return cls()


def _between(curves: Mapping[int, Curve], batch: int, lengths: Seq[float]) -> list[float]:
    """Seconds at a batch size: on the line through the nearest ones seen on both sides, or the last two. Where only one was
    seen it is taken to cost as much: a guess that is too low is soon corrected, one that is too high is never tried.
    """
    if batch in curves:
        return [curves[batch].time(length) or 0.0 for length in lengths]
    seen = sorted(curves)
    low, high = (seen * 2)[:2] if batch < seen[0] or len(seen) == 1 else seen[-2:]
    for first, second in pairwise(seen):
        if first < batch < second:
            low, high = first, second
    part = (batch - low) / (high - low) if high > low and batch > low else 0.0
    ends = [(curves[low].time(length) or 0.0, curves[high].time(length) or 0.0) for length in lengths]
    return [max(first + (second - first) * part, min(first, second)) for first, second in ends]


def _step(size: int) -> int:
    """The smallest step not below a size: kernels and graphs round up, and a plain round's own size stays its own."""
    return int(_STEPS[min(bisect_left(_STEPS, size), len(_STEPS) - 1)])


def _context(tokens: int) -> int:
    return min(bisect_left(_CONTEXTS, tokens), len(_CONTEXTS) - 1)


def _checked(data: Mapping[str, Any], least: float = math.ulp(0.0)) -> dict[int, float]:
    """Seconds by size from a file."""
    return {_size(size): _seconds(seconds, least) for size, seconds in data.items()}


def _seconds(value: Any, least: float) -> float:
    """Seconds from a file: finite and positive, or they would spoil every plan made from them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LONGEST:
        raise ValueError(f"{value!r:.40} seconds")
    return float(value)


def _size(text: str) -> int:
    size = int(text) if len(text) < 12 else 0
    if size < 1:
        raise ValueError(f"a size of {text!r:.40}")
    return size
