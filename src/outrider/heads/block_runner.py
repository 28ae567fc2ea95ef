"""What runs a block drafter on the CPU: the native core, or torch where the core lacks something."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.heads.block import BlockHead, in_block
from outrider.model import Feed
from outrider.model.load import INT8
from outrider.model.stack import lay_out_rows, layer_stack, logit_epilogue, lossless_kind, norm_weights
from outrider.ops import (
    BLOCK_ROWS,
    KEY_ROWS,
    TEXT_ROWS,
    BlockGuesses,
    BlockParams,
    Core,
    Epilogue,
    Ops,
    PackedLinear,
    Stack,
    StackSpan,
)
from outrider.ops.forwards import network
from outrider.sampling import Row
from outrider.sampling.choice import noise_along, shape_of
from outrider.sampling.noise import token_words

__all__ = ["BlockCandidates", "BlockRanker", "BlockRows", "BlockRunner", "divisors_of"]

_AT_ONCE = 64  # rows of blocks in one call of the core, which runs whole blocks


class BlockRows(NamedTuple):
    """The rows of blocks that guess, those of a block side by side."""

    rows: Tensor  # (N, hidden) after the last norm
    logits: Tensor  # (N, outputs)


class BlockCandidates(NamedTuple):
    """The best tokens of the slots of blocks, those of a block side by side; see draft/lattice.py."""

    tokens: npt.NDArray[np.int64]  # (N, candidates); -1 where the logits leave no choice
    chances: npt.NDArray[np.float64]  # (N, candidates)
    scores: npt.NDArray[np.float64] | None = None  # (N, candidates before, candidates) of pairs, over the draft temperature
    confidence: npt.NDArray[np.float64] | None = None  # (N, candidates before)


class BlockRanker(Protocol):
    """What runs a block drafter on a device, where the best tokens of slots are found too."""

    def candidates(
        self, feeds: Sequence[Feed], rows: Sequence[Row], count: int, reads: tuple[Sequence[Feed], Tensor | None]
    ) -> BlockCandidates:
        """Store what the layers attend to at the places of `reads`, of the target's taps there, then guess the blocks `feeds`.

        By temperature and noise of the `rows` alone, which are of every guess.
        """


class BlockRunner:
    """A block drafter over its layers of KV: slot i holds what is made of the target's features at position i."""

    def __init__(self, head: BlockHead, pool: KVPool, ops: Ops, embedding: PackedLinear | None = None) -> None:
        """With the target's `embedding` as the core has it, the head's is not packed again."""
        self.head = head
        self._pool, self._ops = pool, ops
        self._stack: Stack | None = None
        self.draws_trees = False  # whether `trees` is supported
        if ops.core is not None and head.config.convolution is None:
            self._stack = _stack(head, pool, ops.core, embedding)
            self.draws_trees = head.config.selector is None and head.confidence is None
            self._ids = None if head.vocab_ids is None else head.vocab_ids.int().contiguous()
            words = token_words(head.config.shape.vocab)
            self._words = words if head.vocab_ids is None else words[head.vocab_ids.numpy()]
            pairs = None if head.pairs is None else (head.pairs.left, head.pairs.right.T)
            self._pairs = (None, None) if pairs is None else tuple(part.detach().float().contiguous() for part in pairs)

    @network
    def read(self, feeds: Sequence[Feed], taps: Tensor) -> None:
        """Store what the layers attend to at the feeds' places, of the target's taps (N, taps * target_hidden) there."""
        taps = taps.cpu()
        if self._stack is not None:
            self._stack.forward(lay_out_rows(feeds), span=StackSpan(mode=KEY_ROWS), features=taps.float(), wanted=())
            return
        positions = torch.cat([torch.arange(feed.start, feed.start + len(feed.tokens)) for feed in feeds])
        slots = torch.tensor([
            slot for feed in feeds
            for slot in self._pool.slots(feed.pages, range(feed.start, feed.start + len(feed.tokens)))
        ])  # fmt: skip
        place = slots // self._pool.page_size, slots % self._pool.page_size
        made = self.head.keys_values(self.head.fuse(taps.to(self.head.fc.dtype), self._ops), positions, self._ops)
        for layer, (keys, values) in enumerate(made):
            self._pool.write(layer, place, keys, values)

    @network
    def guess(self, feeds: Sequence[Feed]) -> BlockRows:
        """The guesses of blocks of one length; each feed holds its newest token and masks after it."""
        length, first = len(feeds[0].tokens), 0 if self.head.config.from_anchor else 1
        if self._stack is None:
            return self._guess_in_torch(feeds, length)
        parts, size = [], max(_AT_ONCE // length, 1)
        for begin in range(0, len(feeds), size):
            some = feeds[begin : begin + size]
            wanted = [block * length + row for block in range(len(some)) for row in range(first, length)]
            out = self._stack.forward(lay_out_rows(some), span=self._span, wanted=wanted)
            assert out.last is not None
            assert out.logits is not None
            parts.append(BlockRows(out.last[wanted], out.logits))
        return parts[0] if len(parts) == 1 else BlockRows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @network
    def trees(
        self,
        feeds: Sequence[Feed],
        rows: Sequence[Row],
        rooms: Sequence[int],
        draft_temperatures: Sequence[float],
        candidates: int,
    ) -> BlockGuesses:
        """The best tree over each block in one call, by temperature, filters and noise alone.

        `rows` and draft temperatures are of every guess, those of a block side by side.
        """
        assert self._stack is not None
        slots, length = len(rows) // len(feeds), len(feeds[0].tokens)
        left, right = self._pairs
        trees, logits, size = [], [], max(_AT_ONCE // length, 1)
        for begin in range(0, len(feeds), size):
            some, part = slice(begin, begin + size), slice(begin * slots, (begin + size) * slots)
            temperatures = draft_temperatures[part]
            params = BlockParams(
                slots, min(candidates, self.head.config.outputs),
                rooms=array("i", rooms[some]),
                shapes=array("d", [value for row in rows[part] for value in shape_of(row.params)]),
                draft_temperatures=array("f", temperatures),
                divisors=array("f", divisors_of(rows[part], temperatures)),
                keys=noise_along(rows[part], 1),
                words=self._words.ctypes.data,
                left=left,
                right=right,
                ids=self._ids,
            )  # fmt: skip
            made = self._stack.guess(lay_out_rows(feeds[some]), params, self._span)
            trees += made.trees
            logits.append(made.logits)
        return BlockGuesses(trees, logits[0] if len(logits) == 1 else torch.cat(logits))

    @property
    def _span(self) -> StackSpan:
        return StackSpan(mode=TEXT_ROWS if self.head.config.causal else BLOCK_ROWS)

    def _guess_in_torch(self, feeds: Sequence[Feed], length: int) -> BlockRows:
        head = self.head
        within = in_block(length, head.config.causal, torch.device("cpu"))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            blocks = zip(feeds, *(torch.split(part, length) for part in (q, k, v)), strict=True)
            return torch.cat([self._mix(layer, feed, within, block) for feed, *block in blocks])

        tokens = torch.tensor([token for feed in feeds for token in feed.tokens])
        positions = torch.cat([torch.arange(feed.start, feed.start + length) for feed in feeds])
        rows = head.guessing(head(tokens, positions, length, attend, self._ops), length).flatten(0, 1)
        return BlockRows(rows, head.logits(rows, self._ops))

    def _mix(self, layer: int, feed: Feed, within: Tensor, block: Sequence[Tensor]) -> Tensor:
        """Attention of a block (length, heads, d) over the text before it and itself."""
        q, k, v = block
        size, width = self._pool.page_size, self._pool.head_dim
        pages = list(feed.pages[: -(-feed.start // size)])
        text = [
            part[pages].transpose(1, 2).flatten(0, 1)[feed.first_key : feed.start, :, :width] for part in self._pool.layer(layer)
        ]
        keys, values = (torch.cat(pair).repeat_interleave(q.shape[1] // k.shape[1], 1) for pair in zip(text, (k, v), strict=True))
        seen = torch.cat((within.new_ones(len(within), len(text[0])), within), 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * width**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def divisors_of(rows: Sequence[Row], draft_temperatures: Sequence[float]) -> list[float]:
    """By what the scores of pairs are divided, as logits are."""
    return [row.params.temperature * scale or 1.0 for row, scale in zip(rows, draft_temperatures, strict=True)]


def _stack(head: BlockHead, pool: KVPool, core: Core, embedding: PackedLinear | None) -> Stack:
    c = head.config
    then = Epilogue() if c.own_output else logit_epilogue(head.target)
    return layer_stack(
        pool, core, c.shape, _kind(head), head.layers, head.ropes,  # type: ignore[arg-type]
        embedding=embedding or PackedLinear(core, lossless_kind(head.embedding), head.embedding),
        embedding_scale=1.0 if c.own_embedding else float(head.target.embedding_scale),
        norm=norm_weights(c.shape.norm, head.norm),
        joined=PackedLinear(core, _kind(head), head.fc),
        norm_hidden=norm_weights(c.shape.norm, head.hidden_norm),
        output=PackedLinear(core, _kind(head), head.output, then=then),
    )  # fmt: skip


def _kind(head: BlockHead) -> str:
    """The kind of the head's products: int8 where it was loaded so, else the dtype of its weights."""
    return INT8 if head.config.shape.dtype == INT8 else str(head.fc.dtype).removeprefix("torch.")
