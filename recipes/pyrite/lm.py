"""Next-token prediction for a model from scratch: the loss, and its value on held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.model import Decoder
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.data import TokenStore

__all__ = ["HeldoutLoss", "LmTask", "greedy", "heldout_loss"]

_OPS = Plain()
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeldoutLoss:
    """Loss on text that was not trained on, in nats per token."""

    loss: float
    tokens: int
    by_group: dict[str, float]


class LmTask:
    """Next-token prediction. Satisfies `loop.Task`."""

    name = "lm"

    def __init__(self, decoder: Decoder, heldout: dict[str, TokenStore], eval_rows: int = 96) -> None:
        self.module = decoder
        self._heldout = {name: store for name, store in heldout.items() if store.tokens > 1}
        self._eval_rows = eval_rows

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of (B, T + 1) ids."""
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            logits = _logits(self.module, tokens[:, :-1])
            return F.cross_entropy(logits, tokens[:, 1:].reshape(-1))

    def evaluate(self) -> dict[str, float]:
        """Loss on a sample of each held-out set."""
        return {name: heldout_loss(self.module, store, self._eval_rows).loss for name, store in self._heldout.items()}


@torch.no_grad()
def heldout_loss(decoder: Decoder, store: TokenStore, max_rows: int | None = None, batch: int = 16) -> HeldoutLoss:
    """Loss over consecutive rows of a store; `max_rows` takes evenly spread ones."""
    context = min(decoder.spec.context, store.tokens - 1)
    starts = np.arange(0, store.tokens - context, context)
    if max_rows is not None and len(starts) > max_rows:
        starts = starts[np.linspace(0, len(starts) - 1, max_rows).astype(int)]
    sums, counts = np.zeros(store.documents), np.zeros(store.documents)
    for chunk in np.array_split(starts, math.ceil(len(starts) / batch)):
        rows = np.stack([np.asarray(store.ids[s : s + context + 1], dtype=np.int64) for s in chunk])
        losses = _token_losses(decoder, torch.from_numpy(rows)).double().cpu().numpy()
        document = np.searchsorted(store.starts, chunk[:, None] + np.arange(1, context + 1), side="right") - 1
        np.add.at(sums, document, losses)
        np.add.at(counts, document, 1)
    return HeldoutLoss(float(sums.sum() / counts.sum()), int(counts.sum()), _by_group(store.groups, sums, counts))


@torch.no_grad()
def greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The most probable continuation, computed anew from all tokens for every token."""
    ids = list(prompt)
    device = decoder.norm.device
    for _ in range(min(count, decoder.spec.context - len(ids))):
        logits = _logits(decoder, torch.tensor([ids], device=device), last_only=True)
        ids.append(int(logits[-1].argmax()))
        if ids[-1] in decoder.spec.eos_ids:
            break
    return ids[len(prompt) :]


def _logits(decoder: Decoder, tokens: Tensor, last_only: bool = False) -> Tensor:
    """(B * T, V) logits of (B, T) ids, or of the last position alone."""
    rows, context = tokens.shape
    positions = torch.arange(context, device=tokens.device).repeat(rows)
    last = decoder(tokens.reshape(-1), positions, causal_attend(rows, context), _OPS).last
    return decoder.logits(last[-1:] if last_only else last, _OPS)


def _token_losses(decoder: Decoder, rows: Tensor) -> Tensor:
    """(B, T) losses of (B, T + 1) ids."""
    rows = rows.to(decoder.norm.device)
    master = decoder.embedding.dtype == decoder.layers[0].qkv.dtype  # bf16 layers are the model as served
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda and master):
        logits = _logits(decoder, rows[:, :-1])
        return F.cross_entropy(logits, rows[:, 1:].reshape(-1), reduction="none").view(rows.shape[0], -1)


def _by_group(groups: Sequence[str], sums: Floats, counts: Floats) -> dict[str, float]:
    names = sorted(set(groups))
    order = {name: i for i, name in enumerate(names)}
    place = np.array([order[group] for group in groups])
    total, size = np.bincount(place, sums, len(names)), np.bincount(place, counts, len(names))
    return {name: float(total[i] / size[i]) for i, name in enumerate(names) if size[i]}
