"""The drafters being trained, with one base class: a draft model, an EAGLE head, an MTP module, Medusa heads.

Row r of a text is a draft that starts when the features of position r and the token at r + 1 are known. Its depth j (from 0)
predicts the token at r + j + 2, whose distribution is the target's at r + j + 1. The tokens are those of the text (teacher
forcing). The features are the target's at depth 0 and the drafter's at later depths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.heads import (
    EagleHead,
    MedusaHeads,
    SaveOptions,
    load_eagle,
    load_medusa,
    load_mtp,
    save_eagle,
    save_medusa,
    save_mtp,
)
from outrider.model import Decoder, load_decoder
from outrider.model.folders import replaced
from outrider.ops import Plain
from outrider.train.attention import Unroll, causal_attend
from outrider.train.export import save_model
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.losses import Divergence, divergence
from outrider.train.sizing import autocast

__all__ = [
    "DEPTH",
    "TrainableDraftModel",
    "TrainableDrafter",
    "TrainableEagle",
    "TrainableMedusa",
    "TrainableMtp",
    "network_loss",
]

_OPS = Plain()
DEPTH = 5  # drafted tokens per round of the figures reported


@dataclass(slots=True)
class TrainableDrafter(ABC):
    """A drafter being trained: what it reads, how far it drafts, and its files."""

    module: Any  # whose parameters are trained
    kind: Divergence = "mix"
    depths: int = 1  # drafted tokens it is trained for at once
    reach: int = 64  # the largest number of tokens it can draft
    decay: float = 0.8  # weight of a depth in the loss over the one before
    every: int = 1  # the loss is of every so many rows

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it reads."""
        taps: tuple[int, ...] = self.module.config.taps
        return taps

    @property
    def vocab_ids(self) -> Tensor | None:
        """Target ids of its outputs, where its vocabulary is reduced."""
        return None

    @property
    def drafted(self) -> int:
        """Tokens of a draft in figures."""
        return min(DEPTH, self.reach)

    @abstractmethod
    def chain(self, features: Features, depths: int) -> list[Tensor]:
        """Hidden rows (B * span, width) of each depth."""

    def logits(self, hidden: Tensor, depth: int) -> Tensor:  # noqa: ARG002 (one matrix for all depths)
        """(N, outputs) of hidden rows at a depth."""
        logits: Tensor = self.module.logits(hidden, _OPS)
        return logits

    def loss(self, features: Features, lean: bool = False) -> Tensor:
        """What training makes small; `lean` is for runs without a compiler."""
        return network_loss(self, features, lean)

    def settle(self, agreement: Callable[[Self], float]) -> None:  # noqa: B027 (most networks have nothing to choose)
        """After training: choose what only a measurement can, given how often a network agrees with the target."""

    @abstractmethod
    def save(self, folder: Path, tokenizer: Path) -> None:
        """Write the files that serving reads: int8 matrices, and nothing that the target has."""

    @abstractmethod
    def load(self, folder: Path, target: Decoder) -> Any:
        """A module with the weights that `save` wrote."""

    def export(self, tokenizer: Path, directory: Path) -> None:
        """Replace a folder by the drafter as it is served; `tokenizer` is the target's directory."""
        with replaced(directory) as folder:
            self.save(folder, tokenizer)

    def loaded(self, folder: Path, target: FrozenTarget) -> Self:
        """A copy of this drafter with exported weights."""
        return replace(self, module=self.load(folder, target.decoder).to(target.decoder.norm.device))


def network_loss(network: TrainableDrafter, features: Features, lean: bool = False) -> Tensor:
    """Divergence from the target, as a weighted mean over depths; later depths weigh less.

    `lean` keeps the logits of one depth at a time, as a compiler would, for runs without one.
    """
    depths = network.depths
    span, ids = features.span(depths), network.vocab_ids
    total = torch.zeros((), device=features.tokens.device)
    with autocast(features.tokens.device):
        for depth, hidden in enumerate(network.chain(features, depths)):
            target, counted = features.cut(features.logits, depth + 1, span)[:: network.every], None
            if ids is not None:  # positions whose best token is outside the reduced vocabulary do not count
                counted = torch.isin(target.argmax(-1), ids).float()
                target = target[:, ids]
            part = partial(_depth_loss, network, depth, target, counted)
            rows = hidden[:: network.every]
            loss = checkpoint(part, rows, use_reentrant=False) if lean else part(rows)
            total = total + network.decay**depth * loss
    return total / sum(network.decay**depth for depth in range(depths))


