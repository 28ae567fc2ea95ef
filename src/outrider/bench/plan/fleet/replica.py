"""One replica in virtual time: an engine, the requests that wait for its next round, and a clock."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Protocol

from outrider.bench.plan.fleet.load import FleetRequest
from outrider.core import Request, RoundProfile, Sequence
from outrider.engine.engine import Engine
from outrider.errors import QueueFull
from outrider.routing import ReplicaLoad
from outrider.sampling import SamplingParams

__all__ = ["Clock", "Live", "Replica"]


class Clock(RoundProfile, Protocol):
    """Virtual seconds: the profile of a replica's engine."""

    @property
    def now(self) -> float: ...

    def begin(self, now: float, scale: float) -> None:
        """A round begins at this time, and takes `scale` times as long as it costs."""


class Live:
    """A request on its way: when it came and when its tokens came."""

    __slots__ = ("at", "first", "last", "request")

    def __init__(self, request: FleetRequest) -> None:
        self.request = request
        self.at = request.at
        self.first = self.last = 0.0


class Replica:
    """An engine, the requests that wait for its next round, and its own time."""

    def __init__(self, name: str, engine: Engine, clock: Clock, request_s: float, context: int) -> None:
        """The engine's profile must be `clock`: what it says before and after a round is what the round took."""
        self.name = name
        self.engine = engine
        self.rounds = 0
        self.busy_s = 0.0
        self.refused = 0
        self._clock = clock
        self._request_s = request_s
        self._context = context
        self._inbox: deque[Live] = deque()
        self._live: dict[Sequence, Live] = {}
        self._submitted = 0

    @property
    def load(self) -> ReplicaLoad:
        """What the router is told."""
        scheduler = self.engine.scheduler
        return ReplicaLoad(len(scheduler.running), scheduler.waiting + len(self._inbox), scheduler.max_num_seqs)

    @property
    def idle(self) -> bool:
        return not self._inbox and not self.engine.has_work

    def send(self, request: FleetRequest) -> float:
        """Take a request, and say when it can be in the engine's queue."""
        self._inbox.append(Live(request))
        return request.at + self._request_s

    def round(self, now: float, scale: float = 1.0) -> tuple[float, list[Live]]:
        """One round that begins now and takes `scale` times as long as it costs: when it is over, and who has ended in it."""
        clock, engine, inbox = self._clock, self.engine, self._inbox
        clock.begin(now, scale)
        while inbox and inbox[0].at + self._request_s <= now:
            self._admit(inbox.popleft())
        if not engine.has_work:
            return (inbox[0].at + self._request_s if inbox else now), []
        changed = engine.round()
        after = clock.now
        self.rounds += 1
        self.busy_s += after - now
        ended: list[Live] = []
        for processor in changed:
            seq = processor.seq
            live = self._live[seq]
            if not live.first:
                live.first = after
            if seq.finish_reason is not None:
                live.last = after
                ended.append(self._live.pop(seq))
        return after, ended

    def _admit(self, live: Live) -> None:
        request = live.request
        if len(request.prompt) + request.output > self._context:
            self.refused += 1
            return
        self._submitted += 1
        made = Request(
            f"{self.name}-{self._submitted}", request.prompt, _params(request.temperature), request.text, frozenset(),
            request.output, tenant=request.tenant, memory="",
        )  # fmt: skip
        try:
            processor = self.engine.submit(made, "paper")
        except QueueFull:
            self.refused += 1
            return
        self._live[processor.seq] = live


@lru_cache(maxsize=64)
def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, ignore_eos=True)
