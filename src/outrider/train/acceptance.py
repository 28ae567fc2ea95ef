"""How many drafted tokens the target would accept, computed without an engine.

On any text: agreement with the target's most probable token, where every draft reads the text. On text that the target wrote
the tokens read are its choices, so the figures are those of serving: drafts are walked round by round, and at a temperature
target and drafter draw with the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.acceptance import loops
from outrider.train.data import TokenStore
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.generate import Written, document_starts, write_text
from outrider.train.losses import divergence
from outrider.train.networks import DraftNetwork

__all__ = ["DEPTH", "Agreement", "Served", "agreement", "drafted_logits", "heldout_rows", "served", "written_for"]

DEPTH = 5  # drafted tokens per round of the figures reported
_BATCH = 8
Matches = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a network with the target on held-out text."""

    loss: float  # divergence of the network, mean over its depths
    by_position: list[float]  # agreement at each depth, whatever came before
    survival: list[float]  # share of drafts whose tokens up to this depth all agree
    tokens_per_round: float


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


def heldout_rows(store: TokenStore, context: int, max_rows: int) -> Tensor:
    """(n, context) evenly spread rows of a store."""
    context = min(context, store.tokens)
    starts = np.arange(0, store.tokens - context + 1, context)
    starts = starts[np.linspace(0, len(starts) - 1, min(max_rows, len(starts))).astype(int)]
    return torch.from_numpy(np.stack([np.asarray(store.ids[s : s + context], dtype=np.int64) for s in starts]))


@torch.no_grad()
def agreement(network: DraftNetwork, target: FrozenTarget, rows: Tensor) -> Agreement:
    """Greedy agreement on text."""
    depths = min(DEPTH, network.reach)
    device, losses, parts = target.decoder.norm.device, [], []
    for chunk in torch.split(rows, _BATCH):
        features = target.features(chunk.to(device))
        span = features.span(depths)
        matches = []
        for depth, hidden in enumerate(_chain(network, features, depths)):
            goal = features.cut(features.logits, depth + 1, span)
            logits = network.logits(hidden, depth)
            same_vocabulary = goal if network.vocab_ids is None else goal[:, network.vocab_ids]
            losses.append(float(divergence(network.kind, same_vocabulary, logits)))
            matches.append(_proposed(network, logits) == goal.argmax(-1))
        parts.append(torch.stack(matches, dim=-1).cpu().numpy())
    return _agreement(np.concatenate(parts), sum(losses) / len(losses))


@torch.no_grad()
def served(network: DraftNetwork, target: FrozenTarget, written: Written, temperature: float) -> Served:
    """Tokens per round of a chain of DEPTH on written text."""
    depths = min(DEPTH, network.reach)
    outcomes: list[tuple[int, int, bool]] = []  # tokens and rounds of each text, and whether it loops
    per_position = np.zeros(depths)
    for batch in written.batches(_BATCH):
        drafted = drafted_logits(network, target, batch, temperature, depths)
        matches = torch.stack([_proposed(network, logits).view(tokens.shape) == tokens for logits, tokens in drafted], dim=-1)
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


def written_for(target: FrozenTarget, store: TokenStore, rows: int, count: int, temperature: float) -> Written:
    """Continuations of the beginnings of held-out documents."""
    prompt = min(96, target.config.context // 2)
    prompts = torch.from_numpy(document_starts(store, rows, prompt, seed=7))
    count = min(count, target.config.context - prompt)
    return write_text(target.decoder, prompts, count, torch.full((rows,), temperature), 7, keep_noise=temperature > 0)


def walk(matches: Matches) -> list[int]:
    """Accepted tokens of each round: (starts, depths) matches of one text, the first round at start 0."""
    accepted, at = [], 0
    while at < len(matches):
        row = matches[at]
        count = len(row) if row.all() else int(row.argmin())
        accepted.append(count)
        at += count + 1
    return accepted


def _agreement(matches: Matches, loss: float) -> Agreement:
    survival = np.logical_and.accumulate(matches, axis=-1).mean(0)
    rounded = [round(float(x), 4) for x in survival]
    return Agreement(loss, [round(float(x), 4) for x in matches.mean(0)], rounded, 1.0 + math.fsum(rounded))


def drafted_logits(
    network: DraftNetwork, target: FrozenTarget, written: Written, temperature: float, depths: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each depth, logits (B * starts, outputs) of the drafts and the tokens (B, starts) that the target wrote there.

    Start s is the round whose newest token is the s-th written one. Where the draw's noise was kept, the logits contain it.
    """
    features = target.features(written.tokens)
    rows, length = features.tokens.shape
    span = features.span(depths)
    first, end = written.prompt - 1, min(span, length - depths - 1)  # row r drafts tokens r + 2 .. r + 1 + depths
    for depth, hidden in enumerate(_chain(network, features, depths)):
        drafts = hidden.view(rows, span, -1)[:, first:end]
        logits = network.logits(drafts.reshape(-1, drafts.shape[-1]), depth)
        if written.noise is not None:
            begin = first + depth + 2 - written.prompt
            noise = written.noise[:, begin : begin + end - first].reshape(len(logits), -1)
            logits = logits / temperature + (noise if network.vocab_ids is None else noise[:, network.vocab_ids])
        yield logits, features.tokens[:, first + depth + 2 : end + depth + 2]


def _chain(network: DraftNetwork, features: Features, depths: int) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16, enabled=features.tokens.is_cuda):
        return network.chain(features, depths)


def _proposed(network: DraftNetwork, logits: Tensor) -> Tensor:
    best = logits.argmax(-1)
    return best if network.vocab_ids is None else network.vocab_ids[best]
