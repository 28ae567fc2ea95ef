"""The fleet's events in virtual time: requests arrive and are routed, replicas run their rounds."""

from __future__ import annotations

import gc
import heapq
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.bench.plan.fleet.load import FleetRequest
from outrider.bench.plan.fleet.paper import CostTable, on_paper
from outrider.bench.plan.fleet.replica import Live, Replica
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.fleet.texts import Texts
from outrider.routing import ReplicaLoad, RequestKeys, Router, RouterOptions, token_prefix

__all__ = ["FleetRun", "run_fleet", "simulate"]


@dataclass(slots=True)
class FleetRun:
    """What came of the load."""

    replicas: int
    slots: int  # sequences that run at once, in all
    first_s: array[float] = field(default_factory=lambda: array("d"))  # of every finished request: until its first token,
    per_token_s: array[float] = field(default_factory=lambda: array("d"))  # per token after it (-1 where it had no other),
    total_s: array[float] = field(default_factory=lambda: array("d"))  # and until its last
    offered: int = 0
    refused: int = 0  # by a full queue, or longer than the context
    tokens: int = 0
    seconds: float = 0.0  # virtual, from the first arrival to the last token
    last_arrival: float = 0.0
    tokens_in_time: int = 0  # emitted for requests that ended before the last arrival
    backlog: int = 0  # sequences in the fleet at the last arrival
    busy_s: float = 0.0  # of all replicas
    rounds: int = 0
    sequence_rounds: int = 0  # rounds of one sequence each that emitted
    drafting: int = 0  # of these, with a draft
    drafted: int = 0
    accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    by_arm: dict[str, int] = field(default_factory=dict)  # drafted tokens
    wall_s: float = 0.0  # real
    cpu_s: float = 0.0  # of this process

    def note(self, live: Live, limit: float) -> None:
        """Count a request that has ended."""
        output = live.request.output
        self.first_s.append(live.first - live.at)
        self.per_token_s.append((live.last - live.first) / (output - 1) if output > 1 else -1.0)
        self.total_s.append(live.last - live.at)
        self.tokens += output
        if live.last <= limit:
            self.tokens_in_time += output


def simulate(
    requests: Iterable[FleetRequest], costs: ReplicaCosts, replicas: int, options: RouterOptions | None = None
) -> FleetRun:
    """Run the load on so many replicas to its end. The same load gives the same numbers."""
    table, texts = CostTable(costs.costs), Texts(costs.texts, [arm.name for arm in costs.arms])
    return run_fleet(requests, [on_paper(f"r{i}", costs, table, texts) for i in range(replicas)], costs, options)


def run_fleet(
    requests: Iterable[FleetRequest], fleet: list[Replica], costs: ReplicaCosts, options: RouterOptions | None = None
) -> FleetRun:
    """Run the load on these replicas, on paper or not, to its end."""
    run = FleetRun(len(fleet), len(fleet) * costs.sizes.max_num_seqs)
    began, cpu = time.perf_counter(), time.process_time()
    with _without_collector():
        _Events(fleet, Router(options), run, costs).go(iter(requests))
    run.wall_s, run.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    for replica in fleet:
        _add(run, replica)
    return run


class _Events:
    """What happens next: an arrival, or the end of a replica's round."""

    def __init__(self, fleet: list[Replica], router: Router, run: FleetRun, costs: ReplicaCosts) -> None:
        self._fleet, self._router, self._run, self._costs = fleet, router, run, costs
        self._numbers = {replica.name: i for i, replica in enumerate(fleet)}
        self._loads: dict[str, ReplicaLoad] = {replica.name: replica.load for replica in fleet}
        self._stale: set[int] = set()  # replicas whose load has changed since it was looked at

    def go(self, arrivals: Iterator[FleetRequest]) -> None:
        due: list[tuple[float, int]] = []  # when the next round of a replica can begin
        fleet, run, stale = self._fleet, self._run, self._stale
        shared, alone = self._costs.per_machine, self._costs.alone
        working = [0] * (len(fleet) // shared + 1)  # replicas with work, by machine
        now, request = 0.0, next(arrivals, None)
        while True:
            while request is not None and (not due or request.at <= due[0][0]):
                now = request.at
                number = self._route(request)
                was_idle = fleet[number].idle
                ready = fleet[number].send(request)
                if was_idle:
                    heapq.heappush(due, (ready, number))
                    working[number // shared] += 1
                run.last_arrival = now
                if (request := next(arrivals, None)) is None:
                    run.backlog = sum(load.running + load.waiting for load in (replica.load for replica in fleet))
            if not due:
                break
            at, number = due[0]
            now, ended = fleet[number].round(at, 1.0 if working[number // shared] > 1 or shared == 1 else alone)
            for live in ended:
                run.note(live, now if request is not None else run.last_arrival)
            run.seconds = max(run.seconds, now)
            stale.add(number)
            if fleet[number].idle:
                heapq.heappop(due)
                working[number // shared] -= 1
            else:
                heapq.heapreplace(due, (now, number))

    def _route(self, request: FleetRequest) -> int:
        """The real router's choice, by what the replicas hold now."""
        self._run.offered += 1
        if len(self._fleet) == 1:
            return 0
        for number in self._stale:
            replica = self._fleet[number]
            self._loads[replica.name] = replica.load
        self._stale.clear()
        prefix = token_prefix(request.prompt, request.tenant or "", self._costs.sizes.page_size)
        keys = RequestKeys(request.conversation, request.tenant, prefix)
        name = self._router.choose(keys, self._loads, request.at)
        self._router.sent(name, keys)
        number = self._numbers[name]
        self._stale.add(number)
        return number


def _add(run: FleetRun, replica: Replica) -> None:
    """Count what one replica did."""
    tally, scheduler = replica.engine.tally, replica.engine.scheduler
    run.refused += replica.refused
    run.busy_s += replica.busy_s
    run.rounds += replica.rounds
    run.sequence_rounds += tally.rounds
    run.drafting += tally.drafts
    run.drafted += tally.drafted
    run.accepted += tally.accepted
    run.prefix_queries += scheduler.prefix_queries
    run.prefix_hits += scheduler.prefix_hits
    run.preemptions += scheduler.preemptions
    for name, (drafted, _) in tally.by_source.items():
        run.by_arm[name] = run.by_arm.get(name, 0) + drafted


@contextmanager
def _without_collector() -> Iterator[None]:
    """The garbage collector finds nothing in a simulation, and looks through every replica for it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
