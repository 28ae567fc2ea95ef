"""The networks being trained, behind one protocol: a draft model, an EAGLE head, Medusa heads.

Row r of a text is a draft that starts when the features of position r and the token at r + 1 are known. Its depth j (from 0)
predicts the token at r + j + 2, whose distribution is the target's at r + j + 1. The tokens are those of the text (teacher
forcing). The features are the target's at depth 0 and the drafter's at later depths.
"""

from __future__ import annotations

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

__all__ = ["DraftModelNetwork", "DraftNetwork", "EagleNetwork", "MedusaNetwork", "network_loss"]

_OPS = Plain()
_DECAY = 0.8  # weight of a depth over the one before


class DraftNetwork(Protocol):
    """A drafter being trained."""

    kind: Divergence

    @property
    def depths(self) -> int:
        """Drafted tokens it is trained for at once."""

    @property
    def reach(self) -> int:
        """The largest number of tokens it can draft."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters are trained."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers it reads."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """Target ids of its outputs, where its vocabulary is reduced."""

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        """Hidden rows (B * span, width) of each depth."""

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(N, outputs) of hidden rows at a depth."""


def network_loss(network: DraftNetwork, features: Features, lean: bool = False) -> Tensor:
    """Divergence from the target at every depth, later ones weighing less.

    `lean` keeps the logits of one depth at a time, as a compiler would, for runs without one.
    """
    depths = network.depths
    span, ids = features.span(depths), network.vocab_ids
    total = torch.zeros((), device=features.tokens.device)
    with torch.autocast("cuda", torch.bfloat16, enabled=features.tokens.is_cuda):
        for depth, hidden in enumerate(network.chain(features, depths)):
            target, counted = features.cut(features.logits, depth + 1, span), None
            if ids is not None:  # positions whose best token is outside the reduced vocabulary do not count
                counted = torch.isin(target.argmax(-1), ids).float()
                target = target[:, ids]
            part = partial(_depth_loss, network, depth, target, counted)
            total = total + _DECAY**depth * (checkpoint(part, hidden, use_reentrant=False) if lean else part(hidden))
    return total / sum(_DECAY**depth for depth in range(depths))


def _depth_loss(network: DraftNetwork, depth: int, target: Tensor, counted: Tensor | None, hidden: Tensor) -> Tensor:
    return divergence(network.kind, target, network.logits(hidden, depth), counted)


@dataclass(slots=True)
class DraftModelNetwork:
    """A smaller model of the same vocabulary."""

    module: Decoder
    kind: Divergence = "mix"
    depths: int = 1  # a model that reads text is trained at depth 0 of every position
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
class EagleNetwork:
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
class MedusaNetwork:
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
