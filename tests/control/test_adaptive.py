"""The controller in a made-up world whose costs and chances are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import pytest

from outrider.control import Adaptive, Costs, Load, RoundStats
from outrider.control.adaptive import _Timed
from outrider.core import Arm, Drafts, Plan


@dataclass
class World:
    """Chains that survive with a chance per token; forwards and proposals with given times."""

    forward: Callable[[int], float]
    chance: dict[str, float]  # true chance of each drafted token, by arm
    claimed: dict[str, float]  # what the arm says
    cost: dict[str, Callable[[int, int], float]]  # seconds by batch and length
    batch: int = 1
    seed: int = 0
    rest: float = 0.0  # seconds of a round after its forward,
    after: float = 0.0  # and more where something was drafted
    policy: Adaptive = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.chance, self.claimed = dict(self.chance), dict(self.claimed)  # tests change them
        self.names = list(self.chance)
        self.policy = Adaptive([Arm(name, 32) for name in self.names], Costs())
        self.drafted: list[tuple[str, int]] = []

    def run(self, rounds: int) -> float:
        """Tokens per second."""
        tokens, seconds = 0.0, 0.0
        for _ in range(rounds):
            load = Load([40] * self.batch, list(range(self.batch)), self.batch, 100, self.batch)
            plan = self.policy.plan(load)
            chains = [[1] * n for n in plan.lengths]
            says = [
                [self.claimed[self.names[arm]] ** (i + 1) for i in range(n)]
                for arm, n in zip(plan.arms, plan.lengths, strict=True)
            ]
            drafts = self.policy.select(Drafts.chains(chains, survival=says), load)
            counts = drafts.counts
            accepted = [self._accepted(self.names[arm], n) for arm, n in zip(plan.arms, counts, strict=True)]
            asked = [(self.names[arm], n) for arm, n in zip(plan.arms, plan.lengths, strict=True) if n]
            self.drafted += asked
            propose = sum(
                self.cost[name](sum(1 for own, _ in asked if own == name), max(n for own, n in asked if own == name))
                for name in {name for name, _ in asked}
            )
            forward = self.forward(self.batch + sum(counts)) * self.random.uniform(0.9, 1.1)
            rest = self.rest + self.after * bool(asked)
            self.policy.observe(
                RoundStats(counts, [range(n) for n in accepted], self.batch + sum(counts), propose, forward, rest)
            )
            tokens += self.batch + sum(accepted)
            seconds += propose + forward + rest
        return tokens / seconds

    def _accepted(self, name: str, n: int) -> int:
        count = 0
        while count < n and self.random.random() < self.chance[name]:
            count += 1
        return count

    def best(self) -> float:
        """The rate of the best fixed setting, or of none."""
        rates = [self.batch / self.forward(self.batch)]
        for name, p in self.chance.items():
            for n in range(1, 33):
                tokens = self.batch * (1 + sum(p**i for i in range(1, n + 1)))
                rates.append(tokens / (self.forward(self.batch * (1 + n)) + self.cost[name](self.batch, n)))
        return max(rates)


def flat(rows: int) -> float:
    return 0.005 * max(1.0, rows / 16)


def linear(rows: int) -> float:
    return 0.005 * (0.3 + 0.7 * rows)


def per_token(seconds: float) -> Callable[[int, int], float]:
    return lambda batch, length: seconds * length


WORLDS = {
    "good": (flat, {"a": 0.85}, {"a": 0.85}, {"a": per_token(0.0003)}),
    "overconfident": (flat, {"a": 0.4}, {"a": 0.95}, {"a": per_token(0.0003)}),
    "hopeless": (flat, {"a": 0.02}, {"a": 0.9}, {"a": per_token(0.0003)}),
    "too expensive": (flat, {"a": 0.7}, {"a": 0.7}, {"a": per_token(0.005)}),
    "rows cost": (linear, {"a": 0.6}, {"a": 0.6}, {"a": per_token(0.00001)}),
    "two arms": (flat, {"a": 0.3, "b": 0.85}, {"a": 0.3, "b": 0.85}, {"a": per_token(0.0), "b": per_token(0.0003)}),
    "two liars": (flat, {"a": 0.3, "b": 0.8}, {"a": 0.95, "b": 0.6}, {"a": per_token(0.0), "b": per_token(0.0003)}),
}


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("world", WORLDS)
def test_close_to_the_best_setting_and_never_far_below_none(world: str, batch: int) -> None:
    made = World(*WORLDS[world], batch=batch)
    made.run(300)
    reached = made.run(1500)
    assert reached >= 0.93 * made.best()
    assert reached >= 0.97 * batch / made.forward(batch)


def test_nothing_to_gain_costs_only_the_probes() -> None:
    made = World(*WORLDS["hopeless"])
    made.run(200)
    made.drafted.clear()
    made.run(2000)
    assert 0 < len(made.drafted) < 200, "rare, but never given up"


def test_of_what_is_not_known_everything_is_tried_in_turn() -> None:
    """So where the grant ends early, it was not spent on one of them. What the first plan uses needs no trying."""
    names = ("used", "dear", "cheap")
    costs = dict(zip(names, map(per_token, (0.001, 0.004, 0.0001)), strict=True))
    made = World(flat, dict.fromkeys(names, 0.1), dict.fromkeys(names, 0.1), costs)
    seen: list[tuple[int, int]] = []
    for _ in range(10):
        made.run(1)
        seen.append((made.policy._granted[1], made.policy._granted[2]))
    assert sum(seen[-1]) == 10
    assert all(abs(dear - cheap) <= 2 for dear, cheap in seen)


def test_what_drafts_take_after_the_forward_is_theirs() -> None:
    """Of every round alike it would make plain ones look as slow, and drafts that cost more than they bring seem to pay."""
    made = World(flat, {"a": 0.35}, {"a": 0.35}, {"a": per_token(0.0002)}, rest=0.001, after=0.003)
    made.run(300)
    assert made.run(1500) >= 0.98 / (flat(1) + made.rest)


def test_beginning_with_many_costs_little() -> None:
    made = World(flat, {"a": 0.1, "b": 0.1}, {"a": 0.8, "b": 0.8}, {"a": per_token(0.001), "b": per_token(0.001)}, batch=8)
    costs = made.policy.costs
    for _ in range(4):
        for rows in (1, 2, 4, 8, 16, 24, 32, 64, 128):
            costs.observe_forward(rows, 100, flat(rows))
        for name, batch, length in product("ab", (1, 8), (2, 8)):
            costs.observe_proposal(name, batch, length, 0.001 * length)
    assert made.run(120) >= 0.94 * 8 / flat(8)


def test_prices_do_not_outlive_a_plan_that_disappoints() -> None:
    made = World(*WORLDS["good"])
    made.run(130)
    prices = made.policy._prices._known
    made.run(20)
    assert made.policy._prices._known is prices
    made.chance["a"] = 0.0
    made.run(20)
    assert made.policy._prices._known is not prices


def test_it_notices_when_the_text_turns() -> None:
    made = World(*WORLDS["hopeless"])
    made.run(400)
    made.chance["a"] = 0.9
    made.claimed["a"] = 0.9
    made.run(1500)
    assert made.run(400) >= 0.9 * made.best()


@pytest.mark.parametrize(("chance", "often"), [(0.9, False), (0.0, True)])
def test_a_plan_that_brings_little_is_soon_thought_over(chance: float, often: bool) -> None:
    """Even where its rounds take no longer than plain ones: another arm would have brought more."""
    arms = {"free": 0.9, "dear": 0.7}
    made = World(flat, arms, dict(arms), {"free": per_token(0.0), "dear": per_token(0.0003)})
    made.run(300)
    made.policy.plan(Load([40], [1], 1, 100, 1))  # somebody new: a plan is made
    made.chance["free"], thought, best = chance, [], made.policy._best
    made.policy._best = lambda load: (thought.append(1), best(load))[1]  # type: ignore[method-assign,func-returns-value]
    made.run(16)
    assert (len(thought) > 3) == often


def test_a_plan_made_while_the_forward_runs_is_the_next_rounds() -> None:
    made = World(*WORLDS["good"])
    made.policy = policy = Adaptive([Arm("a", 32, ahead=True)], Costs())
    plan, lengths = policy.plan, []

    def planned(load: Load) -> Plan:
        stands = policy._standing.get(0, (0, 0))[1] if policy._age + 1 < policy._every else None
        found = plan(load)
        if policy._probe is None and policy._again is None and stands is not None:
            lengths.append((stands, *found.lengths))
        return found

    policy.plan = planned  # type: ignore[method-assign]
    made.run(100)
    made.chance["a"] = 0.0
    made.run(100)
    assert len({stood for stood, _ in lengths}) > 2, "it changed its mind"
    assert all(stood == length or length == 0 for stood, length in lengths)  # nobody drafting is tried too
    assert sum(stood != length for stood, length in lengths) < 10


def test_a_plan_goes_on_while_it_is_thought_over_if_that_changed_nothing_before() -> None:
    made = World(*WORLDS["good"])
    made.policy = policy = Adaptive([Arm("a", 32, ahead=True)], Costs())
    plan, seen = policy.plan, []

    def planned(load: Load) -> Plan:
        found = plan(load)
        seen.append((policy._age + 1 >= policy._every > 0, policy._steady, found))
        return found

    policy.plan = planned  # type: ignore[method-assign]
    made.run(1600)
    due = [(steady, now, later) for (is_due, steady, now), (_, _, later) in pairwise(seen) if is_due]
    assert any(now.again for _, now, _ in due)
    assert not any(now.again for steady, now, _ in due if not steady)
    for_nothing = [later.lengths != now.lengths for _, now, later in due if now.again]
    assert sum(for_nothing) < 0.01 * len(seen)


def test_a_forward_that_thinking_outlasted_teaches_no_costs() -> None:
    made = World(*WORLDS["good"])
    made.policy = policy = Adaptive([Arm("a", 32, ahead=True)], Costs())
    enter, took, pondered = policy._enter, [], []

    def forward(rows: int) -> float:
        pondered.append(policy._pondered)
        return flat(rows) * (100 if policy._pondered else 1)

    made.forward = forward
    policy._enter = lambda timed: (took.append(timed.stats.forward_s), enter(timed))[1]  # type: ignore[method-assign,func-returns-value]
    made.run(200)
    assert any(pondered)
    assert max(took) < 10 * flat(1)


def test_who_has_just_woken_and_proposes_nothing_teaches_no_costs() -> None:
    policy = Adaptive([Arm("a", 32)], Costs())
    for began in (True, False):
        policy._enter(_Timed(RoundStats([0], [()], 1, 0.0001, 0.005), 100, 1, [("a", 1, 0)], began, 0))
        assert policy.costs.knows_proposal("a") != began


def test_a_forward_unlike_others_teaches_no_costs() -> None:
    policy, load = Adaptive([], Costs()), Load([40], [0], 64, 64, 1)
    for rows, known in ((0, False), (64, True)):
        for _ in range(8):  # plain rounds are not all timed
            policy.plan(load)
            policy.observe(RoundStats([0], [()], rows, 0.0, 0.005))
        policy._think()
        assert policy.costs.knows_forward == known


def test_a_sequence_with_unpredictable_text_is_told_apart() -> None:
    made = World(*WORLDS["good"], batch=2)
    accept = made._accepted
    turn = iter(range(10**9))
    made._accepted = lambda name, n: accept(name, n) if next(turn) % 2 == 0 else 0  # type: ignore[method-assign]
    made.run(300)
    lengths = []
    plan = made.policy.plan
    made.policy.plan = lambda load: (lengths.append(plan(load)), lengths[-1])[1]  # type: ignore[method-assign,func-returns-value]
    made.run(100)
    assert sum(p.lengths[0] for p in lengths) > 4 * sum(p.lengths[1] for p in lengths)


def test_a_plan_made_for_many_is_thought_over_when_few_are_left() -> None:
    """32 rows cost in proportion, so that a draft brings less than it costs; 2 leave room for free."""
    world = World(flat, {"a": 0.7}, {"a": 0.7}, {"a": per_token(0.0001)}, batch=32)
    world.run(400)
    world.batch = 2
    world.drafted.clear()
    world.run(5)
    assert world.drafted


def test_what_was_learnt_outlives_the_process(tmp_path: Path) -> None:
    """A controller that begins with another's record plans as that one did."""
    made = World(flat, {"a": 0.1, "b": 0.85}, {"a": 0.9, "b": 0.85}, {"a": lambda *_: 0.0005, "b": lambda *_: 0.0005})
    made.run(400)
    made.policy.keep(tmp_path / "costs.json")
    again = World(flat, made.chance, made.claimed, made.cost)
    again.policy = Adaptive(made.policy.arms, Costs.load(tmp_path / "costs.json"))
    again.run(12)
    assert [name for name, _ in again.drafted].count("b") > 8
    fresh = World(flat, made.chance, made.claimed, made.cost)
    fresh.run(12)
    assert [name for name, _ in fresh.drafted].count("b") < [name for name, _ in again.drafted].count("b")


@pytest.mark.parametrize("kept", [{}, {"b": 3}, {"b": {"gains": [1.0], "rounds": 4, "judged": {}}}, {"b": {"gains": "x"}}])
def test_a_spoilt_record_is_left_alone(kept: dict[str, object]) -> None:
    costs = Costs()
    costs.accepted = kept
    made = World(flat, {"a": 0.1, "b": 0.85}, {"a": 0.9, "b": 0.85}, {"a": lambda *_: 0.0005, "b": lambda *_: 0.0005})
    made.policy = Adaptive(made.policy.arms, costs)
    made.run(20)
