"""Medusa heads by the formula, and their static trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.heads import load_medusa, save_medusa
from outrider.ops import Blocked, Plain
from outrider.train.frozen import FrozenTarget
from outrider.train.networks import TrainableMedusa
from tests.support.heads import VOCAB, toy_medusa, toy_target


def test_heads_are_residual_blocks_before_the_shared_output() -> None:
    target = toy_target()
    heads = toy_medusa(target, blocks=1)
    last = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    scores = heads(last, Plain())
    assert scores.shape == (3, 16, VOCAB)
    for k in range(3):
        block = last + torch.nn.functional.silu(last @ heads.weights[k].T + heads.biases[k])
        torch.testing.assert_close(scores[k], block @ target.embedding.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(heads(last, Blocked()), scores, atol=1e-4, rtol=1e-4)


def test_training_reads_the_row_that_serving_reads() -> None:
    """Head k of row r predicts the token at r + 1 + k from the target's last hidden row at r."""
    target = toy_target()
    network = TrainableMedusa(toy_medusa(target))
    tokens = torch.randint(0, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    features = FrozenTarget(target).reading(network.taps).features(tokens)
    served = network.module(network.module.fuse(features.taps[4], Plain()), Plain())
    for depth, hidden in enumerate(network.chain(features, 3)):
        torch.testing.assert_close(network.logits(hidden, depth), served[depth, : len(hidden)])


def test_trees_are_closed_and_nested(tmp_path: Path) -> None:
    heads = toy_medusa(toy_target())
    guessed = heads.config.tree(12)
    assert len(guessed) == len(set(guessed)) == 12
    assert all(path[:-1] in guessed for path in guessed if len(path) > 1)
    assert set(heads.config.tree(5)) < set(guessed)
    heads.config = replace(heads.config, choices=((0,), (1,), (0, 0), (2,)))
    assert heads.config.tree(3) == ((0,), (1,), (0, 0))
    save_medusa(heads, tmp_path)
    assert load_medusa(tmp_path, toy_target()).config.choices == heads.config.choices
