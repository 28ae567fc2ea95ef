"""The controller in made-up worlds whose costs and chances are known."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.control import Controller, Costs, Load, RoundStats
from outrider.core import Arm, Drafts, Plan
from tests.control.worlds import (
    HEAD,
    MODEL,
    PYRITE,
    USELESS,
    WORLDS,
    Drafter,
    World,
    calibrated,
    drifting,
    first_round,
    first_second,
    flat,
    two_cores,
)


class Recorded:
    """A controller whose plans are kept."""

    def __init__(self, policy: Controller) -> None:
        self.policy, self.costs = policy, policy.costs
        self.plans: list[Plan] = []

    def plan(self, load: Load) -> Plan:
        self.plans.append(self.policy.plan(load))
        return self.plans[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def recorded(world: World) -> Recorded:
    world.policy = Recorded(world.policy)
    return world.policy


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("named", [False, True])
def test_a_plan_is_for_those_who_run_and_within_their_room(named: bool, seed: int) -> None:
    """Also where an exploration waits for its budget while sequences end, join and come to their last tokens."""
    world = World(two_cores, {"m": MODEL, "h": HEAD}, batch=5, answer=60, named=named, seed=seed)
    policy = recorded(world)
    rng = random.Random(seed)
    for _ in range(1500):
        if rng.random() < 0.2:
            world.resize(rng.randrange(1, 9))
        room = [min(40, text.left - 1) for text in world.texts]
        world.round()
        lengths = policy.plans[-1].lengths
        assert len(lengths) == len(room)
        assert all(length <= left for length, left in zip(lengths, room, strict=True))


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("name", WORLDS)
def test_close_to_the_best_setting_and_never_far_below_none(name: str, batch: int) -> None:
    world = World(*WORLDS[name], batch=batch)
    world.run(300)
    reached = world.run(1000)
    assert reached >= 0.96 * world.best()
    assert reached >= 0.985 * world.plain()


@pytest.mark.parametrize("batch", [1, 4, 8, 16])
@pytest.mark.parametrize("drafter", [USELESS, MODEL, HEAD], ids=["useless", "model", "head"])
def test_a_named_drafter_is_never_slower_than_none(drafter: Drafter, batch: int) -> None:
    world = calibrated(World(two_cores, {"m": drafter}, batch=batch, answer=128, prompt=64, named=True))
    world.run(300)
    assert world.run(1000) >= 0.985 * world.plain()


def test_a_named_drafter_drafts_at_once_and_stops_soon_where_that_does_not_pay() -> None:
    good, useless = (calibrated(World(two_cores, {"m": one}, named=True)) for one in (MODEL, USELESS))
    for world in (good, useless):
        world.run(1)
        assert world.drafted
    good.run(50)
    assert len(good.drafted) > 45
    useless.run(50)
    assert len(useless.drafted) < 20


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("known", [True, False], ids=["calibrated", "cold"])
def test_a_slow_first_round_is_harmless(known: bool, batch: int) -> None:
    """Ten times slower, all of it or its drafts alone, as where weights are read for the first time."""
    for slowness in (first_round(10.0, 10.0), first_round(1.0, 10.0)):
        world = World(two_cores, {"m": MODEL}, batch=batch, answer=128, prompt=64, named=True, slowness=slowness)
        if known:
            calibrated(world)
        world.run(400)
        assert world.run(500) >= 0.93 * world.best()


@pytest.mark.parametrize(("drafter", "batch"), [(MODEL, 1), (Drafter(0.85, 0.85, 0.0003), 1), (Drafter(0.85, 0.85, 0.0003), 4)])
def test_a_machine_that_is_slow_for_a_second_recovers(drafter: Drafter, batch: int) -> None:
    world = World(two_cores, {"m": drafter}, batch=batch, answer=128, prompt=64, named=True, slowness=first_second(4.0, 4.0))
    calibrated(world).run(1500)
    assert world.run(500) >= 0.9 * world.best()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("named", [True, False])
def test_a_good_drafter_that_starts_badly_is_tried_again(named: bool, batch: int) -> None:
    world = World(two_cores, {"m": MODEL}, batch=batch, answer=128, prompt=64, named=named, bad_rounds=60)
    calibrated(world).run(600)
    assert world.run(500) >= 0.93 * world.best()


@pytest.mark.parametrize("batch", [1, 4])
def test_times_that_calibration_took_on_a_busy_machine_are_corrected(batch: int) -> None:
    world = World(two_cores, {"m": MODEL}, batch=batch, answer=128, prompt=64, named=True)
    calibrated(world, slow=4.0).run(1500)
    assert world.run(500) >= 0.9 * world.best()


def test_exploring_a_useless_drafter_costs_less_than_its_budget() -> None:
    for batch in (1, 8):
        world = calibrated(World(two_cores, {"m": USELESS}, batch=batch, answer=128, prompt=64, named=True))
        world.run(300)
        assert world.run(3000) >= 0.99 * world.plain()


@pytest.mark.parametrize(("answer", "prompt"), [(4, 64), (16, 64), (32, 64), (4, 2000), (16, 2000), (32, 2000)])
def test_short_answers_are_not_slower(answer: int, prompt: int) -> None:
    for arms, named in ((PYRITE[1], False), ({"m": USELESS}, True)):
        world = calibrated(World(two_cores, arms, answer=answer, prompt=prompt, named=named))
        world.run(200)
        assert world.run(800) >= 0.985 * world.plain()


def test_what_takes_long_to_begin_is_not_begun_for_a_short_text() -> None:
    slow = replace(MODEL, catch_up=0.0001)
    for answer, share in ((8, 0.1), (2000, 0.9)):
        world = calibrated(World(two_cores, {"m": slow}, answer=answer, prompt=2000))
        world.run(300)
        world.drafted.clear()
        world.run(300)
        assert (len(world.drafted) > 300 * share) == (answer == 2000)


@pytest.mark.parametrize("batch", [1, 8])
def test_it_notices_when_the_text_turns(batch: int) -> None:
    assert drifting(World(*WORLDS["good"], batch=batch)) >= 0.9


def test_nothing_to_gain_costs_only_the_exploration() -> None:
    world = World(*WORLDS["hopeless"])
    world.run(200)
    world.drafted.clear()
    world.run(2000)
    assert 0 < len(world.drafted) < 200, "rare, but never given up"


def test_of_what_is_not_known_everything_is_explored() -> None:
    names = ("used", "expensive", "cheap")
    drafters = {name: Drafter(0.1, 0.1, cost) for name, cost in zip(names, (0.001, 0.0015, 0.0001), strict=True)}
    world = calibrated(World(flat, drafters))
    world.run(300)
    assert {name for name, _ in world.drafted} == set(names)


def test_what_drafts_take_after_the_forward_is_theirs() -> None:
    """Of every round alike it would make plain ones look as slow, and drafts that cost more than they bring seem to pay."""
    world = World(flat, {"a": Drafter(0.35, 0.35, 0.0002)}, rest=0.001, after=0.003)
    world.run(300)
    assert world.run(1500) >= 0.98 * world.plain()


def test_beginning_with_many_costs_little() -> None:
    world = calibrated(World(flat, {name: Drafter(0.1, 0.8, 0.001) for name in "ab"}, batch=8))
    assert world.run(120) >= 0.94 * world.plain()


def test_a_sequence_with_unpredictable_text_is_told_apart() -> None:
    world = World(*WORLDS["good"], batch=2)
    world.texts[1].difficulty = 0.01
    policy = recorded(world)
    world.run(300)
    policy.plans.clear()
    world.run(100)
    easy, hard = (sum(plan.lengths[b] for plan in policy.plans) for b in (0, 1))
    assert easy > 4 * hard


def test_a_plan_made_for_many_is_made_again_when_few_are_left() -> None:
    """32 rows cost in proportion, so that a draft brings less than it costs; 2 leave room for free."""
    world = World(flat, {"a": Drafter(0.7, 0.7, 0.0001)}, batch=32)
    world.run(400)
    world.resize(2)
    world.drafted.clear()
    world.run(5)
    assert world.drafted


def test_requests_may_name_an_arm() -> None:
    world = calibrated(World(flat, {"a": Drafter(0.8, 0.8, 0.0001), "b": Drafter(0.7, 0.7, 0.0001)}, batch=2))
    plan = world.policy.plan(Load([40, 40], world.texts, 2, 200, 2, [[1], None]))
    assert all(plan.lengths)
    assert plan.arms[0] == 1
    assert world.policy.arms_named("b") == [1]


def test_lengths_have_a_least_one_and_large_batches_may_be_left_alone() -> None:
    for batch in (1, 4):
        policy = Controller([Arm("a", 8)], Costs(), named=True, min_length=5, disable_at=4)
        world = World(flat, {"a": Drafter(0.3, 0.3, 0.0001)}, batch=batch, policy=policy)
        world.run(200)
        assert all(length >= 5 for _, length in world.drafted)
        assert bool(world.drafted) == (batch == 1)


def ahead() -> World:
    return World(*WORLDS["good"], policy=Controller([Arm("a", 32, can_overlap=True)], Costs()))


def test_drafts_that_can_go_on_unseen_are_all_verified() -> None:
    world = ahead()
    policy = recorded(world)
    world.run(100)
    assert all(plan.verify_all for plan in policy.plans[20:] if any(plan.lengths))


class PlansEarly:
    """Makes the next plan before the round is observed, where the controller can."""

    def __init__(self, policy: Controller) -> None:
        self._policy, self._next = policy, None
        self.early: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def plan(self, load: Load) -> Plan:
        planned, self._next = self._next, None
        usable = planned is not None and tuple(planned[0].keys) == tuple(load.keys)
        usable = usable and all(n <= room for n, room in zip(planned[1].lengths, load.room, strict=True))
        self.early.append(usable)
        return planned[1] if usable else self._policy.plan(load)

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        selected = self._policy.select(drafts, load)
        plan = self._policy.plan_next(load)
        self._next = None if plan is None else (load, plan)
        return selected


def test_the_next_plan_is_nearly_always_made_before_the_round_is_observed() -> None:
    world = ahead()
    speed = world.run(1600)
    other = ahead()
    other.policy = early = PlansEarly(other.policy)
    assert other.run(1600) > 0.98 * speed
    assert sum(early.early[100:]) > 0.7 * len(early.early[100:])


def test_drafts_may_stop_where_a_node_costs_more_than_it_brings() -> None:
    def threshold(row: float) -> float:
        costs = Costs()
        for rows in range(1, 34):
            costs.observe_forward(rows, 100, 0.005 + row * rows)
        for length in range(1, 33):
            costs.observe_proposal("a", 1, length, 0.0001 * length)
        return Controller([Arm("a", 32)], costs).plan(Load([40], [0], 1, 100, 1)).confidence_threshold

    assert 0.0 < threshold(0.0) < threshold(0.0002) < threshold(0.0004) < 0.7


def test_a_forward_unlike_others_teaches_no_costs(tmp_path: Path) -> None:
    policy, load = Controller([], Costs()), Load([40], [0], 64, 64, 1)
    for rows, known in ((0, False), (64, True)):
        for _ in range(8):
            policy.plan(load)
            policy.observe(RoundStats([0], [()], rows, 0.0, 0.005))
        policy.keep(tmp_path / "costs.json")
        assert policy.costs.knows_forward == known


def test_catching_up_never_raises_the_cost_of_an_arm() -> None:
    """A sequence's first proposal by an arm reads all that came before: that costs once, the next one does not."""
    world = calibrated(World(flat, {"a": Drafter(0.9, 0.9, 0.0001, catch_up=0.0001)}, answer=30))
    world.run(300)
    assert world.policy.costs.proposal("a", 1, 8) < 0.0009
    assert world.policy.costs.switch("a", 100) > 0.005


