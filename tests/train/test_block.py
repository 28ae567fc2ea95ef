"""The loss of a block drafter: where its blocks start, and what its guesses weigh."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.train.block import TrainableBlock
from outrider.train.corpus import TokenCorpus
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.losses import divergence
from outrider.train.shapes import BlockShape, new_block


@pytest.fixture
def network(target: Path) -> TrainableBlock:
    frozen = FrozenTarget.load(target, torch.device("cpu"))
    shape = BlockShape(block=4, taps=(1, 2, 4), markov=8, mask=9)
    network = new_block(frozen, shape, "mix", seed=0, blocks=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


@pytest.fixture
def features(target: Path, prepared: TokenCorpus) -> Features:
    frozen = FrozenTarget.load(target, torch.device("cpu")).reading((1, 2, 4))
    ids = torch.from_numpy(prepared.store("train").ids[: 3 * 32].astype("int64"))
    return frozen.features(ids.view(3, 32))


def guessed(network: TrainableBlock, features: Features) -> tuple[Tensor, Tensor]:
    """The target's logits and the network's (texts, blocks, guesses, V), of the blocks that its loss is about."""
    starts, guesses = network._starts(features), network.module.config.guesses
    target = features.logits.view(*features.tokens.shape, -1)[:, starts[:, None] + 1 + torch.arange(guesses)]
    rows = network._rows(features, starts, guesses)
    return target, network.logits(rows.flatten(0, 2), 0).view(target.shape)


@torch.no_grad()
def test_blocks_start_evenly_after_the_skipped_positions(network: TrainableBlock, features: Features) -> None:
    firsts = set()
    for turn in range(12):
        moved = features._replace(tokens=features.tokens.index_fill(0, torch.tensor([0]), 0).clone())
        moved.tokens[0, 0] = turn
        starts = replace(network, skip=10)._starts(moved).tolist()
        assert len(starts) == 5
        assert {after - before for before, after in pairwise(starts)} == {3}
        assert starts[0] >= 10
        assert starts[-1] + 1 + 4 < 32  # the last guess is of a token of the text
        firsts.add(starts[0])
    assert firsts == set(range(10, 13))


@torch.no_grad()
def test_a_guess_weighs_what_its_depth_and_the_guesses_before_it_say(network: TrainableBlock, features: Features) -> None:
    target, drafted = guessed(network, features)
    overlap = torch.minimum(target.softmax(-1), drafted.softmax(-1)).sum(-1)
    depths = torch.arange(4)
    reached = torch.ones_like(overlap)
    reached[..., 1:] = overlap.cumprod(-1)[..., :-1]
    for survival in (0.0, 0.5, 1.0):
        weights = torch.exp(-depths / 3.0) * (reached + 0.1) ** survival
        expected = 0.0
        for depth in range(4):
            part = (x[..., depth, :].flatten(0, 1) for x in (target, drafted))
            share = weights[..., depth].flatten()
            expected += float(divergence("mix", *part, share) * share.sum() / weights.sum())
        loss = replace(network, fade=3.0, survival=survival).loss(features)
        assert float(loss) == pytest.approx(expected, rel=0.02)  # the loss's products may be bf16


@torch.no_grad()
def test_figures_do_not_depend_on_how_many_blocks_are_computed_together(
    network: TrainableBlock, features: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = network.chain(features, 4)
    monkeypatch.setattr("outrider.train.block._AT_ONCE", 7)
    for one, other in zip(together, network.chain(features, 4), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_shorter_context_is_the_heads_alone(target: Path) -> None:
    frozen = FrozenTarget.load(target, torch.device("cpu"))
    shape = BlockShape(block=4, taps=(1, 2, 4), mask=9, context=16)
    head = new_block(frozen, shape, "mix", seed=0).module
    assert (head.config.shape.context, head.target.context) == (16, 32)
