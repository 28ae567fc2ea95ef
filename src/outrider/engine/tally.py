"""What the engine did since it started: counts of every round, and the log line that reports them every ten seconds."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from outrider.config import WITH_WEIGHTS
from outrider.core import RoundReport

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

__all__ = ["GAP_BOUNDS", "Heartbeat", "Tally"]

_log = logging.getLogger("outrider")
_EVERY = 10.0  # seconds
_LOW_ACCEPTANCE = 0.1  # a drafter that is accepted less often does not fit its target or the text
_FIRST_DRAFTS = 30  # of a network, after which so low an acceptance is no accident
_DRAFTS_LEFT, _ROUNDS_LEFT = 3, 200  # as many say so where it hardly drafted any more in so many rounds
_LOW_FOR = 6  # log lines in a row with so low an acceptance before a warning: one minute
_ENOUGH_DRAFTED = 200  # tokens between two log lines that say something about acceptance

GAP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


@dataclass(slots=True)
class Tally:
    """Counts over all sequences. Depths are kept as histograms, so that a round costs the same however deep it drafts."""

    rounds: int = 0  # of one sequence each
    emitted: int = 0
    drafts: int = 0  # rounds that drafted
    drafted: int = 0
    accepted: int = 0
    expert_rounds: int = 0  # forwards of a model with experts
    experts: float = 0.0  # distinct ones that they read, each the mean over layers
    streamed_rounds: int = 0  # in which weights crossed the bus
    bus_bytes: int = 0  # of those weights
    by_source: dict[str, list[int]] = field(default_factory=dict)  # drafted and accepted
    begun: dict[str, list[int]] = field(default_factory=dict)  # drafts, and those of which some token was accepted
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))  # tokens by the time they took
    gap_s: float = 0.0
    _deepest: list[int] = field(default_factory=lambda: [0] * 257)
    _reached: list[int] = field(default_factory=lambda: [0] * 257)

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted tokens; 0 before anything was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def observe(self, report: RoundReport) -> None:
        """Count a round."""
        if report.experts:
            self.expert_rounds += 1
            self.experts += report.experts
        if report.bus_bytes:
            self.streamed_rounds += 1
            self.bus_bytes += report.bus_bytes
        gaps: dict[tuple[float, int], int] = {}  # sequences, by when their last tokens came and how many came now
        for seq in report.sequences:
            if not seq.emits:
                continue
            self.rounds += 1
            self.emitted += seq.kept
            if seq.depths:
                self._count_draft(seq.drafter, seq.depths, seq.accepted)
            if seq.kept and seq.last_token:
                key = (seq.last_token, seq.kept)
                gaps[key] = gaps.get(key, 0) + 1
        for (before, kept), sequences in gaps.items():
            self.note_gap((report.tokens_at - before) / kept, kept * sequences)

    def _count_draft(self, drafter: str, depths: Seq[int], accepted: int) -> None:
        self.drafts += 1
        self.drafted += len(depths)
        self.accepted += accepted
        counts = self.by_source.setdefault(drafter, [0, 0])
        counts[0] += len(depths)
        counts[1] += accepted
        begun = self.begun.setdefault(drafter, [0, 0])
        begun[0] += 1
        begun[1] += accepted > 0
        self._deepest[max(depths) + 1] += 1
        self._reached[accepted] += 1

    def note_gap(self, seconds: float, tokens: int) -> None:
        """Count tokens that came this many seconds after those before them."""
        self.gaps[bisect_left(GAP_BOUNDS, seconds)] += tokens
        self.gap_s += seconds * tokens

    def drafted_by_position(self) -> list[int]:
        """Rounds that drafted to each position or beyond it."""
        return _at_least(self._deepest)

    def accepted_by_position(self) -> list[int]:
        """Rounds whose draft was accepted up to each position, as far as any drafted."""
        counts = _at_least(self._reached)
        return counts + [0] * (len(self.drafted_by_position()) - len(counts))


def _at_least(counts: Seq[int]) -> list[int]:
    """Of counts by depth, how many lie at 1 or deeper, at 2 or deeper, ...; up to the deepest."""
    sums = list(accumulate(reversed(counts[1:])))[::-1]
    return [n for n in sums if n]


class _Counters(NamedTuple):
    at: float
    prompt: int
    emitted: int
    drafts: int
    drafted: int
    accepted: int
    by_position: list[int]


class Heartbeat:
    """Logs throughput and acceptance since the last log line, in vLLM's words. It is silent while no round runs."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._last = self._read_counters()
        self._low = 0  # log lines in a row with a low acceptance
        self._unfit: set[str] = set()  # drafters that were warned of

    def beat(self) -> None:
        self._warn_of_unfit_networks()
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
        self._warn_of_low_acceptance(accepted, drafted)

    def _warn_of_unfit_networks(self) -> None:
        """Warn once of a network whose drafts nearly all fail. The controller soon makes few of one that was named alone."""
        tally = self._engine.tally
        for drafter, (drafts, right) in tally.begun.items():
            was_left = len(tally.begun) == 1 and tally.rounds >= _ROUNDS_LEFT
            enough = drafts >= (_DRAFTS_LEFT if was_left else _FIRST_DRAFTS)
            if drafter in WITH_WEIGHTS and drafter not in self._unfit and enough and right < _LOW_ACCEPTANCE * drafts:
                self._unfit.add(drafter)
                _log.warning(
                    "Of %d drafts by %s in %d rounds only %d had an accepted token: its weights may have been trained for "
                    "another model or template. `outrider bench acceptance` compares methods; --method none decodes plainly",
                    drafts, drafter, tally.rounds, right,
                )  # fmt: skip

    def _warn_of_low_acceptance(self, accepted: int, drafted: int) -> None:
        """Warn once whenever acceptance has stayed low for a minute of drafting."""
        if drafted < _ENOUGH_DRAFTED:
            return
        self._low = self._low + 1 if accepted < _LOW_ACCEPTANCE * drafted else 0
        if self._low == _LOW_FOR:
            _log.warning(
                "Fewer than %.0f%% of the drafted tokens have been accepted for %.0f s: the drafter may not fit this model "
                "or text. `outrider bench acceptance` compares methods; --method none decodes plainly",
                100 * _LOW_ACCEPTANCE, _LOW_FOR * _EVERY,
            )  # fmt: skip

    def _read_counters(self) -> _Counters:
        tally, scheduler = self._engine.tally, self._engine.scheduler
        read = scheduler.prefix_queries - scheduler.prefix_hits
        by_position = tally.accepted_by_position()
        return _Counters(self._clock(), read, tally.emitted, tally.drafts, tally.drafted, tally.accepted, by_position)