def test_what_was_learnt_outlives_the_process(tmp_path: Path) -> None:
    """A controller that begins with another's record plans as that one did, and keeps what it knows of other arms."""
    drafters = {"a": Drafter(0.1, 0.9, 0.0, 0.0005), "b": Drafter(0.85, 0.85, 0.0, 0.0005)}
    path = tmp_path / "costs.json"
    made = World(flat, drafters)
    made.run(400)
    made.policy.keep(path)
    again = World(flat, drafters, policy=Controller(made.policy.arms, Costs.load(path)))
    again.run(12)
    assert [name for name, _ in again.drafted].count("b") > 8
    Controller([Arm("b", 32)], Costs.load(path)).keep(path)
    assert set(Costs.load(path).accepted["0"]) == {"a", "b"}


@pytest.mark.parametrize("kept", [{}, {"b": 3}, {"b": {"gains": [1.0], "rounds": 4, "judged": {}}}, {"0": {"b": {"gains": "x"}}}])
def test_a_damaged_record_is_left_alone(kept: dict[str, object]) -> None:
    costs = Costs()
    costs.accepted = kept
    names = ("a", "b")
    world = World(flat, dict.fromkeys(names, MODEL), policy=Controller([Arm(name, 32) for name in names], costs))
    world.run(20)


def test_a_round_without_drafts_keeps_what_is_proposed() -> None:
    drafts = Drafts.empty(1)
    policy = Controller([], Costs())
    load = Load([40], [0], 1, 64, 1)
    policy.plan(load)
    assert policy.select(drafts, load) is drafts
