"""What is expected of drafts, from rounds made up one by one."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

import pytest

from outrider.control.acceptance import LENGTHS, Acceptance
from outrider.core import Arm

ARMS = [Arm("a", 32), Arm("b", 32)]
CHAIN = [-1, 0, 1, 2]
BONUS = 0.8


def tell(acceptance: Acceptance, key: Hashable, arm: int, accepted: int) -> None:
    """A chain of four, of which so many were accepted."""
    acceptance.now += 1
    acceptance.predict(key, arm, 4, (CHAIN, [0.7, 0.5, 0.35, 0.25]))
    acceptance.observe(key, range(accepted))
    acceptance.learn()


def experienced() -> Acceptance:
    """Both arms were seen on many texts, and did alike."""
    acceptance = Acceptance(ARMS)
    for text in range(24):
        for _ in range(2):
            tell(acceptance, text, 0, text % 5)
            tell(acceptance, text, 1, text % 5)
    return acceptance


def expected(acceptance: Acceptance, key: Hashable, arm: int) -> float:
    """Tokens from a chain of four."""
    return acceptance.curve(key, arm)[3]


def test_a_text_is_as_hard_for_arms_that_it_did_not_try_but_less_surely() -> None:
    acceptance = experienced()
    usual = expected(acceptance, "new", 1)
    for _ in range(12):
        tell(acceptance, "hard", 0, 0)
        tell(acceptance, "easy", 0, 4)
    assert expected(acceptance, "hard", 0) < expected(acceptance, "hard", 1) < 0.95 * usual
    assert usual < expected(acceptance, "easy", 1) < expected(acceptance, "easy", 0)
    assert abs(expected(acceptance, "new", 1) - usual) < 0.3 * usual  # of one text, not of all


def test_the_upper_confidence_bound_comes_down_with_every_round_and_rises_when_they_are_long_past() -> None:
    acceptance = Acceptance(ARMS)
    above = []
    for _ in range(20):
        tell(acceptance, "text", 0, 0)
        above.append(acceptance.upper("other", 0, BONUS)[3] - expected(acceptance, "other", 0))
    assert above[0] > above[3] > above[-1] > 0.1
    acceptance.now += 500
    assert acceptance.upper("other", 0, BONUS)[3] - expected(acceptance, "other", 0) > above[3]


def test_what_an_arm_showed_long_ago_says_little_of_a_text() -> None:
    acceptance = experienced()
    for _ in range(8):
        tell(acceptance, "turned", 1, 4)
    before = expected(acceptance, "turned", 1)
    for _ in range(40):
        tell(acceptance, "turned", 0, 0)
    assert expected(acceptance, "turned", 1) < 0.8 * before


def test_a_new_temperature_expects_what_lower_ones_got() -> None:
    """Who expects too little never drafts: a bucket must not begin as a hotter one did, however near that is."""
    acceptance = Acceptance(ARMS)
    acceptance.meet(["cold", "hot", "warm", "warmer"], [0, 15, 8, 20])
    for _ in range(40):
        tell(acceptance, "cold", 0, 4)
        tell(acceptance, "hot", 0, 0)
    acceptance.forget("cold")
    assert expected(acceptance, "warm", 0) > 2.5
    assert expected(acceptance, "warmer", 0) < 1.0
    acceptance = Acceptance(ARMS)
    acceptance.meet(["hot", "cold"], [15, 0])
    untold = expected(acceptance, "unmet", 0)
    for _ in range(40):
        tell(acceptance, "hot", 0, 0)
    assert expected(acceptance, "cold", 0) == untold


def test_nodes_that_a_drafter_does_not_give_are_not_paid_for() -> None:
    acceptance = Acceptance(ARMS)
    assert acceptance.nodes("new", 0)[3] == 4.0
    for count in [1, 1, 3, 3] * 16:
        acceptance.now += 1
        acceptance.predict("text", 0, 4, (CHAIN[:count], [0.7, 0.5, 0.35][:count]))
        acceptance.observe("text", [])
        acceptance.learn()
    assert acceptance.nodes("other", 0)[:4] == pytest.approx([1.0, 1.5, 2.0, 2.0], abs=0.1)
    assert acceptance.nodes("other", 0)[8] < 8.0  # twelve were never asked for
    assert acceptance.nodes("other", 1)[3] == 4.0
    kept = Acceptance(ARMS)
    kept.restore(acceptance.as_dict())
    assert abs(kept.nodes("other", 0)[3] - acceptance.nodes("other", 0)[3]) < 1e-3


def test_curves_grow_with_length_and_stay_below_it() -> None:
    acceptance = experienced()
    for _ in range(12):
        tell(acceptance, "easy", 0, 4)
    curve = acceptance.curve("easy", 0)
    assert all(low <= high for low, high in pairwise(curve))
    assert all(gain <= length for gain, length in zip(curve, LENGTHS, strict=True))


def test_a_pruned_draft_teaches_only_what_was_judged() -> None:
    acceptance = Acceptance(ARMS)
    for _ in range(30):
        acceptance.now += 1
        acceptance.predict("text", 0, 4, (CHAIN, [0.9, 0.8, 0.7, 0.6]))
        acceptance.keep("text", [0])
        acceptance.observe("text", [0])
        acceptance.learn()
    assert acceptance.predict("text", 0, 4, (CHAIN, [0.9, 0.8, 0.7, 0.6]), learn=False)[0] > 0.95


def test_large_trees_are_learnt_in_larger_steps() -> None:
    """A tree of 320 nodes, the first 40 of which bring as much as all others."""
    arms = [Arm("tree", 1024, unit=32)]
    acceptance = Acceptance(arms)
    parents, survival = [-1] * 320, [0.05] * 40 + [0.05 / 7] * 280
    for _ in range(40):
        acceptance.now += 1
        acceptance.predict("text", 0, 320, (parents, survival))
        acceptance.observe("text", [])
        acceptance.learn()
    nodes, curve = acceptance.nodes("text", 0), acceptance.curve("text", 0)
    assert nodes[:8] == pytest.approx([32, 64, 96, 128, 160, 192, 256, 320], rel=0.05)
    assert all(low <= high for low, high in pairwise(curve))
    assert curve[7] - curve[1] < 0.6 * curve[7], "most of it is in the first 64 nodes"
    kept, other = Acceptance(arms), Acceptance([Arm("tree", 32)])
    kept.restore(acceptance.as_dict())
    other.restore(acceptance.as_dict())
    assert kept.nodes("text", 0)[3] == pytest.approx(nodes[3], rel=1e-3)
    assert other.rounds("text", 0) == 0.0, "a record of other steps says nothing"
