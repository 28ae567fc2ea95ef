"""The planner's arithmetic against enumeration and dice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from outrider.bench.plan.formulas import (
    best_length,
    best_tree,
    break_even,
    closed_form_length,
    expected_tokens,
    survival_of,
)


@pytest.mark.parametrize("chances", [[0.7], [0.9, 0.5, 0.2], [1.0, 0.0]])
def test_a_chains_tokens_are_those_of_every_outcome_weighed(chances: list[float]) -> None:
    length, by_position = 4, [chances[min(i, len(chances) - 1)] for i in range(4)]
    total = 0.0
    for outcome in itertools.product([True, False], repeat=length):
        weight = 1.0
        for right, chance in zip(outcome, by_position, strict=True):
            weight *= chance if right else 1.0 - chance
        accepted = next((i for i, right in enumerate(outcome) if not right), length)
        total += weight * (accepted + 1)
    assert expected_tokens(survival_of(chances, length)) == pytest.approx(total)


def test_a_trees_tokens_are_those_of_walks_through_it() -> None:
    parents, chances = [-1, -1, 0, 0, 1, 4], [0.5, 0.3, 0.6, 0.2, 0.9, 0.4]
    rng, tokens, walks = random.Random(1), 0, 60_000
    for _ in range(walks):
        node = -1
        while True:
            tokens += 1
            draw = rng.random()
            for child in (i for i, parent in enumerate(parents) if parent == node):
                if draw < chances[child]:
                    node = child
                    break
                draw -= chances[child]
            else:
                break
    assert tree_tokens(parents, chances) == pytest.approx(tokens / walks, rel=0.01)


@pytest.mark.parametrize("ranks", [[0.6, 0.2, 0.1], [0.4, 0.35], [0.9, 0.05, 0.03]])
@pytest.mark.parametrize("depth", [None, 2])
def test_no_tree_beats_the_best_one(ranks: list[float], depth: int | None) -> None:
    nodes = 5
    tokens, parents = best_tree(ranks, nodes, depth)
    every = [tree_tokens(tree, _ranked(tree, ranks)) for tree in _trees(nodes) if _fits(tree, ranks, depth)]
    assert tokens == pytest.approx(max(every))
    assert tree_tokens(parents, _ranked(parents, ranks)) == pytest.approx(tokens)
    assert _fits(parents, ranks, depth)


@pytest.mark.parametrize(("chance", "cost"), [(0.8, 0.05), (0.6, 0.02), (0.95, 0.1), (0.3, 0.2)])
def test_the_closed_form_is_where_brute_force_ends(chance: float, cost: float) -> None:
    lengths = range(200)
    best = best_length([expected_tokens(survival_of(chance, k)) for k in lengths], [1 + cost * k for k in lengths])
    assert abs(closed_form_length(chance, cost) - best) < 1.0


def test_the_marginal_rule_finds_the_best_length() -> None:
    survival, times = survival_of([0.9, 0.8, 0.6], 12), [1.0 + 0.08 * k + 0.01 * k * k for k in range(13)]
    tokens = [expected_tokens(survival, k) for k in range(13)]
    k = 0
    while k < 12 and survival[k] / tokens[k] > (times[k + 1] - times[k]) / times[k]:
        k += 1
    assert best_length(tokens, times) == k > 0


def test_a_draft_that_never_comes_true_is_not_worth_its_time() -> None:
    assert best_length([1.0, 1.0, 1.0], [1.0, 1.1, 1.2]) == 0
    assert closed_form_length(0.1, 0.2) == 0.0


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 64, 1000])
def test_break_even_is_the_last_batch_that_pays(limit: int) -> None:
    assert break_even(lambda batch: 1.5 if batch <= limit else 0.9) == limit


def test_break_even_of_a_roofline_is_the_textbooks() -> None:
    knee, length, cost = 300, 3, 0.15
    tokens = expected_tokens(survival_of(0.7, length))

    def forward(rows: int) -> float:
        return max(1.0, rows / knee)

    batch = break_even(lambda b: tokens * forward(b) / (forward(b * (1 + length)) + cost))
    assert batch == pytest.approx(knee * (tokens - cost) / (1 + length), abs=1.0)


def _trees(nodes: int) -> list[list[int]]:
    return [list(tree) for tree in itertools.product(*(range(-1, i) for i in range(nodes)))]


def _ranked(parents: list[int], ranks: list[float]) -> list[float]:
    """Each node's chance, children in the order they come."""
    seen: dict[int, int] = {}
    chances = []
    for parent in parents:
        rank = seen[parent] = seen.get(parent, -1) + 1
        chances.append(ranks[rank] if rank < len(ranks) else 0.0)
    return chances


def _fits(parents: list[int], ranks: list[float], depth: int | None) -> bool:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return (depth is None or max(depths) <= depth) and all(parents.count(tree) <= len(ranks) for tree in set(parents))


def tree_tokens(parents: Sequence[int], chances: Sequence[float]) -> float:
    """E of a tree: `chances[i]` is that of node i once its parent is accepted; siblings exclude each other."""
    survival: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        survival.append(chance * (survival[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(survival)
