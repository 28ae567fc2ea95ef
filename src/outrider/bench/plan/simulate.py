"""Recorded drafts through the real controller, without a model: acceptance from traces, time from a table of prices."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.bench.plan.prices import Prices
from outrider.bench.plan.trace import Guess, Trace
from outrider.control import Adaptive, Costs, FixedLength, Load, Policy, RoundStats
from outrider.core import Arm, Drafts
from outrider.errors import InvalidParameter

__all__ = ["Outcome", "Traffic", "controller", "simulate"]

_NO_GUESS = Guess([], [], [], 0, 0)
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load: how many requests, how long, how many at once, and how they arrive."""

    requests: int = 64
    tokens: int = 128
    batch: int = 1  # most that run at once
    rate: float | None = None  # per second, at random; None: all are there from the beginning
    seed: int = 0

    def arrivals(self) -> list[float]:
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            now += rng.expovariate(self.rate) if self.rate else 0.0
            times.append(now)
        return times


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    policy: str
    seconds: float
    tok_s: float
    tokens_per_round: float  # of a sequence
    latency_s: float  # mean, from arrival to the last token
    drafted_by: dict[str, float]  # share of the sequences' rounds that each method drafted for

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class _Request:
    arrived: float
    prompt: int
    left: int
    drafts: list[Trace]  # by arm
    emitted: int = 0
    read: bool = False  # its prompt

    def guess(self, arm: int) -> Guess:
        """What the method had to say at the last recorded round not after this place."""
        own = self.drafts[arm].guesses
        return own[max(bisect_right(own, self.emitted, key=lambda g: g.at) - 1, 0)] if own else _NO_GUESS


def controller(arms: Sequence[Arm], prices: Mapping[str, Prices]) -> Adaptive:
    """The controller of `--method auto`, with the prices as if it had measured them earlier."""
    costs = Costs()
    for rows, seconds in Prices.forwards(prices.values()).as_dict()["forward"].get("1", {}).items():
        costs.observe_forward(int(rows), 0, seconds)
    for batch in (1, 8):
        costs.observe_rest(batch, prices[PLAIN].time("host", batch, batch))
    for arm in arms:
        for batch, sizes in prices[arm.name].as_dict()["propose"].items():
            for length, seconds in sizes.items():
                costs.observe_proposal(arm.name, int(batch), int(length), seconds)
    return Adaptive(arms, costs)


def simulate(traces: Sequence[Trace], prices: Mapping[str, Prices], traffic: Traffic, policy: str = "auto") -> Outcome:
    """One run. `policy` is "auto" (the controller over all methods), "none", or one of the methods at its recorded length."""
    by_method: dict[str, list[Trace]] = defaultdict(list)
    for own in traces:
        by_method[own.method].append(own)
    arms = [Arm(name, max(own.most for own in group)) for name, group in by_method.items()]
    for name in (PLAIN, *by_method):
        if name not in prices:
            raise InvalidParameter("--costs", f"has no costs of {name!r}; it has: {', '.join(prices)}")
    groups = list(by_method.values())
    waiting = deque(
        _Request(at, groups[0][i % len(groups[0])].prompt, traffic.tokens, [group[i % len(group)] for group in groups])
        for i, at in enumerate(traffic.arrivals())
    )
    chosen, own_arm = _policy(policy, arms, prices)
    return _Run(arms, prices, Prices.forwards(prices.values()), chosen, own_arm).go(policy, waiting, traffic)


def _policy(name: str, arms: Sequence[Arm], prices: Mapping[str, Prices]) -> tuple[Policy, int]:
    if name == "auto":
        return controller(arms, prices), 0
    if name == PLAIN:
        return FixedLength(0), 0
    for i, arm in enumerate(arms):
        if arm.name == name:
            return FixedLength(arm.most), i
    raise InvalidParameter("--policy", f"unknown {name!r}; known: auto, none, {', '.join(arm.name for arm in arms)}")


