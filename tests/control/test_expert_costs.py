"""Experts in the cost table: what more of them cost is learnt, by drafter, and drafts are as long as that is worth."""

from __future__ import annotations

import io
import json
import random

import pytest
from rich.console import Console

from outrider.bench.costs import show_costs
from outrider.control import Costs
from tests.control.worlds import Drafter, Mixture, World, flat

EACH = 0.0004  # seconds of an expert
NAMES = {"near": 0.3, "far": 1.0}


def learnt(noise: float = 0.02) -> Costs:
    """The table after rounds of one row and of four, which two drafters fill with different experts."""
    rng, costs = random.Random(1), Costs()
    for i in range(200):
        rows = 1 if i % 2 else 4
        name = "" if rows == 1 else ("near", "far")[i % 4 // 2]
        experts = 8.0 if rows == 1 else 8.0 + 22.0 * NAMES[name]
        costs.observe_forward(rows, 64, (0.001 + EACH * experts) * rng.uniform(1 - noise, 1 + noise), experts, name)
    return costs


def test_a_forward_costs_by_the_experts_that_its_drafter_reads() -> None:
    costs = learnt()
    for name, novelty in NAMES.items():
        assert costs.forward(4, 64, name) == pytest.approx(0.001 + EACH * (8 + 22 * novelty), rel=0.08)
    assert costs.forward(1, 64) == pytest.approx(0.001 + EACH * 8, rel=0.05)
    assert costs.forward(4, 64, "unheard of") == pytest.approx(0.001 + EACH * (8 + 22 * 0.65), rel=0.12)


def test_many_experts_are_no_slow_machine() -> None:
    """Rounds that read more do not make other times seem longer."""
    costs = learnt()
    for _ in range(30):
        costs.observe_forward(4, 64, 0.001 + EACH * 30.0, 30.0, "far")
    assert costs.forward(1, 64) == pytest.approx(0.001 + EACH * 8, rel=0.06)


def test_dense_models_have_no_experts_in_their_table() -> None:
    costs = Costs()
    costs.observe_forward(1, 64, 0.001)
    assert "experts" not in costs.as_dict()
    assert costs.forward(1, 64, "anybody") == costs.forward(1, 64)


def test_the_table_is_kept() -> None:
    costs = learnt()
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    for name in NAMES:
        assert again.forward(4, 64, name) == pytest.approx(costs.forward(4, 64, name), rel=0.15)


def test_doctor_shows_the_experts_of_rounds() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    show_costs(learnt(), console)
    text = " ".join(console.export_text().split())
    assert "experts that a round reads, of plain rounds" in text
    assert "experts that a round reads, far" in text


@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_that_read_too_many_experts_are_left_alone(batch: int) -> None:
    """Three rows read 2.8 times the experts of one: a drafter that is right half of the time only costs time."""
    world = World(flat, {"a": Drafter(0.5, 0.5, 0.0)}, batch, mixture=Mixture(0.002), seed=3)
    world.run(300)
    assert world.run(1000) / world.plain() > 0.98


def test_of_two_drafters_the_one_that_reads_fewer_experts_drafts() -> None:
    mixture = Mixture(0.001, novelty={"near": 0.25})
    world = World(flat, {"far": Drafter(0.8, 0.8, 0.0), "near": Drafter(0.8, 0.8, 0.0)}, mixture=mixture, seed=5)
    world.run(300)
    world.drafted.clear()
    assert world.run(1000) / world.best() > 0.93
    by_name = [sum(one == name for one, _ in world.drafted) for name in ("near", "far")]
    assert by_name[0] > 10 * by_name[1]