def _depth_loss(network: TrainableDrafter, depth: int, target: Tensor, counted: Tensor | None, hidden: Tensor) -> Tensor:
    return divergence(network.kind, target, network.logits(hidden, depth), counted)


@dataclass(slots=True)
class TrainableDraftModel(TrainableDrafter):
    """A smaller model of the same vocabulary; it reads text, so it is trained at depth 0 of every position."""

    module: Decoder

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        rows, length = features.tokens.shape
        positions = torch.arange(length, device=features.tokens.device).repeat(rows)
        last = self.module(features.tokens.reshape(-1), positions, causal_attend(rows, length), _OPS).last
        return [features.cut(last, depth + 1, features.span(depths)) for depth in range(depths)]

    def save(self, folder: Path, tokenizer: Path) -> None:
        save_model(self.module, folder, tokenizer)

    def load(self, folder: Path, target: Decoder) -> Decoder:  # noqa: ARG002 (it borrows nothing)
        return load_decoder(folder)


@dataclass(slots=True)
class TrainableEagle(TrainableDrafter):
    """An EAGLE head, unrolled."""

    module: EagleHead
    depths: int = 6
    fused: bool = False  # attention by the fused kernel of `Unroll`

    @property
    def vocab_ids(self) -> Tensor | None:
        return self.module.vocab_ids

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        span, rows = features.span(depths), features.tokens.shape[0]
        unroll = Unroll(rows, span, self.fused)
        read = torch.cat([features.cut(features.taps[tap], 0, span) for tap in self.taps], dim=-1)
        feature = self.module.fuse(read, _OPS)
        places = torch.arange(span, device=read.device).repeat(rows)
        hidden: list[Tensor] = []
        for depth in range(depths):
            tokens = features.tokens[:, depth + 1 : depth + 1 + span].reshape(-1)
            feature = self.module(tokens, feature, places + depth, unroll.attend, _OPS)
            hidden.append(feature)
        return hidden

    def save(self, folder: Path, tokenizer: Path) -> None:  # noqa: ARG002 (it is the target's)
        save_eagle(self.module, folder, SaveOptions("eagle", int8=True))

    def load(self, folder: Path, target: Decoder) -> EagleHead:
        return load_eagle(folder, target)


@dataclass(slots=True)
class TrainableMtp(TrainableEagle):
    """An MTP module, unrolled. The first tokens weigh more than an EAGLE head's (FastMTP)."""

    depths: int = 3
    decay: float = 0.6

    def save(self, folder: Path, tokenizer: Path) -> None:  # noqa: ARG002 (it is the target's)
        save_mtp(self.module, folder, SaveOptions("speculators", int8=True))

    def load(self, folder: Path, target: Decoder) -> EagleHead:
        return load_mtp(folder, target)


@dataclass(slots=True)
class TrainableMedusa(TrainableDrafter):
    """Medusa heads; head k drafts depth k - 1."""

    module: MedusaHeads
    kind: Divergence = "kl"

    def __post_init__(self) -> None:
        self.depths = self.reach = self.module.config.heads

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        (tap,) = self.taps
        last = self.module.fuse(features.cut(features.taps[tap], 0, features.span(depths)), _OPS)
        return [self.module.hidden(last, head, _OPS) for head in range(depths)]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.module.logits(hidden, depth, _OPS)

    def save(self, folder: Path, tokenizer: Path) -> None:  # noqa: ARG002 (it is the target's)
        save_medusa(self.module, folder, SaveOptions("medusa", int8=True))

    def load(self, folder: Path, target: Decoder) -> MedusaHeads:
        return load_medusa(folder, target)
