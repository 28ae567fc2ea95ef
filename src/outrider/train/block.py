"""A block drafter being trained: blocks that start at some places of a text, all in one pass.

Block s starts when the features of positions up to s and the token at s + 1 are known. Its guess j (from 0) is of the token at
s + j + 2, whose distribution is the target's at s + j + 1. The scores of pairs read the text's tokens (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.heads import BlockHead, KeyValue, SaveOptions, in_block, load_block, save_block
from outrider.model import Attend, Decoder
from outrider.ops import Plain
from outrider.train.frozen import Features
from outrider.train.losses import divergence
from outrider.train.networks import TrainableDrafter
from outrider.train.sizing import autocast

__all__ = ["TrainableBlock"]

_OPS = Plain()
_AT_ONCE = 128  # blocks of a text computed together in figures
_LEAST = 0.1  # added to a chance of survival: no guess is given up


@dataclass(slots=True)
class TrainableBlock(TrainableDrafter):
    """A block drafter. `blocks` start in each row of text, evenly spread from a place that differs from batch to batch."""

    module: BlockHead
    blocks: int = 64
    fade: float = 7.0  # guess j weighs exp(-j / fade)
    survival: float = 0.0  # and the chance that the guesses before it are accepted, to this power
    skip: int = 0  # first positions of a text where no block starts
    confidence_weight: float = 0.2

    def __post_init__(self) -> None:
        self.depths = self.reach = self.module.config.guesses

    @property
    def vocab_ids(self) -> Tensor | None:
        return self.module.vocab_ids

    @property
    def drafted(self) -> int:
        return self.reach

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        starts = torch.arange(features.span(depths), device=features.tokens.device)
        rows = torch.cat([self._rows(features, part, depths) for part in torch.split(starts, _AT_ONCE)], 1)
        return [rows[:, :, depth].flatten(0, 1) for depth in range(depths)]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:  # noqa: ARG002 (one matrix for all depths)
        """Of rows as `chain` gives them: the head's, and what the pair scores make of the token before."""
        width = self.module.config.shape.hidden
        logits = self.module.logits(hidden[:, :width], _OPS)
        pairs = self.module.pairs
        return logits if pairs is None else logits + pairs.of_all(hidden[:, width:], _OPS)

    def loss(self, features: Features, lean: bool = False) -> Tensor:  # noqa: ARG002 (one matrix of logits)
        guesses, device = self.module.config.guesses, features.tokens.device
        starts = self._starts(features)
        with autocast(device):
            rows = self._rows(features, starts, guesses)
            places = starts[:, None] + 1 + torch.arange(guesses, device=device)
            count, length = features.tokens.shape
            target = features.logits.view(count, length, -1)[:, places].flatten(0, 2)
            weights = torch.exp(-torch.arange(guesses, device=device) / self.fade).repeat(count * len(starts))
            if (ids := self.vocab_ids) is not None:  # positions whose best token is outside the reduced vocabulary do not count
                weights = weights * torch.isin(target.argmax(-1), ids)
                target = target[:, ids]
            flat = rows.flatten(0, 2)
            logits = self.logits(flat, 0)
            # the chance that a guess is accepted is the overlap of both distributions
            overlap = torch.minimum(target.float().softmax(-1), logits.detach().float().softmax(-1)).sum(-1).clamp(0.0, 1.0)
            if self.survival:
                before = overlap.view(-1, guesses).roll(1, 1).index_fill(1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
                weights = weights * (before.cumprod(1).flatten() + _LEAST) ** self.survival
            total = divergence(self.kind, target, logits, weights, guesses)
            if self.module.confidence is not None:
                total = total + self.confidence_weight * self._confidence_loss(flat, overlap)
        return total

    def _confidence_loss(self, rows: Tensor, overlap: Tensor) -> Tensor:
        """Cross-entropy against the chance of acceptance."""
        assert self.module.confidence is not None
        read = rows if self.module.config.confidence_of_pair else rows[:, : self.module.config.shape.hidden]
        with torch.autocast(rows.device.type, enabled=False):
            return torch.nn.functional.binary_cross_entropy(self.module.confidence(read), overlap)

    def _starts(self, features: Features) -> Tensor:
        """Where blocks start, the same in all rows of the batch and a function of its tokens, without a value for the host."""
        span = features.tokens.shape[1] - self.module.config.guesses - 1
        skip = min(self.skip, span - 1)
        step = max((span - skip) // self.blocks, 1)
        count = min(self.blocks, (span - skip) // step)
        return skip + features.tokens.sum() % step + step * torch.arange(count, device=features.tokens.device)

    def _rows(self, features: Features, starts: Tensor, guesses: int) -> Tensor:
        """Rows (B, blocks, guesses, hidden) that guess, beside them what the pair scores read of the token before."""
        head, tokens = self.module, features.tokens
        config, count = head.config, features.tokens.shape[0]
        length = guesses if config.from_anchor else guesses + 1
        context = head.keys_values(
            head.fuse(torch.cat([features.taps[tap] for tap in self.taps], -1), _OPS),
            torch.arange(tokens.shape[1], device=tokens.device).repeat(count),
            _OPS,
        )
        places = starts[:, None] + 1 + torch.arange(length, device=tokens.device)
        attend = _attend(context, count, starts, length, config.causal)
        ids = head.tokens(tokens[:, starts + 1].flatten(), length)
        rows: Tensor = head(ids, places.flatten().repeat(count), length, attend, _OPS)
        rows = _unfold(head.guessing(rows, length), count)
        if head.pairs is None:
            return rows
        before = tokens[:, starts[:, None] + 1 + torch.arange(guesses, device=tokens.device)]
        return torch.cat((rows, head.pairs.before(before, rows, _OPS).to(rows.dtype)), -1)

    def save(self, folder: Path, tokenizer: Path) -> None:  # noqa: ARG002 (it is the target's)
        save_block(self.module, folder, SaveOptions("dflash", int8=True))

    def load(self, folder: Path, target: Decoder) -> BlockHead:
        return load_block(folder, target)


def _attend(context: list[KeyValue], count: int, starts: Tensor, length: int, causal: bool) -> Attend:
    """Attention of blocks over the texts up to their starts, and over themselves. `context` has each layer's keys and values."""
    seen = torch.arange(context[0].keys.shape[0] // count, device=starts.device) <= starts[:, None]  # (blocks, T)
    within = in_block(length, causal, starts.device)
    blocks = len(starts)
    mask = torch.cat((seen[:, None].expand(-1, length, -1), within.expand(blocks, -1, -1)), -1)  # (blocks, length, T + length)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, width = q.shape[1:]
        group = heads // k.shape[1]
        text = [_unfold(part, count).repeat_interleave(group, 2).transpose(1, 2) for part in context[layer]]
        fold = partial(_by_block, count=count, blocks=blocks)
        query, key, value = fold(q, 1), fold(k, group), fold(v, group)  # (B, H, blocks, length, d)
        far = query.flatten(2, 3) @ text[0].transpose(-1, -2)
        near = query @ key.transpose(-1, -2)
        scores = torch.cat((far.view(*near.shape[:-1], -1), near), -1) * width**-0.5
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), -1).to(value.dtype)
        split = text[1].shape[2]
        far = weights[..., :split].flatten(2, 3) @ text[1]
        mixed: Tensor = far.view(value.shape) + weights[..., split:] @ value
        return mixed.permute(0, 2, 3, 1, 4).reshape(-1, heads, width)

    return attend


def _by_block(x: Tensor, repeat: int, count: int, blocks: int) -> Tensor:
    """(B, H, blocks, length, d) of rows (B * blocks * length, heads, d), heads repeated."""
    return x.view(count, blocks, -1, *x.shape[1:]).repeat_interleave(repeat, 3).permute(0, 3, 1, 2, 4)


def _unfold(x: Tensor, count: int) -> Tensor:
    """The first dimension as that of `count` texts and one within them."""
    return x.view(count, -1, *x.shape[1:])
