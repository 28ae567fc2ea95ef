"""Throughput and acceptance, logged every ten seconds under load, in vLLM's words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from outrider.engine.engine import Engine

__all__ = ["Heartbeat"]

_log = logging.getLogger("outrider")
_EVERY = 10.0  # seconds


class _Counters(NamedTuple):
    at: float
    prompt: int
    emitted: int
    drafts: int
    drafted: int
    accepted: int
    by_position: list[int]


class Heartbeat:
    """Logs what happened since the last log line. Called after every round, so it is silent while nothing runs."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._last = self._read_counters()

    def beat(self) -> None:
        if self._clock() - self._last.at < _EVERY:
            return
        now, last = self._read_counters(), self._last
        self._last = now
        seconds, scheduler, pages = now.at - last.at, self._engine.scheduler, self._engine.pages
        hits = scheduler.prefix_hits / scheduler.prefix_queries if scheduler.prefix_queries else 0.0
        _log.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, Preemptions: %d",
            (now.prompt - last.prompt) / seconds, (now.emitted - last.emitted) / seconds, len(scheduler.running),
            scheduler.waiting, 100.0 * pages.used / pages.count, 100.0 * hits, scheduler.preemptions,
        )  # fmt: skip
        drafts, drafted, accepted = now.drafts - last.drafts, now.drafted - last.drafted, now.accepted - last.accepted
        if drafts:
            before = last.by_position + [0] * len(now.by_position)
            rates = [(a - b) / drafts for a, b in zip(now.by_position, before, strict=False)]
            _log.info(
                "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
                "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
                "Per-position acceptance rate: %s, Avg draft acceptance rate: %.1f%%",
                1.0 + accepted / drafts, accepted / seconds, drafted / seconds, accepted, drafted,
                ", ".join(f"{rate:.3f}" for rate in rates[:8]), 100.0 * accepted / drafted,
            )  # fmt: skip

    def _read_counters(self) -> _Counters:
        tally, scheduler = self._engine.tally, self._engine.scheduler
        read = scheduler.prefix_queries - scheduler.prefix_hits
        by_position = tally.accepted_by_position()
        return _Counters(self._clock(), read, tally.emitted, tally.drafts, tally.drafted, tally.accepted, by_position)
