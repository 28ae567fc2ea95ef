"""Block drafters beside a target on a GPU, run by the target's kernels: what they read and a block are one replay.

The rows of a block lie in the slots after the text. Where they see each other both ways, attention is told that each of them
stands at the block's end. The best tokens of every slot, and how they follow each other, are worked out on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.heads.block import BlockHead
from outrider.heads.block_runner import BlockCandidates
from outrider.heads.cuda_network import DeviceNetwork, KernelOps, move_to_target
from outrider.model import Feed
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaLayer, CudaRows, norm_on, turns_of
from outrider.model.cuda_runner import CudaRunner, split_feeds
from outrider.model.cuda_stack import CudaPool, kernel_shape
from outrider.model.decoder import RopeTable
from outrider.ops.cuda.launch import AttentionMetadata, Kernels, RowNorm
from outrider.ops.cuda.tree_launch import rank_rows
from outrider.sampling import Row

__all__ = ["CudaBlockRunner"]

_MAX_ROWS = 512  # of blocks in one replay


class CudaBlockRunner:
    """A block drafter over its layers of KV, on its target's device."""

    def __init__(self, head: BlockHead, target: CudaRunner) -> None:
        c = head.config.shape
        self.head = head
        self._target = target
        kernels = self._kernels = Kernels(kernel_shape(c, target.pool.page_size), target.cuda.dtype)
        self._ops = KernelOps(kernels)
        self._pool = CudaPool(kernels, c.depth, target.pool.pages, target.device)
        positions = head.positions + 2 * head.config.block  # rows of padding stand there too
        move_to_target(head, target, {"embedding": target.cuda.embedding, "output": target.cuda.output})
        tables = {rope: turns_of(RopeTable(rope, c.head_dim, positions), target.device) for rope in c.ropes}
        ropes = [layer.attention.rope for layer in c.layers]
        self._layers = [
            CudaLayer(layer, kernels, target.device, None if rope is None else tables[rope])  # type: ignore[arg-type]
            for layer, rope in zip(head.layers, ropes, strict=True)
        ]
        norm = norm_on(target.device, c.norm, head.norm, None)
        self._afters = [*(layer.norm_in for layer in self._layers[1:]), norm]  # what follows each layer
        self._embedding_scale = 1.0 if head.config.own_embedding else head.target.embedding_scale
        self._reading = DeviceNetwork("a block drafter's features", target, self._read)
        self._blocks: dict[tuple[int, int, int], DeviceNetwork] = {}

    @torch.inference_mode()
    def candidates(
        self, feeds: Sequence[Feed], rows: Sequence[Row], count: int, reads: tuple[Sequence[Feed], Tensor | None]
    ) -> BlockCandidates:
        """Take in the features of `reads`, then guess blocks of one length: the `count` best tokens of every slot.

        `rows` are of every guess, those of a block side by side.
        """
        length, slots = len(feeds[0].tokens), len(rows) // len(feeds)
        unread, taps = reads
        parts, size = [], max(_MAX_ROWS // length, 1)
        for i in range(0, len(feeds), size):
            some = feeds[i : i + size]
            batch = bucket(len(some), GRAPH_ROWS)
            if taps is not None:
                unread, taps = self._read_all_but(batch * length, unread, taps)
            parts.append(self._guess(some, rows[i * slots : (i + size) * slots], count, batch, (unread, taps)))
            unread, taps = (), None
        tokens, chances, scores, confidence = (torch.cat(part) for part in zip(*parts, strict=True))
        c = self.head
        return BlockCandidates(
            tokens.numpy(), chances.numpy(), None if c.pairs is None else scores.numpy(),
            None if c.confidence is None else confidence.numpy(),
        )  # fmt: skip

    def _read_all_but(self, rows: int, feeds: Sequence[Feed], taps: Tensor) -> tuple[Sequence[Feed], Tensor | None]:
        """Take in features until at most so many rows are left, which are returned."""
        if len(taps) <= rows:
            return feeds, taps
        row = 0
        for part in split_feeds(feeds, GRAPH_ROWS[-1]):
            end = row + sum(len(feed.tokens) for feed in part)
            self._reading(taps[row:end], part)
            row = end
        return (), None

    def _guess(
        self, feeds: Sequence[Feed], rows: Sequence[Row], count: int, batch: int, reads: tuple[Sequence[Feed], Tensor | None]
    ) -> list[Tensor]:
        """One replay: tokens, chances, scores of pairs and confidence of every slot, on the host."""
        length, head = len(feeds[0].tokens), self.head
        key = batch, length, min(count, head.config.outputs)
        if key not in self._blocks:
            work = partial(self._guesses, batch=batch, length=length, count=key[2])
            self._blocks[key] = DeviceNetwork(f"blocks of {length} rows", self._target, work)
        idle = [feeds[0]._replace(pages=[self._target.pool.pages - 1] * len(feeds[0].pages))] * (batch - len(feeds))
        unread, taps = reads
        taps = torch.zeros(0, head.fc.shape[1], device=self._target.device) if taps is None else taps
        packed = self._blocks[key].launch(taps, [*feeds, *idle, *unread], rows, 2 * batch * length)()
        return self._unpacked(packed[: len(rows)], key[2])

    def _unpacked(self, packed: Tensor, count: int) -> list[Tensor]:
        """Tokens and chances (N, count), scores of pairs (N, count, count), confidence (N, count); empty where not known."""
        pairs, confidence = self.head.pairs is not None, self.head.confidence is not None
        tokens, chances, scores, trust = torch.split(packed, [count, count, count * count * pairs, count * confidence], -1)
        return [tokens.long(), chances.double(), scores.double().reshape(len(scores), -1, count), trust.double()]

    # --- on the device -------------------------------------------------------------------------------------------------

    def _read(self, taps: Tensor, meta: AttentionMetadata) -> Tensor:
        """Write what the layers attend to in the text."""
        features = self.head.fuse(taps, self._ops).to(self._kernels.dtype)
        for i, layer in enumerate(self._layers):
            layer.attention.place(features, meta, self._kv(i))
        return features

    def _guesses(self, taps: Tensor, meta: AttentionMetadata, batch: int, length: int, count: int) -> Tensor:
        """(N, numbers) of every slot, as `_unpacked` reads them. Rows of blocks come first, then rows that are read."""
        head, blocks = self.head, meta.rows(slice(0, batch * length))
        rows = head.guessing(self._run(taps, meta, blocks, length), length).flatten(0, 1).contiguous()
        logits, slots = self.scores(rows, blocks.tokens.view(batch, length)), len(rows) // batch
        lag = 0 if head.config.from_anchor else 1  # a masked row guesses its own place, and noise is that of the place after
        positions = head.guessing(blocks.positions[:, None] - lag, length).flatten().contiguous()
        sampling = meta.temperatures[: len(rows)], meta.prefixes[: len(rows)], positions
        if head.pairs is not None and head.pairs.projection is None:
            logits = self._led(logits, blocks.tokens.view(batch, length)[:, 0], rows, sampling)
        tokens, chances = rank_rows(logits, head.vocab_ids, sampling, count)
        parts = [tokens.float(), chances]  # ids below 2^24 are exact
        if head.pairs is not None:
            newest = blocks.tokens.view(batch, length)[:, :1, None].expand(-1, 1, count)
            before = torch.cat((newest, tokens.view(batch, slots, count)[:, :-1]), 1).flatten(0, 1).long().clamp_min(0)
            known = head.pairs.before(before, rows, self._ops)
            scores = head.pairs.of_candidates(known, self._outputs(tokens.long().clamp_min(0)))
            if head.pairs.projection is None:
                scores = scores - scores[:, :1]  # logits have the scores after the best token of the slot before
            heat = torch.where(sampling[0] > 0, sampling[0], 1.0)
            parts.append((scores / heat[:, None, None]).flatten(1))
            if head.confidence is not None:
                read = rows.float()[:, None].expand(-1, count, -1)
                parts.append(head.confidence(torch.cat((read, known), -1) if head.config.confidence_of_pair else read))
        return torch.cat(parts, -1)

    def _led(self, logits: Tensor, newest: Tensor, rows: Tensor, sampling: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Logits with the scores of pairs, each slot after the best token of the slot before; see `BlockDrafter`."""
        head, slots, before = self.head, len(logits) // len(newest), newest.long()
        assert head.pairs is not None
        led = []
        for slot in range(slots):
            part = slice(slot, None, slots)
            scores = head.pairs.before(before, rows[part], self._ops) @ head.pairs.right.float().T
            led.append((logits[part] + scores).contiguous())
            temperatures, prefixes, positions = (one[part].contiguous() for one in sampling)
            best, _ = rank_rows(led[-1], head.vocab_ids, (temperatures, prefixes, positions), 1)
            before = best[:, 0].long().clamp_min(0)
        return torch.stack(led, 1).flatten(0, 1)

    def scores(self, rows: Tensor, blocks: Tensor) -> Tensor:  # noqa: ARG002 (a benchmark plants what blocks guess)
        """Logits (N, outputs) of guessing rows, of blocks with these tokens (batch, length)."""
        return self.head.logits(rows, self._ops)

    def _run(self, taps: Tensor, meta: AttentionMetadata, blocks: AttentionMetadata, length: int) -> Tensor:
        """Rows of blocks after the last norm; `BlockHead.forward` is the reference."""
        k, head = self._kernels, self.head
        features = head.fuse(taps[: len(meta.tokens) - len(blocks.tokens)], self._ops).to(k.dtype)
        seen = CudaRows(blocks if head.config.causal else _both_ways(blocks, length)).for_forward()
        stream, read = k.embed(blocks, head.embedding, self._layers[0].norm_in, self._embedding_scale)
        for i, (layer, after) in enumerate(zip(self._layers, self._afters, strict=True)):
            if head.convolutions:
                read = self._convolved(i, read, stream, after, (features, meta, seen, length))
                continue
            q = layer.attention.place(torch.cat((read, features)), meta, self._kv(i))[: len(read)]
            read = layer.after_mixer(layer.attention.attend(q, seen, self._kv(i)), read, stream, after)
        return read

    def _convolved(
        self, i: int, read: Tensor, stream: Tensor, after: RowNorm | None, rows: tuple[Tensor, AttentionMetadata, CudaRows, int]
    ) -> Tensor:
        """A layer with convolutions around attention and feed-forward part, added to the stream; returns its norm `after`."""
        features, meta, seen, length = rows
        k, layer, dtype = self._kernels, self._layers[i], self._kernels.dtype
        first, second = self.head.convolutions[2 * i], self.head.convolutions[2 * i + 1]
        read, kernels = first.open(read.float(), length, self._ops)  # type: ignore[operator]
        q = layer.attention.place(torch.cat((read.to(dtype), features)), meta, self._kv(i))[: len(read)]
        mixed = _summed(layer.attention.attend(q, seen, self._kv(i)), layer.mixer.bias)
        stream += first.close(mixed, kernels, length)  # type: ignore[operator]
        read, kernels = second.open(k.norm(stream, layer.norm_mlp).float(), length, self._ops)  # type: ignore[operator]
        made = _summed(layer.mlp.forward(read.to(dtype)), layer.mlp.bias)
        stream += second.close(made, kernels, length)  # type: ignore[operator]
        return k.norm(stream, after)

    def _outputs(self, tokens: Tensor) -> Tensor:
        """Numbers of the head's outputs for target ids."""
        ids = self.head.vocab_ids
        return tokens if ids is None else torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)

    def _kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.keys[layer], self._pool.values[layer]


def _both_ways(blocks: AttentionMetadata, length: int) -> AttentionMetadata:
    """The rows of blocks as they see keys: all of their block."""
    ends = blocks.positions.view(-1, length)[:, -1:].expand(-1, length).flatten().contiguous()  # one block alone is a view
    return replace(blocks, positions=ends, roots=ends)


def _summed(parts: Tensor, bias: Tensor | None) -> Tensor:
    total = parts.float().sum(0)
    return total if bias is None else total + bias.float()
