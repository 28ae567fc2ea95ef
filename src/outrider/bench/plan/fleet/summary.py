"""A simulated run in numbers: rates, tail latency, what of it meets the SLO, what a million tokens cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.plan.fleet.simulate import FleetRun
from outrider.errors import InvalidParameter
from outrider.quantiles import quantile

__all__ = ["FleetRow", "Slo", "summarise"]

_BACKLOG = 1.0  # sequences per slot at the last arrival above which the fleet falls behind


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level: a share of the requests has its first token, and each further one, within these seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    share: float = 0.99

    def __post_init__(self) -> None:
        for name, value in (("--ttft", self.ttft_s), ("--tpot", self.tpot_s)):
            if not (math.isfinite(value) and value > 0):
                raise InvalidParameter(name, f"must be a positive number of milliseconds, got {1e3 * value:g}")


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One fleet under one load."""

    replicas: int
    batch: int  # sequences that a replica runs at once
    speculation: str
    requests: int
    refused: int
    requests_per_s: float
    output_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    within_slo: float  # share of the requests
    meets_slo: bool
    overloaded: bool  # requests were refused, or more of them came than ended
    busy: float  # share of the replicas' time
    mean_batch: float
    prefix_hit_rate: float
    drafting: float  # share of the sequences' rounds that draft
    tokens_per_round: float
    drafted_by: dict[str, float]  # share of the drafted tokens
    preemptions: int
    cost_per_million: float | None  # output tokens
    seconds: float
    rounds: int
    rounds_per_s: float  # simulated in a second of real time
    rounds_per_cpu_s: float  # and of the processor

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: FleetRun, batch: int, speculation: str, slo: Slo, replica_cost: float | None = None) -> FleetRow:
    """The numbers of a run; `replica_cost` is of one replica for an hour."""
    span = max(run.seconds, 1e-9)
    times = [time for time in run.per_token_s if time >= 0]
    drafted = sum(run.by_arm.values())
    overloaded = run.refused > 0 or run.backlog > _BACKLOG * run.slots
    within = _within(run, slo)
    cost = None if replica_cost is None or not run.tokens else replica_cost * run.replicas * span / 3600 / run.tokens * 1e6
    return FleetRow(
        replicas=run.replicas,
        batch=batch,
        speculation=speculation,
        requests=run.offered,
        refused=run.refused,
        requests_per_s=len(run.first_s) / span,
        output_tok_s=run.tokens / span,
        ttft_p50_ms=_milliseconds(run.first_s, 0.5),
        ttft_p99_ms=_milliseconds(run.first_s, 0.99),
        tpot_p50_ms=_milliseconds(times, 0.5),
        tpot_p99_ms=_milliseconds(times, 0.99),
        within_slo=within,
        meets_slo=within >= slo.share and not overloaded,
        overloaded=overloaded,
        busy=run.busy_s / span / run.replicas,
        mean_batch=run.sequence_rounds / run.rounds if run.rounds else 0.0,
        prefix_hit_rate=run.prefix_hits / run.prefix_queries if run.prefix_queries else 0.0,
        drafting=run.drafting / run.sequence_rounds if run.sequence_rounds else 0.0,
        tokens_per_round=run.tokens / run.sequence_rounds if run.sequence_rounds else 0.0,
        drafted_by={name: count / drafted for name, count in run.by_arm.items()} if drafted else {},
        preemptions=run.preemptions,
        cost_per_million=cost,
        seconds=run.seconds,
        rounds=run.rounds,
        rounds_per_s=run.rounds / run.wall_s if run.wall_s else 0.0,
        rounds_per_cpu_s=run.rounds / run.cpu_s if run.cpu_s else 0.0,
    )


def _within(run: FleetRun, slo: Slo) -> float:
    """The share of all requests, refused ones included, that met both limits."""
    pairs = zip(run.first_s, run.per_token_s, strict=True)
    return sum(first <= slo.ttft_s and each <= slo.tpot_s for first, each in pairs) / max(run.offered, 1)


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return 1e3 * quantile(seconds, share) if len(seconds) else 0.0
