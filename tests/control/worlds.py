"""Made-up worlds whose costs and chances are known, to run a controller in: `python -m tests.control.worlds`.

What a round draws at random (verdicts, noise on times) is what the controller sees. What it is scored by are the expected
tokens and the expected seconds of the same rounds, so that few rounds tell controllers apart that differ by a few thousandths.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from outrider.control import Controller, Costs, Load, RoundStats
from outrider.core import Arm, Drafts

Seconds = Callable[[int], float]
Slowness = Callable[[int, float], tuple[float, float]]  # of forwards and of proposals, by round and by seconds since the start
SPREAD = (0.05, 0.4, 0.8, 0.95)  # chances of easy and hard texts


def flat(rows: int) -> float:
    return 0.005 * max(1.0, rows / 16)


def linear(rows: int) -> float:
    return 0.005 * (0.3 + 0.7 * rows)


def two_cores(rows: int) -> float:
    """Pyrite's forward in bf16 on two Zen 4 cores."""
    return 0.0018 if rows <= 1 else 0.0018 + 0.00009 * (rows - 1) if rows <= 8 else 0.00245 + 0.00022 * (rows - 8)


def undisturbed(rounds: int, clock: float) -> tuple[float, float]:
    return 1.0, 1.0


def first_round(forward: float, propose: float) -> Slowness:
    """Only the first round is slow: weights come from the disk, caches are cold."""
    return lambda rounds, clock: (forward, propose) if rounds == 1 else (1.0, 1.0)


def first_second(forward: float, propose: float) -> Slowness:
    """Something else keeps the machine busy for a second."""
    return lambda rounds, clock: (forward, propose) if clock < 1.0 else (1.0, 1.0)


@dataclass(frozen=True)
class Drafter:
    """A made-up drafter of chains."""

    chance: float  # that a token is accepted after those before it
    claimed: float  # its confidence
    per_token: float  # seconds
    per_call: float = 0.0
    catch_up: float = 0.0  # seconds per token of the text, when a sequence uses it for the first time


@dataclass(frozen=True)
class Mixture:
    """Experts of a made-up model. A row of a drafter's draft reads as many new ones as a strange row, times its novelty."""

    seconds: float  # of each expert that is read
    experts: int = 128
    chosen: int = 8
    novelty: dict[str, float] = field(default_factory=dict)  # by drafter; 1 where it is not named

    def read(self, batch: int, nodes: int, name: str) -> float:
        rows = batch + nodes * self.novelty.get(name, 1.0)
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** rows)


@dataclass
class Text:
    """One generation."""

    left: int
    context: int
    difficulty: float = 1.0  # what the odds of every drafted token are multiplied by
    bucket: int = 0
    met: set[str] = field(default_factory=set)

    def __hash__(self) -> int:
        return id(self)


