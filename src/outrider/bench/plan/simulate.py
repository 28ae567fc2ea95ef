"""Recorded drafts through the real controller, without a model: acceptance from traces, time from a table of costs."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.bench.plan.costs import RoundCosts, controller_costs
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.control import Controller, FixedLength, Load, Policy, RoundStats
from outrider.core import Arm, Drafts
from outrider.errors import InvalidParameter

__all__ = ["SimulatedRun", "Traffic", "simulate"]

_NO_DRAFT = DraftRecord([], [], [], 0, 0)
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load: how many requests, how long, how many at once, and how they arrive."""

    requests: int = 64
    tokens: int = 128
    batch: int = 1  # sequences that run at once, at most
    rate: float | None = None  # per second, at random; None: all are there from the beginning
    seed: int = 0

    def arrivals(self) -> list[float]:
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            now += rng.expovariate(self.rate) if self.rate else 0.0
            times.append(now)
        return times


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of a simulation."""

    policy: str
    seconds: float
    tok_s: float
    tokens_per_round: float  # of a sequence
    latency_s: float  # mean, from arrival to the last token
    drafted_by: dict[str, float]  # share of the sequences' rounds that each method drafted for

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class _SimulatedRequest:
    arrived: float
    prompt: int
    left: int
    traces: list[Trace]  # by arm
    emitted: int = 0
    read: bool = False  # its prompt

    def draft(self, arm: int) -> DraftRecord:
        """What the method drafted in the last recorded round not after this position."""
        records = self.traces[arm].drafts
        place = bisect_right(records, self.emitted, key=lambda record: record.at) - 1
        return records[max(place, 0)] if records else _NO_DRAFT


def simulate(traces: Sequence[Trace], costs: Mapping[str, RoundCosts], traffic: Traffic, policy: str = "auto") -> SimulatedRun:
    """One run. `policy` is "auto" (the controller over all methods), "none", or one of the methods at its recorded length."""
    by_method: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_method[trace.method].append(trace)
    arms = [Arm(name, max(trace.max_length for trace in group)) for name, group in by_method.items()]
    for name in (PLAIN, *by_method):
        if name not in costs:
            raise InvalidParameter("--costs", f"has no costs of {name!r}; it has: {', '.join(costs)}")
    groups = list(by_method.values())
    waiting = deque(
        _SimulatedRequest(at, groups[0][i % len(groups[0])].prompt, traffic.tokens, [group[i % len(group)] for group in groups])
        for i, at in enumerate(traffic.arrivals())
    )
    chosen, fixed_arm = _policy(policy, arms, costs)
    return _Simulation(arms, costs, RoundCosts.forwards(costs.values()), chosen, fixed_arm).go(policy, waiting, traffic)


def _policy(name: str, arms: Sequence[Arm], costs: Mapping[str, RoundCosts]) -> tuple[Policy, int]:
    if name == "auto":
        return Controller(arms, controller_costs(arms, PLAIN, costs)), 0
    if name == PLAIN:
        return FixedLength(0), 0
    for i, arm in enumerate(arms):
        if arm.name == name:
            return FixedLength(arm.max_nodes), i
    raise InvalidParameter("--policy", f"unknown {name!r}; known: auto, none, {', '.join(arm.name for arm in arms)}")


@dataclass
class _Simulation:
    """The clock and who runs."""

    arms: Sequence[Arm]
    costs: Mapping[str, RoundCosts]
    target: RoundCosts
    policy: Policy
    fixed_arm: int  # of a policy that knows only one
    clock: float = 0.0
    rounds: int = 0
    users: Counter[str] = field(default_factory=Counter)

    def go(self, name: str, waiting: deque[_SimulatedRequest], traffic: Traffic) -> SimulatedRun:
        running: list[_SimulatedRequest] = []
        latencies: list[float] = []
        while waiting or running:
            if not running:
                self.clock = max(self.clock, waiting[0].arrived)
            while waiting and len(running) < traffic.batch and waiting[0].arrived <= self.clock:
                running.append(waiting.popleft())
            self.step(running)
            for done in [request for request in running if request.left == 0]:
                running.remove(done)
                self.policy.forget(done)
                latencies.append(self.clock - done.arrived)
        tokens = traffic.requests * traffic.tokens
        shares = {arm: count / self.rounds for arm, count in self.users.items()}
        decoded = tokens - traffic.requests  # the first token of each comes with its prompt
        return SimulatedRun(name, self.clock, tokens / self.clock, decoded / self.rounds, sum(latencies) / len(latencies), shares)

    def step(self, running: list[_SimulatedRequest]) -> None:
        """One round, as the engine runs it."""
        reading = [request.prompt for request in running if not request.read]
        rows = sum(1 if request.read else request.prompt for request in running)
        room = [request.left - 1 if request.read else 0 for request in running]
        load = Load(room, list(running), rows, sum(request.prompt + request.emitted for request in running), len(running))
        plan = self.policy.plan(load)
        arms = plan.arms or (self.fixed_arm,) * len(running)
        planned = list(zip(running, arms, plan.lengths, strict=True))
        records = [request.draft(arm) if n else _NO_DRAFT for request, arm, n in planned]
        trees = [record.likeliest(n) for record, n in zip(records, plan.lengths, strict=True)]
        drafts = Drafts.trees([(nodes, parents) for nodes, parents, _ in trees], survival=[chances for _, _, chances in trees])
        kept = [tree.tokens for tree in self.policy.select(drafts, load).per_sequence]  # a node's token is its number
        paths = [_path(record, nodes) for record, nodes in zip(records, kept, strict=True)]
        lengths: dict[int, list[int]] = defaultdict(list)  # of the sequences that each arm drafts for
        for request, arm, n in planned:
            if n:
                lengths[arm].append(n)
            if request.read:
                self.rounds += 1
                self.users[self.arms[arm].name if n else PLAIN] += 1
        propose_s = sum(self.costs[self.arms[arm].name].time("propose", len(ns), max(ns)) for arm, ns in lengths.items())
        total = rows + sum(map(len, kept))
        forward_s = self.target.time("forward", len(running), total)
        host = self.costs[self.arms[next(iter(lengths))].name if lengths else PLAIN]
        host_s = host.time("host", len(running), total - sum(reading) + len(reading))
        self.clock += propose_s + forward_s + host_s
        for request, path in zip(running, paths, strict=True):
            emitted = min(len(path) + 1, request.left)
            request.read, request.emitted, request.left = True, request.emitted + emitted, request.left - emitted
        self.policy.observe(RoundStats([len(nodes) for nodes in kept], paths, total, propose_s, forward_s, host_s))


def _path(draft: DraftRecord, kept: Sequence[int]) -> list[int]:
    """The accepted nodes among those verified, by their place there."""
    place = {node: i for i, node in enumerate(kept)}  # closed under parents, so what is left of the path has no gaps
    return [place[node] for node in draft.path if node in place]
