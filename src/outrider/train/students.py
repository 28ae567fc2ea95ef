"""What learns from a frozen target: a draft model, an EAGLE head, Medusa heads.

All are seen alike. Row r of a text is a draft that starts after position r's features and the token at
r + 1 are known; its depth j (from 0) predicts the token at r + j + 2, whose law is the target's at
r + j + 1. Text is fed as it stands (teacher forcing), features are the drafter's own beyond depth 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.heads import EagleHead, MedusaHeads
from outrider.model import Decoder
from outrider.ops import Plain
from outrider.train.attention import causal_attend
from outrider.train.frozen import Features
from outrider.train.losses import Divergence, divergence
from outrider.train.unroll import Unroll

__all__ = ["DraftStudent", "EagleStudent", "MedusaStudent", "Student", "initialise", "student_loss"]

_OPS = Plain()
_DECAY = 0.8  # weight of a depth over the one before


class Student(Protocol):
    """A drafter in training."""

    kind: Divergence

    @property
    def depths(self) -> int:
        """Drafted tokens it is trained for at once."""

    @property
    def reach(self) -> int:
        """Most tokens it can draft."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it reads."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """Target ids of its outputs, where they are fewer."""

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        """Hidden rows (B * span, width) of each depth."""

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(N, outputs) of hidden rows at a depth."""


def student_loss(student: Student, features: Features, lean: bool = False) -> Tensor:
    """Divergence from the target at every depth, later ones weighing less.

    `lean` keeps one depth's logits at a time, for runs without a compiler that would do the same.
    """
    depths = student.depths
    span, ids = features.span(depths), student.vocab_ids
    total = torch.zeros((), device=features.tokens.device)
    with torch.autocast("cuda", torch.bfloat16, enabled=features.tokens.is_cuda):
        for depth, hidden in enumerate(student.chain(features, depths)):
            target, counted = features.cut(features.logits, depth + 1, span), None
            if ids is not None:  # positions whose best token cannot be proposed teach nothing
                counted = torch.isin(target.argmax(-1), ids).float()
                target = target[:, ids]
            part = partial(_depth_loss, student, depth, target, counted)
            total = total + _DECAY**depth * (checkpoint(part, hidden, use_reentrant=False) if lean else part(hidden))
    return total / sum(_DECAY**depth for depth in range(depths))


def _depth_loss(student: Student, depth: int, target: Tensor, counted: Tensor | None, hidden: Tensor) -> Tensor:
    return divergence(student.kind, target, student.logits(hidden, depth), counted)


@dataclass(slots=True)
class DraftStudent:
    """A smaller model of the same vocabulary."""

    module: Decoder
    kind: Divergence = "mix"
    depths: int = 1  # every position is a first one to a model that reads text
    reach: int = 64
    taps: tuple[int, ...] = ()
    vocab_ids: Tensor | None = None

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        rows, length = features.tokens.shape
        positions = torch.arange(length, device=features.tokens.device).repeat(rows)
        last = self.module(features.tokens.reshape(-1), positions, causal_attend(rows, length), _OPS).last
        return [features.cut(last, depth + 1, features.span(depths)) for depth in range(depths)]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:  # noqa: ARG002 (one matrix for all)
        return self.module.logits(hidden, _OPS)


@dataclass(slots=True)
class EagleStudent:
    """An EAGLE head, unrolled."""

    module: EagleHead
    kind: Divergence = "mix"
    depths: int = 6
    reach: int = 64
    fast: bool = False  # the fused kernel of `unroll`

    @property
    def taps(self) -> tuple[int, ...]:
        return self.module.config.taps

    @property
    def vocab_ids(self) -> Tensor | None:
        return self.module.vocab_ids

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        span, rows = features.span(depths), features.tokens.shape[0]
        unroll = Unroll(rows, span, self.fast)
        read = torch.cat([features.cut(features.taps[tap], 0, span) for tap in self.taps], dim=-1)
        feature = self.module.fuse(read, _OPS)
        places = torch.arange(span, device=read.device).repeat(rows)
        hidden: list[Tensor] = []
        for depth in range(depths):
            tokens = features.tokens[:, depth + 1 : depth + 1 + span].reshape(-1)
            feature = self.module(tokens, feature, places + depth, unroll.attend, _OPS)
            hidden.append(feature)
        return hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:  # noqa: ARG002 (one matrix for all)
        return self.module.logits(hidden, _OPS)


@dataclass(slots=True)
class MedusaStudent:
    """Medusa heads; head k drafts depth k - 1."""

    module: MedusaHeads
    kind: Divergence = "kl"
    vocab_ids: Tensor | None = None

    @property
    def depths(self) -> int:
        return self.module.config.heads

    @property
    def reach(self) -> int:
        return self.module.config.heads

    @property
    def taps(self) -> tuple[int, ...]:
        return self.module.config.taps

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        (tap,) = self.taps
        last = self.module.fuse(features.cut(features.taps[tap], 0, features.span(depths)), _OPS)
        return [self.module.hidden(last, head, _OPS) for head in range(depths)]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.module.logits(hidden, depth, _OPS)


def initialise(module: nn.Module, seed: int) -> None:
    """Fresh weights: small normals, zero where a sublayer joins the residual stream, norms at one.

    Own embeddings and outputs are small normals too; whoever has better ones copies them afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last in ("out", "down") or name.startswith("weights."):
                param.zero_()
            elif param.dim() > 1:
                std = 0.02 if last in ("embedding", "output") else 0.5 / math.sqrt(param.shape[-1])
                param.copy_(torch.randn(param.shape, generator=generator) * std)
