"""How often the target would accept what a drafter drafts.

`agreement` compares with the target's most probable token on any text, where every draft reads the text. `drafted_logits`
looks at text that the target wrote: the tokens read are its choices, and target and drafter draw with the same noise.
`served_acceptance` measures an exported drafter in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.acceptance import measure_acceptance
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams
from outrider.train.data import TokenStore
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.generate import Written, document_starts, write_text
from outrider.train.losses import divergence
from outrider.train.networks import DEPTH, TrainableDrafter
from outrider.train.sizing import autocast

__all__ = ["Agreement", "agreement", "drafted_logits", "heldout_rows", "proposed", "served_acceptance", "written_for"]

_BATCH = 8
_PROMPT = 96  # tokens of held-out documents that the target continues
_METHODS = {"draft": "draft_model"}  # name of the command -> name of the method, where they differ
_NODES = {"medusa": 24, "dflash": 16}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a network with the target on held-out text."""

    loss: float  # divergence of the network, mean over its depths
    by_position: list[float]  # agreement at each depth, whatever came before
    survival: list[float]  # share of drafts whose tokens up to this depth all agree
    tokens_per_round: float


def heldout_rows(store: TokenStore, context: int, max_rows: int) -> Tensor:
    """(n, context) evenly spread rows of a store."""
    context = min(context, store.tokens)
    starts = np.arange(0, store.tokens - context + 1, context)
    starts = starts[np.linspace(0, len(starts) - 1, min(max_rows, len(starts))).astype(int)]
    return torch.from_numpy(np.stack([np.asarray(store.ids[s : s + context], dtype=np.int64) for s in starts]))


@torch.no_grad()
def agreement(network: TrainableDrafter, target: FrozenTarget, rows: Tensor) -> Agreement:
    """Greedy agreement on text."""
    depths = network.drafted
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
            matches.append(proposed(network, logits) == goal.argmax(-1))
        parts.append(torch.stack(matches, dim=-1).cpu().numpy())
    equal = np.concatenate(parts)
    by_position = [round(float(x), 4) for x in equal.mean(0)]
    survival = [round(float(x), 4) for x in np.logical_and.accumulate(equal, axis=-1).mean(0)]
    return Agreement(sum(losses) / len(losses), by_position, survival, 1.0 + math.fsum(survival))


def written_for(target: FrozenTarget, store: TokenStore, rows: int, count: int, temperature: float) -> Written:
    """Continuations of the beginnings of held-out documents."""
    prompt = min(_PROMPT, target.config.context // 2)
    prompts = torch.from_numpy(document_starts(store, rows, prompt, seed=7))
    count = min(count, target.config.context - prompt)
    return write_text(target.decoder, prompts, count, torch.full((rows,), temperature), 7, keep_noise=temperature > 0)


def drafted_logits(
    network: TrainableDrafter, target: FrozenTarget, written: Written, temperature: float, depths: int
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


def proposed(network: TrainableDrafter, logits: Tensor) -> Tensor:
    """The target ids that a drafter would propose first."""
    best = logits.argmax(-1)
    return best if network.vocab_ids is None else network.vocab_ids[best]


def served_acceptance(target: Path, name: str, drafter: Path, store: TokenStore, prompts: int = 8) -> list[dict[str, Any]]:
    """Tokens per round and acceptance by position on beginnings of held-out documents, greedy and at 0.8."""
    settings = {"method": _METHODS.get(name, name), "model": str(drafter), "draft_tokens": _NODES.get(name, DEPTH)}
    llm = LLM(target, speculation=settings, share=False)
    size = min(_PROMPT, llm.max_model_len // 2)
    texts = [tuple(int(token) for token in row) for row in document_starts(store, prompts, size, seed=7)]
    length = min(120, llm.max_model_len - size)
    params = [SamplingParams(temperature=temperature, seed=7, max_tokens=length) for temperature in (0.0, 0.8)]
    return [measure_acceptance(llm, texts, one).as_dict() for one in params]


def _chain(network: TrainableDrafter, features: Features, depths: int) -> list[Tensor]:
    with autocast(features.tokens.device):
        return network.chain(features, depths)
