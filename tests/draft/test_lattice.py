"""Trees over blocks: the best paths of all, by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.lattice import Lattice

SLOTS, CANDIDATES = 3, 3


def lattice(seed: int, pairs: bool) -> Lattice:
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(50)[:CANDIDATES] for _ in range(SLOTS)])
    chances = np.sort(rng.dirichlet(np.ones(CANDIDATES + 2), SLOTS)[:, :CANDIDATES])[:, ::-1]
    made = Lattice.independent(tokens, chances)
    return made.joined(rng.normal(size=(SLOTS, CANDIDATES, CANDIDATES))) if pairs else made


@pytest.mark.parametrize("pairs", [False, True])
@given(seed=st.integers(0, 10_000), nodes=st.integers(0, 45))
def test_the_tree_is_of_the_most_probable_paths(pairs: bool, seed: int, nodes: int) -> None:
    made = lattice(seed, pairs)
    worth = {}
    for depth in range(1, SLOTS + 1):
        for ranks in itertools.product(range(CANDIDATES), repeat=depth):
            steps = zip((0, *ranks), ranks, strict=False)
            worth[ranks] = np.prod([made.chances[slot, before, rank] for slot, (before, rank) in enumerate(steps)])
    tree = made.tree(nodes)
    assert tree.survival == pytest.approx(sorted(worth.values(), reverse=True)[:nodes])
    assert all(parent < node for node, parent in enumerate(tree.parents))
    number = [{int(token): rank for rank, token in enumerate(slot)} for slot in made.tokens]
    for path, survival in zip(tree.paths()[1:], tree.survival, strict=True):
        assert worth[tuple(number[slot][token] for slot, token in enumerate(path))] == pytest.approx(survival)


@given(seed=st.integers(0, 10_000))
def test_pairs_move_chances_among_the_candidates_of_a_slot(seed: int) -> None:
    before, after = lattice(seed, False), lattice(seed, True)
    np.testing.assert_allclose(before.chances.sum(-1), after.chances.sum(-1))
    scores = np.zeros((SLOTS, CANDIDATES, CANDIDATES))
    scores[1, 0, 2] = 50.0  # after the first candidate of slot 0, the third of slot 1 is certain
    joined = before.joined(scores)
    assert joined.chances[1, 0, 2] == pytest.approx(before.chances[1, 0].sum())
    np.testing.assert_allclose(joined.chances[1, 1], before.chances[1, 1])


def test_confidence_is_the_chance_of_the_best() -> None:
    made = lattice(1, False)
    trusted = made.trusted(np.full((SLOTS, CANDIDATES), 0.5))
    assert trusted.chances.max(-1) == pytest.approx(np.minimum(0.5, made.chances.max(-1) / made.chances.sum(-1)))
    assert (trusted.chances.sum(-1) <= 1.0 + 1e-9).all()


def test_a_slot_without_a_choice_ends_the_tree() -> None:
    made = Lattice.independent(np.array([[4, 5], [-1, -1]]), np.array([[0.6, 0.3], [0.5, 0.5]]))
    assert made.tree(9).tokens == [4, 5]
