"""How many replicas a load needs, which batch, and what speculation is worth there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from outrider.bench.plan.fleet.load import FleetRequest
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.fleet.simulate import simulate
from outrider.bench.plan.fleet.summary import FleetRow, Slo, summarise
from outrider.errors import InvalidParameter

__all__ = ["MAX_REPLICAS", "FleetQuestion", "choose_fleet", "speculation_by_load", "stops_paying"]

MAX_REPLICAS = 10_000
_SAMPLE = 4_000  # requests that a fleet of one size is tried with
_LONE = 24  # requests that say what an idle replica does
_SATURATING = 256  # requests at once that say what a full one does
_BATCHES = (0.25, 0.5, 2.0)  # of the replica's, tried beside it
_LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)  # of the load of a replica in the chosen fleet


@dataclass(frozen=True, slots=True)
class FleetQuestion:
    """A load, what a replica costs, and what is wanted."""

    load: Callable[[], Iterable[FleetRequest]]  # the same requests at every call
    costs: ReplicaCosts
    slo: Slo
    replica_cost: float | None = None
    say: Callable[[str], None] = lambda _: None

    def run(self, replicas: int, speculation: str = "auto", batch: int | None = None, requests: int | None = None) -> FleetRow:
        """Simulate a fleet under the load, or its first requests."""
        costs = self.costs.drafting(speculation)
        if batch is not None and batch != costs.sizes.max_num_seqs:
            costs = costs.with_batch(batch)
        self.say(f"{replicas} replicas of batch {costs.sizes.max_num_seqs}, {speculation}")
        run = simulate(islice(self.load(), requests), costs, replicas)
        return summarise(run, costs.sizes.max_num_seqs, speculation, self.slo, self.replica_cost)


def choose_fleet(question: FleetQuestion, speculation: str = "auto", batch: int | None = None) -> FleetRow:
    """The smallest fleet that meets the SLO; with no `batch`, of the batches tried the one that needs the fewest replicas."""
    _check_reachable(question, speculation)
    usual = batch or question.costs.sizes.max_num_seqs
    best = _smallest(question, speculation, usual, _lower_bound(question, speculation, usual))
    for share in _BATCHES if batch is None else ():
        other = max(1, round(usual * share))
        while best.replicas > 1 and (row := question.run(best.replicas - 1, speculation, other, _SAMPLE)).meets_slo:
            best = row
    return question.run(best.replicas, speculation, best.batch)


def speculation_by_load(question: FleetQuestion, chosen: FleetRow) -> list[tuple[float, FleetRow, FleetRow]]:
    """Requests per second of one replica, with and without speculation, from a light load to more than the chosen fleet's."""
    rows = []
    for share in _LOADS:
        at = share / chosen.replicas
        load = list(_thinned(question.load(), at, max(_SAMPLE // 10, 1)))
        one = replace(question, load=lambda load=load: load)  # type: ignore[misc]
        with_, without = (one.run(1, speculation, chosen.batch) for speculation in ("auto", "none"))
        rows.append((share * chosen.requests_per_s / chosen.replicas, with_, without))
    return rows


def _thinned(load: Iterable[FleetRequest], rate: float, count: int) -> list[FleetRequest]:
    """The first requests at another rate: their times stretched."""
    return [replace(request, at=request.at / rate) for request in islice(load, count)]


def _check_reachable(question: FleetQuestion, speculation: str) -> None:
    """An SLO that one request alone does not meet is met by no fleet."""
    lone = [replace(request, at=1e4 * i) for i, request in enumerate(islice(question.load(), _LONE))]
    if not lone:
        raise InvalidParameter("--arrival", "the load has no request; raise --arrival or --seconds")
    alone = replace(question, load=lambda: lone).run(1, speculation)
    if alone.refused:
        raise InvalidParameter("--prompt-tokens", f"prompt and answer exceed the replica's context of {question.costs.context}")
    if alone.within_slo < question.slo.share:
        limits = f"--ttft {1e3 * question.slo.ttft_s:g} and --tpot {1e3 * question.slo.tpot_s:g}"
        raise InvalidParameter(
            "--ttft/--tpot",
            f"no fleet meets {limits}: one request alone takes {alone.ttft_p99_ms:.1f} ms to its first token and "
            f"{alone.tpot_p99_ms:.2f} ms a token (p99); allow at least that, or plan for a faster replica",
        )


def _lower_bound(question: FleetQuestion, speculation: str, batch: int) -> int:
    """Replicas that would do if every one of them were always full."""
    sample = list(islice(question.load(), _SAMPLE))
    together = [replace(request, at=0.0) for request in sample[:_SATURATING]]
    full = replace(question, load=lambda: together).run(1, speculation, batch)
    span = max(sample[-1].at - sample[0].at, 1e-3) * (len(sample) / max(len(sample) - 1, 1))
    wanted = math.ceil(0.9 * sum(request.output for request in sample) / span / full.output_tok_s) if len(sample) > 1 else 1
    _check_size(wanted)
    return max(wanted, 1)


def _smallest(question: FleetQuestion, speculation: str, batch: int, lower: int) -> FleetRow:
    """Grow until the SLO is met, then halve the last step until it is one."""
    failing, size = lower - 1, lower
    while not (row := question.run(size, speculation, batch, _SAMPLE)).meets_slo:
        failing, size = size, max(size + 1, math.ceil(1.3 * size))
        _check_size(size)
    while row.replicas - failing > max(1, row.replicas // 50):
        middle = (row.replicas + failing) // 2
        other = question.run(middle, speculation, batch, _SAMPLE)
        if other.meets_slo:
            row = other
        else:
            failing = middle
    return row


def _check_size(replicas: int) -> None:
    if replicas > MAX_REPLICAS:
        raise InvalidParameter(
            "--arrival",
            f"this load overloads {MAX_REPLICAS:,} replicas, the most that are simulated; lower it, or plan for a part of it",
        )


def stops_paying(rows: Sequence[tuple[float, FleetRow, FleetRow]], least: float = 1.02) -> float | None:
    """The load from which speculation no longer makes tokens come sooner; None where it does at every load tried."""
    return next((rate for rate, with_, without in rows if without.tpot_p50_ms < least * with_.tpot_p50_ms), None)
