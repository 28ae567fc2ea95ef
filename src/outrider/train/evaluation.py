"""Figures of a trained drafter, and the static tree of Medusa heads, from held-out text and text that the target writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.heads import MedusaConfig
from outrider.train.acceptance import agreement, served
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written, steady
from outrider.train.networks import DraftNetwork, MedusaNetwork
from outrider.train.tree import Ranks, expected, static_tree, token_ranks, tree_rounds

__all__ = ["EvaluationText", "describe", "evaluate_drafter", "measure_tree", "steady_ranks"]

_TREE_NODES = 64  # of a measured static tree


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """Text to evaluate drafters on: held-out rows, and what the target wrote at each temperature."""

    rows: Tensor
    written: dict[float, Written]
    fit: dict[float, Written] = field(default_factory=dict)  # to choose a static tree by; empty: `written`


def measure_tree(network: DraftNetwork, target: FrozenTarget, text: EvaluationText) -> float | None:
    """Give Medusa heads the static tree that suits text the target writes; tokens per round expected of it there."""
    if not isinstance(network, MedusaNetwork):
        return None
    target = target.reading(network.taps)
    ranks = [steady_ranks(network, target, written, temperature) for temperature, written in (text.fit or text.written).items()]
    joined = np.concatenate([part.reshape(-1, part.shape[-1]) for part in ranks])
    choices = static_tree(joined, _TREE_NODES)
    network.module.config = replace(network.module.config, choices=choices)
    return expected(joined, choices)


def steady_ranks(network: MedusaNetwork, target: FrozenTarget, written: Written, temperature: float) -> Ranks:
    """Ranks on the texts that neither loop nor end early, or on all where none is left."""
    kept = steady(written, target.config.eos_ids[0])
    if not bool(kept.any()):
        kept = torch.ones_like(kept)
    noise = None if written.noise is None else written.noise[kept]
    return token_ranks(network, target, Written(written.tokens[kept], written.prompt, noise), temperature)


def evaluate_drafter(network: DraftNetwork, target: FrozenTarget, text: EvaluationText) -> dict[str, Any]:
    """Agreement on held-out text, and tokens per round on what the target writes."""
    target = target.reading(network.taps)
    figures: dict[str, Any] = {"heldout": asdict(agreement(network, target, text.rows))}
    for temperature, written in text.written.items():
        figures[f"temperature {temperature}"] = served(network, target, written, temperature).as_dict()
        if isinstance(network, MedusaNetwork):
            ranks = steady_ranks(network, target, written, temperature)
            figures[f"temperature {temperature}"]["trees"] = _trees(ranks, network.module.config)
            figures[f"temperature {temperature}"]["first_ranks"] = _first_ranks(ranks)
    return figures


def _trees(ranks: Ranks, config: MedusaConfig) -> dict[int, float]:
    """Tokens per round of the static tree, by its nodes, on texts that do not loop."""
    rates = {}
    for nodes in (8, 16, 24, 32, 48, _TREE_NODES):
        tokens, rounds = tree_rounds(ranks, config.tree(nodes))
        rates[nodes] = round(tokens / max(rounds, 1), 4)
    return rates


def _first_ranks(ranks: Ranks) -> list[list[float]]:
    """For each head, how often the right token was its first, among its first two, and so on."""
    return [[round(float((ranks[..., head] <= rank).mean()), 4) for rank in range(5)] for head in range(ranks.shape[-1])]


def describe(figures: dict[str, Any], log: Callable[[str], None]) -> None:
    """The figures of `evaluate_drafter` as lines."""
    heldout = figures["heldout"]
    positions, rate = heldout["by_position"], heldout["tokens_per_round"]
    log(f"  held-out text: loss {heldout['loss']:.4f}, agreement {positions}, {rate:.2f} tokens per round")
    for name, row in figures.items():
        if name.startswith("temperature"):
            log(
                f"  {name}: {row['tokens_per_round']:.2f} tokens per round ({row['tokens_per_round_all']:.2f} with the "
                f"{row['looping']:.0%} that loop), accepted by position {row['by_position']}"
            )
        if "trees" in row:
            log(f"    static trees {row['trees']}; right among the first ranks {row['first_ranks']}")
