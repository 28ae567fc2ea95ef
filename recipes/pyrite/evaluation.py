"""Figures of trained drafters without an engine: agreement on held-out text, and rounds walked on what the target wrote.

On text that the target wrote the tokens read are its choices, so the figures are those of serving: drafts are walked round by
round, and at a temperature target and drafter draw with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.acceptance import loops
from outrider.heads import MedusaConfig
from outrider.train.acceptance import agreement, drafted_logits, proposed
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Written
from outrider.train.networks import TrainableDrafter, TrainableMedusa
from outrider.train.tree import Paths, Ranks, accepted_depths, steady_ranks

__all__ = ["EvaluationText", "Served", "describe", "evaluate_drafter", "served", "tree_rounds", "walk"]

_BATCH = 8
_TREE_SIZES = (8, 16, 24, 32, 48, 64)
Matches = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """Text to evaluate drafters on: held-out rows, and what the target wrote at each temperature."""

    rows: Tensor
    written: dict[float, Written]
    fit: dict[float, Written] = field(default_factory=dict)  # to choose a static tree by; empty: `written`


@dataclass(frozen=True, slots=True)
class Served:
    """Acceptance of a chain on text that the target wrote."""

    temperature: float
    tokens_per_round: float  # over texts that do not loop, where there are any
    tokens_per_round_all: float
    by_position: list[float]  # share of rounds that accept this depth
    looping: float  # share of texts in which an 8-gram occurs more than three times
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_drafter(network: TrainableDrafter, target: FrozenTarget, text: EvaluationText) -> dict[str, Any]:
    """Agreement on held-out text, and tokens per round on what the target writes."""
    target = target.reading(network.taps)
    figures: dict[str, Any] = {"heldout": asdict(agreement(network, target, text.rows))}
    for temperature, written in text.written.items():
        figures[f"temperature {temperature}"] = served(network, target, written, temperature).as_dict()
        if isinstance(network, TrainableMedusa):
            ranks = steady_ranks(network, target, written, temperature)
            figures[f"temperature {temperature}"]["trees"] = _trees(ranks, network.module.config)
            figures[f"temperature {temperature}"]["first_ranks"] = _first_ranks(ranks)
    return figures


@torch.no_grad()
def served(network: TrainableDrafter, target: FrozenTarget, written: Written, temperature: float) -> Served:
    """Tokens per round of a chain on written text."""
    depths = network.drafted
    outcomes: list[tuple[int, int, bool]] = []  # tokens and rounds of each text, and whether it loops
    per_position = np.zeros(depths)
    for batch in written.batches(_BATCH):
        drafted = drafted_logits(network, target, batch, temperature, depths)
        matches = torch.stack([proposed(network, logits).view(tokens.shape) == tokens for logits, tokens in drafted], dim=-1)
        for row, tokens in zip(matches.cpu().numpy(), batch.tokens.tolist(), strict=True):
            accepted = walk(row)
            per_position += [sum(a > depth for a in accepted) for depth in range(depths)]
            outcomes.append((sum(accepted) + len(accepted), len(accepted), loops(tokens[written.prompt :])))
    straight = [o for o in outcomes if not o[2]] or outcomes
    rounds = sum(o[1] for o in outcomes)
    return Served(
        temperature,
        sum(o[0] for o in straight) / max(sum(o[1] for o in straight), 1),
        sum(o[0] for o in outcomes) / max(rounds, 1),
        [round(float(x), 4) for x in per_position / max(rounds, 1)],
        sum(o[2] for o in outcomes) / len(outcomes),
        rounds,
    )


def walk(matches: Matches) -> list[int]:
    """Accepted tokens of each round: (starts, depths) matches of one text, the first round at start 0."""
    accepted, at = [], 0
    while at < len(matches):
        row = matches[at]
        count = len(row) if row.all() else int(row.argmin())
        accepted.append(count)
        at += count + 1
    return accepted


def _trees(ranks: Ranks, config: MedusaConfig) -> dict[int, float]:
    """Tokens per round of the static tree, by its nodes, on texts that do not loop."""
    rates = {}
    for nodes in _TREE_SIZES:
        tokens, rounds = tree_rounds(ranks, config.tree(nodes))
        rates[nodes] = round(tokens / max(rounds, 1), 4)
    return rates


def tree_rounds(ranks: Ranks, choices: Paths) -> tuple[int, int]:
    """(tokens, rounds) of walking through texts (B, starts, depths) with a tree."""
    tokens = rounds = 0
    for text in ranks:
        accepted = accepted_depths(text, choices)
        at = 0
        while at < len(accepted):
            tokens += int(accepted[at]) + 1
            rounds += 1
            at += int(accepted[at]) + 1
    return tokens, rounds


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
