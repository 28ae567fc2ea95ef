"""Latency percentiles for the dashboard. `metrics` has the histograms for Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from outrider.engine.outputs import CompletionOutput, Timings
from outrider.engine.tally import GAP_BOUNDS
from outrider.quantiles import percentile_ms

__all__ = ["Latencies", "bucket_quantile"]

_RECENT = 512  # number of sequences in the percentiles
_QUANTILES = {"p50": 0.5, "p95": 0.95}


class Latencies:
    """Times of the most recently finished sequences."""

    def __init__(self) -> None:
        self._recent: deque[Timings] = deque(maxlen=_RECENT)

    def record(self, output: CompletionOutput) -> None:
        """Record a finished sequence. One without a token has no latency."""
        if output.token_ids:
            self._recent.append(output.timings)

    def summary(self, gaps: Sequence[int]) -> dict[str, Any]:
        """Percentiles in milliseconds. `gaps` is the histogram of inter-token latencies since the start, by `GAP_BOUNDS`."""
        recent = list(self._recent)
        return {
            "requests": len(recent),
            "queue_ms": _percentiles([timings.queued_s for timings in recent]),
            "first_token_ms": _percentiles([timings.first_token_s for timings in recent]),
            "total_ms": _percentiles([timings.total_s for timings in recent]),
            "inter_token_ms": {
                name: _milliseconds(bucket_quantile(GAP_BOUNDS, gaps, quantile)) for name, quantile in _QUANTILES.items()
            },
        }


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


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    return {name: percentile_ms(seconds, share) for name, share in _QUANTILES.items()}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