@dataclass
class _Run:
    """The clock and who runs."""

    arms: Sequence[Arm]
    prices: Mapping[str, Prices]
    target: Prices
    policy: Policy
    own_arm: int  # of a policy that knows only one
    clock: float = 0.0
    rounds: int = 0
    users: Counter[str] = field(default_factory=Counter)

    def go(self, name: str, waiting: deque[_Request], traffic: Traffic) -> Outcome:
        running: list[_Request] = []
        latencies: list[float] = []
        while waiting or running:
            if not running:
                self.clock = max(self.clock, waiting[0].arrived)
            while waiting and len(running) < traffic.batch and waiting[0].arrived <= self.clock:
                running.append(waiting.popleft())
            self.step(running)
            for done in [own for own in running if own.left == 0]:
                running.remove(done)
                self.policy.forget(done)
                latencies.append(self.clock - done.arrived)
        tokens = traffic.requests * traffic.tokens
        shares = {arm: count / self.rounds for arm, count in self.users.items()}
        decoded = tokens - traffic.requests  # the first token of each comes with its prompt
        return Outcome(name, self.clock, tokens / self.clock, decoded / self.rounds, sum(latencies) / len(latencies), shares)

    def step(self, running: list[_Request]) -> None:
        """One round, as the engine runs it."""
        reading = [own.prompt for own in running if not own.read]
        rows = sum(1 if own.read else own.prompt for own in running)
        room = [own.left - 1 if own.read else 0 for own in running]
        load = Load(room, list(running), rows, sum(own.prompt + own.emitted for own in running), len(running))
        plan = self.policy.plan(load)
        arms = plan.arms or (self.own_arm,) * len(running)
        guesses = [own.guess(arm) if n else _NO_GUESS for own, arm, n in zip(running, arms, plan.lengths, strict=True)]
        trees = [_likeliest(guess, n) for guess, n in zip(guesses, plan.lengths, strict=True)]
        drafts = Drafts.trees([(nodes, parents) for nodes, parents, _ in trees], survival=[own for _, _, own in trees])
        kept = [tree.tokens for tree in self.policy.select(drafts, load).on_host()]  # a node's token is its number
        paths = [_path(guess, nodes) for guess, nodes in zip(guesses, kept, strict=True)]
        asked: dict[int, list[int]] = defaultdict(list)
        for own, arm, n in zip(running, arms, plan.lengths, strict=True):
            if n:
                asked[arm].append(n)
            if own.read:
                self.rounds += 1
                self.users[self.arms[arm].name if n else PLAIN] += 1
        propose_s = sum(self.prices[self.arms[arm].name].time("propose", len(own), max(own)) for arm, own in asked.items())
        total = rows + sum(map(len, kept))
        forward_s = self.target.time("forward", len(running), total)
        host = self.prices[self.arms[next(iter(asked))].name if asked else PLAIN]
        host_s = host.time("host", len(running), total - sum(reading) + len(reading))
        self.clock += propose_s + forward_s + host_s
        for own, path in zip(running, paths, strict=True):
            emitted = min(len(path) + 1, own.left)
            own.read, own.emitted, own.left = True, own.emitted + emitted, own.left - emitted
        self.policy.observe(RoundStats([len(nodes) for nodes in kept], paths, total, propose_s, forward_s, host_s))


def _likeliest(guess: Guess, most: int) -> tuple[list[int], list[int], list[float]]:
    """The nodes a drafter would have proposed if asked for fewer: their numbers, parents and survival."""
    order = sorted(range(len(guess.parents)), key=lambda i: (-guess.survival[i], i))[:most]
    nodes = sorted(order)
    place = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    return nodes, [place[guess.parents[node]] for node in nodes], [guess.survival[node] for node in nodes]


def _path(guess: Guess, kept: Sequence[int]) -> list[int]:
    """The accepted nodes among those verified, by their place there."""
    place = {node: i for i, node in enumerate(kept)}  # closed under parents, so what is left of the path has no gaps
    return [place[node] for node in guess.path if node in place]
