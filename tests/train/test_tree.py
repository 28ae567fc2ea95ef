"""Static trees: what is measured, and what is chosen."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.model import load_decoder
from outrider.train.acceptance import written_for
from outrider.train.corpus import TokenCorpus
from outrider.train.frozen import FrozenTarget
from outrider.train.networks import TrainableDraftModel
from outrider.train.tree import expected, static_tree, token_ranks

CPU = torch.device("cpu")


def test_the_tree_holds_the_paths_that_were_right_most_often() -> None:
    ranks = np.array([[0, 0]] * 5 + [[0, 1]] * 2 + [[1, 0]] * 4 + [[2, 9]] + [[99, 0]])
    tree = static_tree(ranks, 6)
    assert tree == ((0,), (0, 0), (1,), (1, 0), (0, 1), (2,))
    assert static_tree(ranks, 3) == tree[:3]
    assert static_tree(ranks.reshape(1, 13, 2), 6) == tree
    assert expected(ranks, tree[:2]) == pytest.approx(1 + (7 + 5) / 13)


def test_no_tree_is_better() -> None:
    """Against every tree of three nodes over three ranks and two depths."""
    ranks = np.random.Generator(np.random.Philox(5)).geometric(0.5, (200, 2)) - 1
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    trees = [tree for tree in itertools.combinations(nodes, 3) if all(len(n) == 1 or n[:1] in tree for n in tree)]
    assert expected(ranks, static_tree(ranks, 3)) == pytest.approx(max(expected(ranks, tree) for tree in trees))


def test_ranks_count_the_tokens_before_the_right_one(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    itself = TrainableDraftModel(load_decoder(target), reach=2)
    for temperature in (0.0, 0.8):  # with the draw's noise the target predicts its draws
        written = written_for(frozen, prepared.store("heldout_packages"), 3, 16, temperature)
        ranks = token_ranks(itself, frozen, written, temperature)
        assert ranks.shape == (3, 14, 2)  # starts with both tokens inside the text
        assert (ranks == 0).mean() > 0.95
