"""Static trees: what is measured, what is chosen, and the command that does both."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.errors import InvalidParameter
from outrider.heads import load_medusa
from outrider.model import load_decoder
from outrider.train.acceptance import served, written_for
from outrider.train.cli import app
from outrider.train.corpus import TokenCorpus
from outrider.train.evaluation import EvaluationText, evaluate_drafter, measure_tree
from outrider.train.export import export
from outrider.train.frozen import FrozenTarget
from outrider.train.networks import DraftModelNetwork
from outrider.train.shapes import MedusaShape, new_medusa
from outrider.train.tree import expected, static_tree, token_ranks, tree_rounds

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


def test_rounds_follow_the_tree() -> None:
    ranks = np.array([[[0, 1], [5, 5], [1, 0], [0, 0], [1, 1], [0, 0]]])
    assert tree_rounds(ranks, ((0,), (1,), (0, 1), (1, 0))) == (3 + 2 + 2, 3)  # starts 0, 3 and 5
    assert tree_rounds(ranks, ()) == (6, 6)


def test_ranks_count_the_tokens_before_the_right_one(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    itself = DraftModelNetwork(load_decoder(target), reach=2)
    for temperature in (0.0, 0.8):  # with the draw's noise the target predicts its draws
        written = written_for(frozen, prepared.store("heldout_packages"), 3, 16, temperature)
        ranks = token_ranks(itself, frozen, written, temperature)
        assert ranks.shape == (3, 14, 2)  # starts with both tokens inside the text
        assert (ranks == 0).mean() > 0.95


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
    measure_tree(network, frozen, EvaluationText(rows, written, fit))
    ranks = token_ranks(network, frozen.reading(network.taps), fit[0.0])
    assert network.module.config.choices == static_tree(ranks, 64)
    figures = evaluate_drafter(network, frozen, EvaluationText(rows, written, fit))["temperature 0.8"]
    assert set(figures["trees"]) == {8, 16, 24, 32, 48, 64}
    assert len(figures["first_ranks"]) == 2


def test_the_command_writes_the_tree_it_measured(target: Path, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(target, CPU)
    export(new_medusa(frozen, MedusaShape(2, 1), "kl"), target, tmp_path / "heads")
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
