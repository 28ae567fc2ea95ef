"""A profiler: the time of each phase of a round, and of the round's forwards alone.

It listens to the engine's reports. To time forwards alone it runs the rounds inside itself (`Engine.profile`): on a
processor every forward runs once more with nothing between it and the next, on a GPU events stand before and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch

from outrider.core import RoundReport
from outrider.core import Sequence as Generation
from outrider.engine.llm import LLM
from outrider.model.cuda_capture import wait_for_device
from outrider.ops.forwards import logging_to

__all__ = ["ProfiledRound", "Profiler", "decode_rounds", "profiling"]

T = TypeVar("T")
Events = tuple[Any, Any]  # before and after some work on a GPU


@dataclass(slots=True)
class ProfiledRound:
    """Seconds of one round."""

    wall: float
    propose: float
    record: float  # the drafter's commit
    verify: float  # the target's forward
    choose: float  # the target's choices, and the walk through the trees
    rows: int  # of the target's forward
    nodes: int  # drafted
    decoding: bool  # no prompt was fed
    alone: float = 0.0  # seconds of its draft and target forwards, back to back

    @classmethod
    def of(cls, report: RoundReport) -> ProfiledRound:
        phases, nodes = report.phases, sum(len(seq.depths) for seq in report.sequences)
        times = phases.wall, phases.propose, phases.record, phases.forward, phases.verify
        return cls(*times, report.rows, nodes, not report.prefill)

    @property
    def draft(self) -> float:
        return self.propose + self.record

    @property
    def host(self) -> float:
        """Scheduling, planning, commit and text: everything but the drafter, the forward and the choice."""
        return self.wall - self.draft - self.verify - self.choose


@dataclass(slots=True)
class Profiler:
    """Every round of a run, and the seconds between the rounds that brought a sequence tokens."""

    rounds: list[ProfiledRound] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    _last: dict[Generation, float] = field(default_factory=dict)
    _forwards: list[Callable[[], object]] = field(default_factory=list)  # not yet run alone
    _events: list[Events] = field(default_factory=list)  # of this round
    _unread: list[tuple[ProfiledRound, list[Events]]] = field(default_factory=list)
    _alone: float = 0.0  # of this round
    _paused: float = 0.0  # in all

    def observe(self, report: RoundReport) -> None:
        self.rounds.append(ProfiledRound.of(report))
        ended = report.began + report.phases.wall - report.phases.learn
        for seq, got in zip(report.batch.sequences, report.sequences, strict=True):
            if got.kept:
                if seq in self._last:
                    self.gaps.append(ended - self._last[seq])
                self._last[seq] = ended

    def clock(self) -> float:
        return perf_counter() - self._paused

    def around(self, round_: Callable[[], T]) -> T:
        self._alone, self._events, rounds = 0.0, [], len(self.rounds)
        self._forwards.clear()  # of a round that failed
        with logging_to(self):
            result = round_()
        self.scored()  # what the drafter's commit ran
        if len(self.rounds) > rounds:
            self.rounds[-1].alone = self._alone
            self._unread.append((self.rounds[-1], self._events))
        return result

    def run(self, forward: Callable[[], T]) -> T:
        self._forwards.append(forward)
        return forward()

    def launch(self, work: Callable[[], T]) -> T:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = work()
        end.record()
        self._events.append((begin, end))
        return result

    def scored(self) -> None:
        """Run the forwards since the last time once more, back to back: the same rows write the same keys and values."""
        began = perf_counter()
        with logging_to(None):
            for forward in self._forwards:
                forward()
        self._forwards.clear()
        seconds = perf_counter() - began
        self._alone += seconds
        self._paused += seconds

    def read_events(self) -> None:
        """Add the time on the GPU to the rounds that launched the work."""
        if self._unread and any(events for _, events in self._unread):
            wait_for_device()
            for round_, events in self._unread:
                round_.alone += sum(begin.elapsed_time(end) for begin, end in events) / 1e3
        self._unread.clear()


@contextmanager
def profiling(llm: LLM, alone: bool = False) -> Iterator[Profiler]:
    """Profile an engine; with `alone`, every round's forwards are also timed by themselves, outside the round's time."""
    profiler, engine = Profiler(), llm.engine
    stop = engine.listen(profiler)
    engine.profile(profiler if alone else None)
    try:
        yield profiler
    finally:
        engine.profile(None)
        stop()
        profiler.read_events()


def decode_rounds(rounds: Sequence[ProfiledRound]) -> list[ProfiledRound]:
    """The rounds that fed no prompt."""
    return [round_ for round_ in rounds if round_.decoding]
