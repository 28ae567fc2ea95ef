"""Metrics: Prometheus with vLLM's names, latencies for the dashboard, and the `metrics` field of answers.

The engine keeps counters too. They are read when metrics are scraped.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from platform import python_version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider._version import __version__
from outrider.core import Request
from outrider.engine.acceptance import acceptance_totals
from outrider.engine.engine import Engine
from outrider.engine.outputs import CompletionOutput, Timings
from outrider.engine.tally import GAP_BOUNDS, Tally
from outrider.quantiles import percentile_ms
from outrider.serve.tags import TagCounts

__all__ = ["Metrics", "Snapshot", "bucket_quantile", "metrics_of", "snapshot_of"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission to the first token.", _SECONDS),
    "e2e_request_latency_seconds": ("From submission to the last token.", _SECONDS),
    "request_queue_time_seconds": ("From submission to admission.", _SECONDS),
    "request_preparation_time_seconds": ("Tokenising, templates and grammars, before submission.", _SECONDS),
    "request_prefill_time_seconds": ("From admission to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean over a request's tokens.", GAP_BOUNDS),
    "request_prompt_tokens": ("Tokens of the prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated.", _TOKENS),
}
_MAX_REASONS = 32  # label values; further reasons are counted as `other`
_RECENT = 512  # number of sequences in the percentiles of the dashboard
_QUANTILES = {"p50": 0.5, "p95": 0.95}
_P = "outrider:"
_VLLM = "vllm:"  # the prefix of vLLM's metrics
_VLLM_METRICS = {  # ours that vLLM's dashboards read too
    f"{_P}spec_decode_{name}"
    for name in ("acceptance_rate", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's counters at one moment between two rounds."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    tally: Tally = field(default_factory=Tally)


def snapshot_of(engine: Engine) -> Snapshot:
    """Read the engine's counters. Must run on the engine's thread."""
    scheduler, pages = engine.scheduler, engine.pages
    return Snapshot(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        kv_usage=round(pages.used / pages.count, 6),
        preemptions=scheduler.preemptions,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        tally=deepcopy(engine.tally),
    )


class Metrics(Collector):
    """Counts of requests, kept here, and of rounds, from the engine's last snapshot."""

    def __init__(self, model: str, vllm_names: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._vllm_names = vllm_names
        self.snapshot = Snapshot()
        self.off_reasons: Counts[str] = Counts()
        self.finish_reasons: Counts[str] = Counts()
        self._model = model
        self._recent: deque[Timings] = deque(maxlen=_RECENT)
        self._histograms = {
            name: Histogram(_P + name, text, ("model_name",), registry=self.registry, buckets=buckets).labels(model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._success = self._counter("request_success", "Requests by how they ended.", "finished_reason")
        self._speculation = self._counter(
            "request_speculation", "Requests with speculation on or off, and why.", "state", "reason"
        )
        self._fallbacks = self._counter("spec_decode_fallbacks", "Requests without drafts after a fault.", "reason")
        self._rules = self._counter("speculation_rule_requests", "Requests by the rule of speculation that applied.", "rule")
        self.tags = TagCounts()
        self._corrupted = self._counter("corrupted_requests", "Requests whose logits were not finite or whose forward failed.")
        self.refused = self._counter("requests_refused", "Requests refused because the queue was full.").labels(model)
        self._http = self._counter("http_requests", "HTTP answers by route and status.", "route", "status")
        Info(_P + "build", "Versions of Outrider and Python.", ("model_name",), registry=self.registry).labels(model).info(
            {"version": __version__, "python": python_version()}
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP answer."""
        self._http.labels(self._model, route, str(status)).inc()

    def preparation(self) -> AbstractContextManager[object]:
        """A context manager that measures the preparation time of a request."""
        return self._histograms["request_preparation_time_seconds"].time()

    def finished(self, request: Request, output: CompletionOutput) -> None:
        """Record one finished sequence. One without a token has no latency."""
        timings, tokens, reason = output.timings, len(output.token_ids), output.finish_reason or "abort"
        self.finish_reasons[reason] += 1
        self._success.labels(self._model, reason).inc()
        if reason == "error":
            self._corrupted.labels(self._model).inc()
        values = {"request_queue_time_seconds": timings.queued_s}
        if request.tag is not None:
            self.tags.add(request.tag, output)
        if tokens:
            self._recent.append(timings)
            values |= {
                "time_to_first_token_seconds": timings.first_token_s,
                "e2e_request_latency_seconds": timings.total_s,
                "request_prefill_time_seconds": max(timings.first_token_s - timings.queued_s, 0.0),
                "request_decode_time_seconds": timings.total_s - timings.first_token_s,
                "request_generation_tokens": tokens,
            }
        if timings.decode_tokens_per_s:
            values["request_time_per_output_token_seconds"] = 1 / timings.decode_tokens_per_s
        if request.index == 0:
            values["request_prompt_tokens"] = len(request.prompt_ids)
            self._prompt_tokens.labels(self._model).inc(len(request.prompt_ids))
        for name, value in values.items():
            self._histograms[name].observe(value)
        self._count_speculation(request, output)

    def _count_speculation(self, request: Request, output: CompletionOutput) -> None:
        stats = output.speculation
        fallback = stats["fallback_reason"]
        by = "the request" if request.rule is None else f"the rule {request.rule}"
        off = stats["off_reason"] if request.speculate else f"{by} turned it off"
        if request.rule is not None:
            self._rules.labels(self._model, request.rule).inc()
        if fallback:
            self._fallbacks.labels(self._model, _kind(fallback)).inc()
        if off is not None:
            off = _kind(off)
            off = off if off in self.off_reasons or len(self.off_reasons) < _MAX_REASONS else "other"
            self.off_reasons[off] += 1
        self._speculation.labels(self._model, "on" if off is None else "off", off or "").inc()

    def latency(self, gaps: Sequence[int]) -> dict[str, Any]:
        """Percentiles in milliseconds. `gaps` is the histogram of inter-token latencies since the start, by `GAP_BOUNDS`."""
        recent = list(self._recent)
        out: dict[str, Any] = {"requests": len(recent)}
        for name, seconds in (
            ("queue_ms", [timings.queued_s for timings in recent]),
            ("first_token_ms", [timings.first_token_s for timings in recent]),
            ("total_ms", [timings.total_s for timings in recent]),
        ):
            out[name] = {label: percentile_ms(seconds, share) for label, share in _QUANTILES.items()}
        between = {label: bucket_quantile(GAP_BOUNDS, gaps, share) for label, share in _QUANTILES.items()}
        out["inter_token_ms"] = {label: None if gap is None else round(1000 * gap, 3) for label, gap in between.items()}
        return out

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_P + name, text, ("model_name", *labels), registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The last snapshot as metrics, those of speculation under vLLM's names too if that is set."""
        for metric in self._snapshot_metrics():
            yield metric
            if self._vllm_names and metric.name in _VLLM_METRICS:
                twin = copy(metric)
                twin.name = _VLLM + metric.name.removeprefix(_P)
                twin.samples = [sample._replace(name=_VLLM + sample.name.removeprefix(_P)) for sample in metric.samples]
                yield twin

    def _snapshot_metrics(self) -> Iterator[Metric]:
        now, tally = self.snapshot, self.snapshot.tally
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", now.running),
            ("num_requests_waiting", "Sequences in the queue.", now.waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", now.kv_usage),
            ("spec_decode_acceptance_rate", "Share of drafted tokens accepted since the start.", tally.acceptance_rate),
        ):
            yield self._family(GaugeMetricFamily, name, text, {"": value})
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queries),
            ("prefix_cache_hits", "Tokens of prompts that were in the prefix cache.", now.prefix_hits),
            ("num_preemptions", "Preemptions of running sequences.", now.preemptions),
            ("generation_tokens", "Tokens generated.", tally.emitted),
            ("num_rounds", "Rounds, counted once for each sequence in the round.", tally.rounds),
            ("spec_decode_num_drafts", "Rounds with a draft, counted once for each sequence with a draft.", tally.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", tally.drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", tally.accepted),
        ):
            yield self._family(CounterMetricFamily, name, text, {"": value})
        if tally.expert_rounds:
            text = "Distinct experts that a forward reads, the mean over layers; summed over forwards."
            experts = SummaryMetricFamily(_P + "experts_per_round", text, labels=["model_name"])
            experts.add_metric([self._model], tally.expert_rounds, tally.experts)
            yield experts
        if tally.streamed_rounds:
            text = "Bytes of weights that crossed the bus to the GPU, by round; summed over rounds in which some did."
            moved = SummaryMetricFamily(_P + "bus_bytes_per_round", text, labels=["model_name"])
            moved.add_metric([self._model], tally.streamed_rounds, tally.bus_bytes)
            yield moved
        positions = {str(position): accepted for position, accepted in enumerate(tally.accepted_by_position())}
        text = "Accepted tokens by depth in the draft."
        yield self._family(CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, positions, "position")
        drafted = {name: counts[0] for name, counts in tally.by_source.items()}
        accepted = {name: counts[1] for name, counts in tally.by_source.items()}
        shares = {name: accepted[name] / count if count else 0.0 for name, count in drafted.items()}
        for kind, name, text, values in (
            (CounterMetricFamily, "draft_tokens", "Drafted tokens by drafter.", drafted),
            (CounterMetricFamily, "accepted_tokens", "Accepted tokens by drafter.", accepted),
            (GaugeMetricFamily, "acceptance", "Share of drafted tokens accepted, by drafter.", shares),
        ):
            yield self._family(kind, f"spec_decode_{name}_by_method", text, values, "method")
        yield from self._by_tag()
        gaps = HistogramMetricFamily(_P + "inter_token_latency_seconds", "Time between tokens.", labels=["model_name"])
        bounds = map(str, (*GAP_BOUNDS, "+Inf"))
        gaps.add_metric([self._model], list(zip(bounds, accumulate(tally.gaps), strict=True)), tally.gap_s)
        yield gaps

    def _by_tag(self) -> Iterator[Metric]:
        tallies = dict(self.tags.items())
        for kind, name, text, value in (
            (CounterMetricFamily, "num_rounds_by_tag", "Rounds of finished sequences by tag.", "rounds"),
            (CounterMetricFamily, "generation_tokens_by_tag", "Tokens of finished sequences by tag.", "tokens"),
            (CounterMetricFamily, "spec_decode_draft_tokens_by_tag", "Drafted tokens by tag.", "drafted"),
            (CounterMetricFamily, "spec_decode_accepted_tokens_by_tag", "Accepted tokens by tag.", "accepted"),
            (GaugeMetricFamily, "spec_decode_acceptance_by_tag", "Share of drafted tokens accepted, by tag.", "acceptance"),
            (GaugeMetricFamily, "tokens_per_round_by_tag", "Tokens that a round emits, by tag.", "tokens_per_round"),
        ):
            yield self._family(kind, name, text, {tag: getattr(tally, value) for tag, tally in tallies.items()}, "tag")

    def _family(self, kind: Any, name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
        """A metric with a value for each value of its label, or with one value if it has no label but the model's name."""
        family: Metric = kind(_P + name, text, labels=["model_name", *([label] if label else [])])
        for value_label, value in values.items():
            family.add_metric([self._model, *([value_label] if label else [])], value)  # type: ignore[attr-defined]
        return family


def _kind(reason: str) -> str:
    """A reason without its details, because the number of label values must stay small."""
    return ": ".join(reason.split(": ")[:2])[:80]


def bucket_quantile(bounds: Sequence[float], counts: Sequence[int], quantile: float) -> float | None:
    """Prometheus' histogram_quantile: linear within a bucket. `counts` has one entry more than `bounds`, for larger values."""
    rank, below = quantile * sum(counts), 0
    if rank == 0:
        return None
    for i, (bound, count) in enumerate(zip(bounds, counts, strict=False)):
        if below + count >= rank:
            lower = bounds[i - 1] if i else 0.0
            return lower + (bound - lower) * (rank - below) / count
        below += count
    return bounds[-1]


def metrics_of(outputs: Sequence[CompletionOutput], draft_tokens: int) -> dict[str, Any]:
    """Speculation statistics, with vLLM's names and some further ones, and times; over all outputs."""
    stats = [output.speculation for output in outputs]
    drafted_at, accepted_at = (
        [sum(counts) for counts in zip_longest(*(row[f"{kind}_by_position"] for row in stats), fillvalue=0)]
        for kind in ("drafted", "accepted")
    )
    totals = acceptance_totals(outputs)
    drafted, accepted, steps = totals["drafted"], totals["accepted"], sum(drafted_at[:1])
    rounds, tokens = sum(row["rounds"] for row in stats), sum(len(output.token_ids) for output in outputs)
    reached = [steps, *accepted_at, 0]
    first = stats[0] if stats else {}
    total = max((output.timings.total_s for output in outputs), default=0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": totals["mean_acceptance_length"] or 0.0,
            "draft_acceptance_rate": totals["acceptance_rate"] or 0.0,
            "acceptance_histogram": [a - b for a, b in pairwise(reached)] if steps else [],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": draft_tokens,
            "method": first.get("method", "none"),
            "rounds": rounds,
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_by_position": [round(a / d, 4) for a, d in zip(accepted_at, drafted_at, strict=False)],
            "off_reason": first.get("off_reason"),
            "fallback_reason": first.get("fallback_reason"),
        },
        "timings": {
            "first_token_ms": round(1000 * min((output.timings.first_token_s for output in outputs), default=0.0), 3),
            "queue_ms": round(1000 * max((output.timings.queued_s for output in outputs), default=0.0), 3),
            "total_ms": round(1000 * total, 3),
            "tokens_per_s": round(tokens / total, 3) if total > 0 else 0.0,
            "draft_n": drafted,
            "draft_n_accepted": accepted,
        },
    }