@dataclass
class World:
    """Texts that come one after another, `batch` at a time, and what their rounds cost."""

    forward: Seconds
    drafters: dict[str, Drafter]
    batch: int = 1
    answer: int = 10**9
    prompt: int = 100
    spread: bool = False  # easy and hard texts
    hot: float = 1.0  # what the odds are multiplied by at temperature 1, which every other text has; 1: all are greedy
    rest: float = 0.0
    after: float = 0.0  # more, where something was drafted
    seed: int = 0
    named: bool = False
    slowness: Slowness = undisturbed
    bad_rounds: int = 0  # first rounds in which hardly anything is accepted
    policy: Any = None
    mixture: Mixture | None = None  # whose time is added to that of the rows

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.drafters, self.names = dict(self.drafters), list(self.drafters)
        if self.policy is None:
            self.policy = Controller([Arm(name, 32) for name in self.names], Costs(), self.named)
        self.made = 0
        self.texts = [self.text() for _ in range(self.batch)]
        self.thinking, self.rounds, self.clock = 0.0, 0, 0.0
        self.drafted: list[tuple[str, int]] = []

    def text(self) -> Text:
        self.made += 1
        odds = 1.0
        if self.spread:
            chance = SPREAD[self.made % len(SPREAD)]
            odds = chance / (1 - chance) / (2 / 3 / (1 / 3))
        bucket = 2 if self.hot != 1.0 and self.made % 2 else 0
        return Text(self.answer, self.prompt, odds * (self.hot if bucket else 1.0), bucket)

    def chance(self, name: str, text: Text) -> float:
        p = self.drafters[name].chance if self.rounds > self.bad_rounds else 0.02
        return p * text.difficulty / (1 - p + p * text.difficulty)

    def resize(self, batch: int) -> None:
        self.batch = batch
        while len(self.texts) > batch:
            self.policy.forget(self.texts.pop())
        self.texts += [self.text() for _ in range(batch - len(self.texts))]

    def run(self, rounds: int) -> float:
        """Expected tokens per expected second."""
        done = [self.round() for _ in range(rounds)]
        return sum(tokens for tokens, _ in done) / sum(seconds for _, seconds in done)

    def round(self) -> tuple[float, float]:
        """Expected tokens and expected seconds."""
        self.rounds += 1
        texts = self.texts
        load = Load(
            [min(40, text.left - 1) for text in texts],
            list(texts),
            self.batch,
            sum(text.context for text in texts),
            self.batch,
            temperature_buckets=[text.bucket for text in texts],
        )
        began = time.thread_time()
        plan = self.policy.plan(load)
        self.thinking += time.thread_time() - began
        users = [(self.names[arm], n, text) for arm, n, text in zip(plan.arms, plan.lengths, texts, strict=True) if n]
        self.drafted += [(name, n) for name, n, _ in users]
        says = [
            [self.drafters[self.names[arm]].claimed ** (i + 1) for i in range(n)]
            for arm, n in zip(plan.arms or (0,) * self.batch, plan.lengths, strict=True)
        ]
        began = time.thread_time()
        drafts = self.policy.select(Drafts.chains([[1] * n for n in plan.lengths], survival=says), load)
        self.thinking += time.thread_time() - began
        counts = drafts.counts
        chances = [self.chance(self.names[arm], text) for arm, text in zip(plan.arms or (0,) * self.batch, texts, strict=True)]
        accepted = [self._accepted(p, n) for p, n in zip(chances, counts, strict=True)]
        propose = sum(self._propose([(n, text) for own, n, text in users if own == name], name) for name in {u[0] for u in users})
        rows = self.batch + sum(counts)
        slow, slow_proposals = self.slowness(self.rounds, self.clock)
        propose *= slow_proposals
        name = users[0][0] if users else ""  # of mixtures: one drafter at a time
        forward, rest = slow * self.seconds(sum(counts), name), self.rest + self.after * bool(users)
        self.clock += propose + forward + rest
        noise = self.random.uniform(0.9, 1.1)
        experts = 0.0 if self.mixture is None else self.mixture.read(self.batch, sum(counts), name)
        stats = RoundStats(counts, [range(n) for n in accepted], rows, propose, forward * noise, rest, experts=experts)
        began = time.thread_time()
        self.policy.observe(stats)
        self.thinking += time.thread_time() - began
        tokens = self.batch + sum(sum(p**i for i in range(1, n + 1)) for p, n in zip(chances, counts, strict=True))
        for b, (text, n) in enumerate(zip(texts, accepted, strict=True)):
            text.left -= n + 1
            text.context += n + 1
            if text.left <= 0:
                self.policy.forget(text)
                texts[b] = self.text()
        return tokens, propose + forward + rest

    def _propose(self, users: list[tuple[int, Text]], name: str) -> float:
        drafter = self.drafters[name]
        seconds = drafter.per_call + drafter.per_token * max(n for n, _ in users)
        for _, text in users:
            if name not in text.met:
                text.met.add(name)
                seconds += drafter.catch_up * text.context
        return seconds

    def _accepted(self, chance: float, n: int) -> int:
        count = 0
        while count < n and self.random.random() < chance:
            count += 1
        return count

    def seconds(self, nodes: int, name: str) -> float:
        """Of a forward with so many draft nodes by a drafter."""
        more = 0.0 if self.mixture is None else self.mixture.seconds * self.mixture.read(self.batch, nodes, name)
        return self.forward(self.batch + nodes) + more

    def plain(self) -> float:
        return self.batch / (self.seconds(0, "") + self.rest)

    def best(self) -> float:
        """The rate of the best fixed setting, or of none, where all texts are alike."""
        rates = [self.plain()]
        for (name, drafter), n in product(self.drafters.items(), range(1, 33)):
            tokens = self.batch * (1 + sum(drafter.chance**i for i in range(1, n + 1)))
            proposal = drafter.per_call + drafter.per_token * n
            rates.append(tokens / (self.seconds(self.batch * n, name) + proposal + self.rest + self.after))
        return max(rates)


