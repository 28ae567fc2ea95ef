"""Prometheus metrics with vLLM's names. The engine keeps its own counters, which are read when metrics are scraped."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from platform import python_version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider._version import __version__
from outrider.core import Request
from outrider.engine.engine import Engine
from outrider.engine.outputs import CompletionOutput
from outrider.engine.tally import GAP_BOUNDS

__all__ = ["Metrics", "Snapshot", "snapshot_of"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MAX_REASONS = 32  # label values; further reasons are counted as `other`
_P = "outrider:"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's counters at one moment between two rounds."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    rounds: int = 0
    emitted: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS) + 1))
    gap_s: float = 0.0


def snapshot_of(engine: Engine) -> Snapshot:
    """Read the engine's counters. Must run on the engine's thread."""
    tally, scheduler, pages = engine.tally, engine.scheduler, engine.pages
    return Snapshot(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        kv_usage=round(pages.used / pages.count, 6),
        preemptions=scheduler.preemptions,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        rounds=tally.rounds,
        emitted=tally.emitted,
        drafts=tally.drafts,
        drafted=tally.drafted,
        accepted=tally.accepted,
        by_source={name: (drafted, accepted) for name, (drafted, accepted) in tally.by_source.items()},
        drafted_by_position=tally.drafted_by_position(),
        accepted_by_position=tally.accepted_by_position(),
        gaps=list(tally.gaps),
        gap_s=tally.gap_s,
    )


class Metrics:
    """Counts of requests, kept here, and of rounds, kept by the engine."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.snapshot = Snapshot()
        self.off_reasons: Counts[str] = Counts()
        self.finish_reasons: Counts[str] = Counts()
        self._model = model
        self._ttft = self._histogram("time_to_first_token_seconds", "From submission to the first token.", _SECONDS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From submission to the last token.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From submission to admission.", _SECONDS)
        self._preparation = self._histogram(
            "request_preparation_time_seconds", "Tokenising, templates and grammars, before submission.", _SECONDS
        )
        self._prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean over a request's tokens.", GAP_BOUNDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of the prompt.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens generated.", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._success = self._counter("request_success", "Requests by how they ended.", "finished_reason")
        self._speculation = self._counter(
            "request_speculation", "Requests with speculation on or off, and why.", "state", "reason"
        )
        self._fallbacks = self._counter("spec_decode_fallbacks", "Requests without drafts after a fault.", "reason")
        self._corrupted = self._counter("corrupted_requests", "Requests whose logits were not finite or whose forward failed.")
        self.refused = self._counter("requests_refused", "Requests refused because the queue was full.").labels(model)
        self._http = self._counter("http_requests", "HTTP answers by route and status.", "route", "status")
        Info(_P + "build", "Versions of Outrider and Python.", ("model_name",), registry=self.registry).labels(model).info(
            {"version": __version__, "python": python_version()}
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineCollector(self))

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP answer."""
        self._http.labels(self._model, route, str(status)).inc()

    def preparation(self) -> AbstractContextManager[object]:
        """A context manager that measures the preparation time of a request."""
        return self._preparation.labels(self._model).time()

    def finished(self, request: Request, output: CompletionOutput) -> None:
        """Record one finished sequence."""
        model, timings, tokens = self._model, output.timings, len(output.token_ids)
        reason = output.finish_reason or "abort"
        self.finish_reasons[reason] += 1
        self._success.labels(model, reason).inc()
        if reason == "error":
            self._corrupted.labels(model).inc()
        self._queue.labels(model).observe(timings.queued_s)
        if tokens:
            self._ttft.labels(model).observe(timings.first_token_s)
            self._e2e.labels(model).observe(timings.total_s)
            self._prefill.labels(model).observe(max(timings.first_token_s - timings.queued_s, 0.0))
            self._decode.labels(model).observe(timings.total_s - timings.first_token_s)
            self._generated.labels(model).observe(tokens)
        if timings.decode_tokens_per_s:
            self._tpot.labels(model).observe(1 / timings.decode_tokens_per_s)
        if request.index == 0:
            self._prompt.labels(model).observe(len(request.prompt_ids))
            self._prompt_tokens.labels(model).inc(len(request.prompt_ids))
        self._count_speculation(request, output)

    def _count_speculation(self, request: Request, output: CompletionOutput) -> None:
        stats = output.speculation
        fallback = stats["fallback_reason"]
        off = stats["off_reason"] if request.speculate else "the request turned it off"
        if fallback:
            self._fallbacks.labels(self._model, _kind(fallback)).inc()
        if off is not None:
            off = _kind(off)
            off = off if off in self.off_reasons or len(self.off_reasons) < _MAX_REASONS else "other"
            self.off_reasons[off] += 1
        self._speculation.labels(self._model, "on" if off is None else "off", off or "").inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_P + name, text, ("model_name",), registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_P + name, text, ("model_name", *labels), registry=self.registry)


def _kind(reason: str) -> str:
    """A reason without its details, because the number of label values must stay small."""
    return ": ".join(reason.split(": ")[:2])[:80]


class _EngineCollector(Collector):
    """Exports the last snapshot as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        now, model = self._metrics.snapshot, [self._metrics._model]
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", now.running),
            ("num_requests_waiting", "Sequences in the queue.", now.waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", now.kv_usage),
        ):
            gauge = GaugeMetricFamily(_P + name, text, labels=["model_name"])
            gauge.add_metric(model, value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_hits),
            ("num_preemptions", "Preemptions of running sequences.", now.preemptions),
            ("generation_tokens", "Tokens generated.", now.emitted),
            ("num_rounds", "Rounds, counted once for each sequence in the round.", now.rounds),
            ("spec_decode_num_drafts", "Rounds with a draft, counted once for each sequence with a draft.", now.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", now.drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", now.accepted),
        ):
            counter = CounterMetricFamily(_P + name, text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        yield from self._by_label(now)
        gaps = HistogramMetricFamily(_P + "inter_token_latency_seconds", "Time between tokens.", labels=["model_name"])
        total, buckets = 0, []
        for bound, count in zip((*GAP_BOUNDS, "+Inf"), now.gaps, strict=True):
            total += count
            buckets.append((str(bound), total))
        gaps.add_metric(model, buckets, now.gap_s)
        yield gaps

    def _by_label(self, now: Snapshot) -> Iterator[Metric]:
        model = self._metrics._model
        positions = CounterMetricFamily(
            _P + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by depth in the draft.",
            labels=["model_name", "position"],
        )
        for position, accepted in enumerate(now.accepted_by_position):
            positions.add_metric([model, str(position)], accepted)
        yield positions
        drafted = CounterMetricFamily(
            _P + "spec_decode_draft_tokens_by_method", "Drafted tokens by drafter.", labels=["model_name", "method"]
        )
        accepted_by = CounterMetricFamily(
            _P + "spec_decode_accepted_tokens_by_method", "Accepted tokens by drafter.", labels=["model_name", "method"]
        )
        share = GaugeMetricFamily(
            _P + "spec_decode_acceptance_by_method",
            "Share of drafted tokens accepted, by drafter.",
            labels=["model_name", "method"],
        )
        for method, (drafted_tokens, accepted_tokens) in now.by_source.items():
            drafted.add_metric([model, method], drafted_tokens)
            accepted_by.add_metric([model, method], accepted_tokens)
            share.add_metric([model, method], accepted_tokens / drafted_tokens if drafted_tokens else 0.0)
        yield from (drafted, accepted_by, share)
