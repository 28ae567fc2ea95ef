"""Figures of drafters without an engine, the static tree by prompts, and networks that begin from exported ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.engine.acceptance import loops
from outrider.errors import InvalidParameter, ModelError
from outrider.heads import load_medusa
from outrider.model import load_decoder
from outrider.train.acceptance import agreement, heldout_rows, written_for
from outrider.train.corpus import TokenCorpus
from outrider.train.frozen import FrozenTarget
from outrider.train.networks import TrainableDraftModel
from outrider.train.shapes import DecoderShape, EagleShape, MedusaShape, new_eagle, new_medusa
from outrider.train.tree import fit_tree, static_tree, token_ranks
from recipes.pyrite.cli import app
from recipes.pyrite.evaluation import EvaluationText, evaluate_drafter, served, tree_rounds, walk
from recipes.pyrite.heads import begin_from
from recipes.pyrite.kernels import fastest_kernel

CPU = torch.device("cpu")


def test_rounds_are_walked() -> None:
    matches = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=bool)
    assert walk(matches) == [2, 1, 3]
    assert walk(matches[:0]) == []
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 4)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert not loops([])


def test_a_network_begins_from_an_exported_one(target: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(target, CPU)
    first, second = (new_eagle(frozen, EagleShape(taps=(1, 2, 4)), "mix", seed, 2) for seed in (0, 1))
    first.export(target, tmp_path / "head")
    begin_from(second, frozen, tmp_path / "head")
    torch.testing.assert_close(second.module.fc, first.module.fc, atol=2e-3, rtol=0.02)
    other = new_eagle(frozen, EagleShape(taps=(1, 4)), "mix", 0, 2)
    with pytest.raises(ModelError, match="another shape"):
        begin_from(other, frozen, tmp_path / "head")


def test_rounds_follow_the_tree() -> None:
    ranks = np.array([[[0, 1], [5, 5], [1, 0], [0, 0], [1, 1], [0, 0]]])
    assert tree_rounds(ranks, ((0,), (1,), (0, 1), (1, 0))) == (3 + 2 + 2, 3)  # starts 0, 3 and 5
    assert tree_rounds(ranks, ()) == (6, 6)


def test_a_tree_of_one_branch_is_a_chain(target: Path, prepared: TokenCorpus) -> None:
    """Walked through by its ranks, it has the figures of the chain."""
    frozen = FrozenTarget.load(target, CPU)
    written = written_for(frozen, prepared.store("heldout_packages"), 4, 16, 0.8)
    network = new_medusa(frozen, MedusaShape(2, 1), "kl")
    frozen = frozen.reading(network.taps)
    tokens, rounds = tree_rounds(token_ranks(network, frozen, written, 0.8), ((0,), (0, 0)))
    assert tokens / rounds == pytest.approx(served(network, frozen, written, 0.8).tokens_per_round_all)


def test_trees_are_chosen_and_evaluated_on_different_text(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    store = prepared.store("heldout_packages")
    written = {0.8: written_for(frozen, store, 3, 16, 0.8)}
    fit = {0.0: written_for(frozen, store, 3, 16, 0.0)}
    network = new_medusa(frozen, MedusaShape(2, 1), "kl")
    rows = torch.zeros(1, 32, dtype=torch.int64)
    fit_tree(network, frozen, fit)
    ranks = token_ranks(network, frozen.reading(network.taps), fit[0.0])
    assert network.module.config.choices == static_tree(ranks, 64)
    figures = evaluate_drafter(network, frozen, EvaluationText(rows, written, fit))["temperature 0.8"]
    assert set(figures["trees"]) == {8, 16, 24, 32, 48, 64}
    assert len(figures["first_ranks"]) == 2


def test_the_command_writes_the_tree_it_measured(target: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(target, CPU)
    new_medusa(frozen, MedusaShape(2, 1), "kl").export(target, tmp_path / "heads")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def load_table_3", "for item in page", "x = 1")))
    command = ["medusa-tree", str(prompts), "--target", str(target), "--heads", str(tmp_path / "heads"), "--nodes=7"]
    options = ("--max-tokens=12", "--device=cpu")

    shown = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "head 2" in shown.output
    assert load_medusa(tmp_path / "heads", frozen.decoder).config.choices == ()
    wrote = CliRunner().invoke(app, [*command, *options, "--write"], catch_exceptions=False)
    assert wrote.output.startswith(shown.output)
    choices = load_medusa(tmp_path / "heads", frozen.decoder).config.choices
    assert len(choices) == 7
    assert all(path[:-1] in choices for path in choices if len(path) > 1)

    for wrong, name in (("--nodes=0", "nodes"), ("--temperatures=hot", "temperatures"), ("--max-tokens=32", "max_tokens")):
        result = CliRunner().invoke(app, [*command, *options, wrong])
        assert isinstance(result.exception, InvalidParameter)
        assert name in str(result.exception)


def test_a_drafter_that_is_the_target_is_always_accepted(target: Path, prepared: TokenCorpus) -> None:
    """The target as the draft model of itself accepts every token."""
    frozen = FrozenTarget.load(target, CPU)
    store = prepared.store("heldout_packages")
    itself = TrainableDraftModel(load_decoder(target))
    for temperature in (0.0, 0.8):
        written = written_for(frozen, store, 3, 16, temperature)
        assert served(itself, frozen, written, temperature).tokens_per_round_all > 5.0
    assert agreement(itself, frozen, heldout_rows(store, 32, 3)).tokens_per_round == pytest.approx(6.0)


def test_a_cpu_has_one_kernel() -> None:
    assert fastest_kernel(DecoderShape(2, 32, 4, 2, 48).config(0), 1, 16, CPU) == "default"