WORLDS = {
    "good": (flat, {"a": Drafter(0.85, 0.85, 0.0003)}),
    "overconfident": (flat, {"a": Drafter(0.4, 0.95, 0.0003)}),
    "hopeless": (flat, {"a": Drafter(0.02, 0.9, 0.0003)}),
    "too expensive": (flat, {"a": Drafter(0.7, 0.7, 0.005)}),
    "rows cost": (linear, {"a": Drafter(0.6, 0.6, 0.00001)}),
    "two arms": (flat, {"a": Drafter(0.3, 0.3, 0.0), "b": Drafter(0.85, 0.85, 0.0003)}),
    "two liars": (flat, {"a": Drafter(0.3, 0.95, 0.0), "b": Drafter(0.8, 0.6, 0.0003)}),
}
LOOKUP, MODEL = Drafter(0.5, 0.7, 0.000005, 0.00005), Drafter(0.75, 0.8, 0.00025, 0.0001, 0.00001)
HEAD, USELESS = Drafter(0.6, 0.6, 0.0006, 0.0003, 0.000005), Drafter(0.01, 0.5, 0.0005, 0.0002, 0.00002)
PYRITE = (two_cores, {"suffix": LOOKUP, "draft_model": MODEL, "eagle": HEAD, "medusa": Drafter(0.3, 0.4, 0.0003, 0.001)})


def calibrated(world: World, slow: float = 1.0) -> World:
    """The world with its costs known, as after a calibration; where something slowed the machine down, proposals seem slower."""
    costs = world.policy.costs
    for _ in range(4):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
            costs.observe_forward(rows, 64, world.forward(rows))
        for (name, drafter), batch, n in product(world.drafters.items(), (1, 8), (2, 8)):
            costs.observe_proposal(name, batch, n, slow * (drafter.per_call + drafter.per_token * n))
    return world


def drifting(world: World) -> float:
    """Half of the time nothing can be guessed."""
    tokens = best = 0.0
    for turn in range(6):
        world.drafters = {name: replace(one, chance=one.chance if turn % 2 else 0.02) for name, one in world.drafters.items()}
        if turn % 2:
            world.drafters = {name: replace(one, chance=0.85) for name, one in world.drafters.items()}
        tokens += world.run(700) / world.best()
        best += 1.0
    return tokens / best


def _steady(world: World, rounds: int = 1500) -> float:
    world.run(300)
    return world.run(rounds) / world.best()


def _cold(world: World, rounds: int = 300) -> float:
    return world.run(rounds) / world.plain()


def _over_plain(world: World, rounds: int = 1500) -> float:
    world.run(300)
    return world.run(rounds) / world.plain()


def _cases() -> dict[str, tuple[Callable[[int], World], Callable[[World], float]]]:
    """By name: a world from a seed, and its score."""
    cases: dict[str, tuple[Callable[[int], World], Callable[[World], float]]] = {}

    def add(
        name: str, score: Callable[[World], float], arms: tuple[Seconds, dict[str, Drafter]], known: bool, **how: Any
    ) -> None:
        def make(seed: int) -> World:
            world = World(*arms, seed=seed, **how)
            return calibrated(world) if known else world

        cases[f"{name}, batch {how['batch']}"] = make, score

    for name, batch in product(WORLDS, (1, 4, 8, 16, 32)):
        add(f"{name}: of best", _steady, WORLDS[name], False, batch=batch)
    for name, batch in product(("good", "hopeless", "two liars"), (1, 8)):
        add(f"{name}: first 300 rounds over plain", _cold, WORLDS[name], True, batch=batch)
    for batch in (1, 4, 8, 16):
        for name, one in (("useless", USELESS), ("good model", MODEL), ("head", HEAD)):
            how = {"batch": batch, "answer": 128, "prompt": 64, "named": True}
            add(f"named {name}: over plain", _over_plain, (two_cores, {"m": one}), True, **how)
        add("named useless: first 300 rounds over plain", _cold, (two_cores, {"m": USELESS}), True, **how)
        add("pyrite: over plain", _over_plain, PYRITE, True, batch=batch, answer=128, spread=True)
        add("drifting: of best", drifting, WORLDS["good"], False, batch=batch)
        add("two temperatures: over plain", _over_plain, PYRITE, True, batch=batch, answer=128, hot=0.05)
        add("easy and hard: over plain", _over_plain, WORLDS["good"], False, batch=batch, answer=200, spread=True)
    for answer, prompt, batch in product((4, 16, 32), (64, 2000), (1, 4)):
        for name, arms in (("pyrite", PYRITE), ("named useless", (two_cores, {"m": USELESS}))):
            how = {"batch": batch, "answer": answer, "prompt": prompt, "named": name != "pyrite"}
            add(f"{name}: answers of {answer} after {prompt} over plain", _over_plain, arms, True, **how)
    return cases


def main(seeds: int = 3) -> None:
    """Every world's score, a mean over seeds, and the controller's time in a round."""
    for name, (make, score) in _cases().items():
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        worlds = [make(seed) for seed in range(seeds)]
        mean = sum(map(score, worlds)) / seeds
        thinking = sum(world.thinking for world in worlds) / sum(world.rounds for world in worlds)
        print(f"{mean:.4f} {1e6 * thinking:6.0f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
