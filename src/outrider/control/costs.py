"""What things cost on this machine: measured, monotone, kept on disk. No torch."""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.control.curve import FLOOR, LONGEST, TOLERANCE, Curve, Typical, step_of
from outrider.control.expert_costs import ExpertCosts

__all__ = ["Costs"]

_CONTEXTS = (512, 2048, 8192, 32768)  # tokens attended to by all rows of a forward, in bins up to each
_FEW = 64  # rows of a round that reads no prompt, mostly
_SLOWLY = 1 / 32  # how readily a context's share is learnt
_READILY = 1 / 2  # how readily the drift correction is
_KEPT = 2  # observations that a time from a file counts for: as many slow rounds do not change it, as many quick ones do
_OFTEN = 3  # observations after which a drafter's times are known
_logger = logging.getLogger(__name__)


class Costs:
    """Times of a round's parts: the target's forward by rows, context and experts, every drafter's proposal by batch and
    length, and the rest by batch.

    Filled by a measurement at start-up or by the rounds themselves, and refined by every round. Where
    nothing was measured the guesses are cautious: more rows cost more, a proposal costs a whole forward.
    A machine is slower in one minute than in the next: its drift is learnt from every forward and holds for all times, so
    that those seen now compare with those seen long ago.
    """

    def __init__(self, sizes: Seq[int] = ()) -> None:
        self.sizes = sizes  # of captured graphs: as many rows or sequences as the next of them holds are run; none: as they come
        self._drift = 1.0
        self._forward = Curve()
        self.experts = ExpertCosts()
        self._context: dict[int, float] = {}  # seconds that a longer context adds, by bin
        self._rest = Curve()
        self._propose: dict[str, dict[int, Curve]] = {}  # by drafter, then by batch step; the curve is by length
        self._timed: dict[str, int] = {}  # observations of each drafter
        self._switch: dict[str, Typical] = {}  # by drafter: seconds per token of the text that a sequence begins with it after
        self.accepted: dict[str, Any] = {}  # a controller's record, kept beside them
        self.bus_bytes = 0  # of weights that cross the bus in a forward, however many rows it has

    def observe_forward(self, rows: int, context: int, seconds: float, experts: float = 0.0, drafter: str | None = None) -> None:
        """`experts` are the distinct ones that it read, in a round for which a drafter drafted; "" in a plain one."""
        rows = int(self._run_as(rows))
        known, added = self._forward.time(rows), self._added(context)
        seen = known is not None and rows <= _FEW and step_of(rows) in self._forward.sizes
        if experts:
            if seen and known:
                self.experts.learn(rows, experts, seconds / self._drift - (known + added))
                known = self._with_experts(known, rows, experts)
            self.experts.observe(rows, experts, drafter)
        if known is not None and seen:
            self._drift *= min(max(seconds / self._drift / (known + added), 1 / TOLERANCE), TOLERANCE) ** _READILY
        seconds /= self._drift
        if known is not None and rows <= _FEW and (bucket := _context(context)):  # that of a prompt says nothing of its context
            self._context[bucket] = min(max(added + (seconds - known - added) * _SLOWLY, 0.0), known)
        self._forward.observe(rows, max(seconds - added, FLOOR * seconds))

    def _with_experts(self, time: float, rows: float, experts: float | None) -> float:
        """A forward's time by rows, with so many experts instead of those that rounds of so many rows usually read."""
        more = self.experts.excess(rows, experts)
        return time if more == 0.0 else max(time + more * self.experts.seconds(self._forward.time, rows), FLOOR * time)

    def observe_rest(self, batch: int, seconds: float) -> None:
        self._rest.observe(batch, seconds / self._drift)

    def observe_proposal(self, drafter: str, batch: int, length: int, seconds: float) -> None:
        curves, step = self._propose.setdefault(drafter, {}), step_of(int(self._run_as(batch)))
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

    def forward(self, rows: float, context: int, drafter: str = "") -> float:
        """Seconds of a target forward, in a round for which a drafter drafts or in a plain one."""
        rows = self._run_as(rows)
        time = self._forward.time(rows)
        if time is None:
            return 0.01 * max(rows / 16, 1.0)
        return self._drift * (self._with_experts(time, rows, self.experts.of(rows, drafter)) + self._added(context))

    def _added(self, context: int) -> float:
        """By a context of this length: what is known of it, or of shorter ones."""
        return max((seconds for bucket, seconds in self._context.items() if bucket <= _context(context)), default=0.0)

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
        return [self._drift * seconds for seconds in _between(curves, step_of(int(self._run_as(batch))), lengths)]

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
        return (
            {
                "forward": self._forward.as_dict(),
                "context": {str(_CONTEXTS[bucket]): seconds for bucket, seconds in sorted(self._context.items())},
                "rest": self._rest.as_dict(),
                "propose": {
                    name: {str(batch): curve.as_dict() for batch, curve in sorted(curves.items())}
                    for name, curves in sorted(self._propose.items())
                },
                "switch": {name: per_token.mean for name, per_token in sorted(self._switch.items())},
                "accepted": self.accepted,
            }
            | ({"experts": counted} if (counted := self.experts.as_dict()) else {})
            | self._bus()
        )

    def _bus(self) -> dict[str, Any]:
        """What crosses the bus in a forward of one row, and how fast: nothing where all weights lie where they are used."""
        if not self.bus_bytes:
            return {}
        seconds = self.forward(1, 0)
        return {"bus": {"bytes": self.bus_bytes, "bytes_per_s": round(self.bus_bytes / seconds)}}

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
        costs.experts = ExpertCosts({name: Curve(_checked(curve), _KEPT) for name, curve in data.get("experts", {}).items()})
        costs.accepted = dict(data.get("accepted", {}))
        costs.bus_bytes = int(data.get("bus", {}).get("bytes", 0))
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


def _context(tokens: int) -> int:
    return min(bisect_left(_CONTEXTS, tokens), len(_CONTEXTS) - 1)


def _checked(data: Mapping[str, Any], least: float = math.ulp(0.0)) -> dict[int, float]:
    """Seconds by size from a file."""
    return {_size(size): _seconds(seconds, least) for size, seconds in data.items()}


def _seconds(value: Any, least: float) -> float:
    """Seconds from a file: finite and positive, or they would spoil every plan made from them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LONGEST:
        raise ValueError(f"{value!r:.40} seconds")
    return float(value)


def _size(text: str) -> int:
    size = int(text) if len(text) < 12 else 0
    if size < 1:
        raise ValueError(f"a size of {text!r:.40}")
    return size
