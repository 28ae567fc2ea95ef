"""Whole requests predicted by the planner, and predictions beside measurements."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from benchmarks.plan_check import RequestProfile, check, expected_time, halves
from outrider.bench.plan.formulas import survival_of
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Subject
from tests.bench.test_plan import GREEDY, PROMPTS, constant, make_costs


def test_a_request_is_its_rounds_and_its_prompt() -> None:
    profile = Profile("twin", 3, [constant(3, 3)], make_costs(0.0002))
    requests = RequestProfile(profile, firsts=[(10, 0.01), (20, 0.02), (30, 0.03)], entries=[(10, 0.005)])
    first, total = requests.request_s(40, 1 + 5 * 4 + 2, 3)
    assert first == pytest.approx(0.04)
    full, short = profile.costs.round_s(3, 3), profile.costs.round_s(1, 1)  # at the end there is room for one
    assert total == pytest.approx(0.04 + 0.005 + 5 * full + short)
    plain = RequestProfile(Profile("none", 0, costs=make_costs(0.0)))
    assert plain.request_s(40, 11, 0)[1] == pytest.approx(10 * 0.0032)


def test_halves_are_alike() -> None:
    scores = [float(i * i % 101) for i in range(1, 37)]
    learnt, predicted = halves(scores)
    assert sorted([*learnt, *predicted]) == list(range(36))
    order = sorted(range(36), key=lambda i: scores[i])
    assert all({order[i], order[i + 1]} == {learnt[i // 2], predicted[i // 2]} for i in range(0, 36, 2))
    sums = [sum(scores[i] for i in half) for half in (learnt, predicted)]
    assert sums[0] == pytest.approx(sums[1], rel=0.02)  # the lower of every pair in one half would be 5 % apart


def test_one_half_is_learnt_from_and_the_other_measured() -> None:
    subjects = [Subject(None, method) for method in ("none", "eagle:4")]
    (row,) = check(subjects, [*PROMPTS, PROMPTS[0]], GREEDY, 2, lambda _: None)
    profile = subjects[1].profile
    assert row.method == "eagle:4"
    assert len(profile.traces) == 2  # of every other prompt one run
    for trace in profile.traces:
        places = [draft.at for draft in trace.drafts]
        assert places[0] == 1  # the first token comes with the prompt
        assert all(b - a == len(draft.path) + 1 for a, b, draft in zip(places, places[1:], trace.drafts, strict=False))
    assert 1.0 < row.tokens_per_round <= 5.0
    assert row.predicted > 0
    assert row.measured > 0


def test_a_request_takes_the_time_of_its_rounds() -> None:
    """Against dice, with drafts cut where the request ends."""
    chance, length, tokens = 0.7, 4, 23
    seconds, rounds = expected_time(
        tokens, chain_outcomes(chance, length), lambda room, nodes: 1.0 + 0.1 * min(room, length) + nodes
    )
    rng, spent, count, runs = random.Random(2), 0.0, 0, 20_000
    for _ in range(runs):
        left = tokens
        while left:
            nodes = min(length, left - 1)
            accepted = next((i for i in range(nodes) if rng.random() > chance), nodes)
            spent += 1.0 + 0.1 * nodes + nodes
            count += 1
            left -= accepted + 1
    assert seconds == pytest.approx(spent / runs, rel=0.01)
    assert rounds == pytest.approx(count / runs, rel=0.01)


def chain_outcomes(chances: float | Sequence[float], length: int) -> Callable[[int], Mapping[tuple[int, int], float]]:
    """The outcomes of a chain whose tokens are accepted independently."""

    def outcomes(room: int) -> Counter[tuple[int, int]]:
        nodes = min(length, room)
        survival = [1.0, *survival_of(chances, nodes), 0.0]
        return Counter({(nodes, k): survival[k] - survival[k + 1] for k in range(nodes + 1)})

    return outcomes
