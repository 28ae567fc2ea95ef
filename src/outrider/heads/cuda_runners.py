"""Heads beside a target on a GPU, run by the target's kernels in graphs.

Taps and features stay on the device. A draft, chain or tree, is one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.core import FutureTokens
from outrider.heads.cuda_network import DeviceNetwork, KernelOps, move_to_target
from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.heads.runners import DraftedChains
from outrider.model import Feed, Growth
from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_early import draw_chain
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaLayer, CudaRows, norm_on, turns_of
from outrider.model.cuda_runner import CudaRunner, split_feeds
from outrider.model.cuda_stack import EXTRA_POSITIONS, CudaPool, kernel_shape
from outrider.model.cuda_trees import PendingTrees, Prepare, Trees, newest_first, split_newest, takes_at_once, text_rows
from outrider.model.decoder import RopeTable
from outrider.model.runner import Chances, PendingChains, Tokens
from outrider.ops import GrownTree
from outrider.ops.cuda.launch import AttentionMetadata, Kernels
from outrider.ops.cuda.tree_launch import GrowingTrees
from outrider.ops.cuda.tree_sizes import TreeSizes
from outrider.sampling import Row

__all__ = ["CudaEagleRunner", "CudaMedusaRunner"]


class CudaEagleRunner:
    """An EAGLE head over its layer of KV, on its target's device."""

    drafts_chains = CHAIN_LENGTHS[-1]
    grows_trees = True
    applies_parameters = False  # other parameters would cost the launches of a forward for each level

    def __init__(self, head: EagleHead, target: CudaRunner) -> None:
        c = head.config.shape
        self.head = head
        self.positions = c.context
        self._target = target
        kernels = self._kernels = Kernels(kernel_shape(c, target.pool.page_size), target.cuda.dtype)
        self._ops = KernelOps(kernels)
        self._pool = CudaPool(kernels, 1, target.pool.pages, target.device)
        ids = head.vocab_ids  # read on the host
        move_to_target(head, target, {"embedding": target.cuda.embedding, "output": target.cuda.output})
        self._ids, head.vocab_ids = head.vocab_ids, ids
        table = RopeTable(c.ropes[0], c.head_dim, c.context + EXTRA_POSITIONS)
        # row i lies in slot i + 1, beside its token, and carries the rotary position i
        self._layer = CudaLayer(head.layer, kernels, target.device, turns_of(table, target.device, lag=1))
        self._norm = norm_on(target.device, c.norm, head.norm, None) if head.config.norm_output else None
        norm, embedding_norm, feature_norm = c.layers[0].norm_in, self._layer.norm_in, head.layer.norm_hidden
        if head.config.joins_normed:
            norm, feature_norm = c.norm, head.norm_feature
            embedding_norm = norm_on(target.device, c.norm, head.norm_embedding, None)
        self._norm_embedding = embedding_norm
        self._norm_feature = None if feature_norm is None else norm_on(target.device, norm, feature_norm, None)
        is_target_embedding = not head.config.own_embedding
        self._embedding_scale = head.target.embedding_scale if is_target_embedding else 1.0
        self._fuse = DeviceNetwork("EAGLE's features", target, lambda rows, _: head.fuse(rows, self._ops))
        self._forward = DeviceNetwork("EAGLE", target, self._run)
        self._logits = DeviceNetwork("EAGLE's logits", target, lambda rows, _: head.logits(rows, self._ops))
        self._chains: dict[tuple[int, int], DeviceNetwork] = {}
        self._trees = Trees("EAGLE", target, self._levels)
        self._taps: dict[TreeSizes, Tensor] = {}

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """Features (N, hidden) of the target's taps (N, taps * target_hidden)."""
        taps = taps.to(self._target.device)
        if len(taps) > GRAPH_ROWS[-1]:
            return self.head.fuse(taps, self._ops)
        return self._fuse(taps)[: len(taps)].clone()

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], features: Tensor) -> Tensor:
        """Hidden rows of (feature, next token) pairs, with their KV written."""
        out, row = [], 0
        for part in split_feeds(feeds, GRAPH_ROWS[-1]):
            end = row + sum(len(feed.tokens) + len(feed.nodes) for feed in part)
            out.append(self._forward(features[row:end], part)[: end - row].clone())
            row = end
        return torch.cat(out)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(N, outputs) float32, on the host."""
        return torch.cat([self._logits(part)[: len(part)].cpu() for part in torch.split(hidden, GRAPH_ROWS[-1])])

    @torch.inference_mode()
    def draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> DraftedChains:
        """Draft a chain after each feed by one replay: tokens and chances (feeds, length). There is no draft temperature."""
        max_batch = GRAPH_ROWS[-1]
        tokens: Tokens = []
        chances: Chances = []
        for i in range(0, len(feeds), max_batch):
            part = slice(i, i + max_batch)
            drawn = self.launch_chains(feeds[part], taps[part], rows[part], length).resolve()
            tokens += drawn[0]
            chances += drawn[1]
        return DraftedChains(np.array(tokens), np.array(chances))

    def launches_chains(self, count: int) -> bool:
        """Whether `launch_chains` takes so many."""
        return count <= GRAPH_ROWS[-1]

    @torch.inference_mode()
    def launch_chains(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int
    ) -> PendingChains:  # fmt: skip
        """What `draft` does, without waiting. The target may read the tokens in the future-token buffer."""
        batch, target, count = bucket(len(feeds), GRAPH_ROWS), self._target, len(feeds)
        captured = sorted(tokens for sequences, tokens in self._chains if sequences == batch and tokens >= length)
        longest = captured[0] if captured else bucket(length, CHAIN_LENGTHS)
        if (batch, longest) not in self._chains:
            work = partial(self._chain, batch=batch, length=longest)
            self._chains[batch, longest] = DeviceNetwork(f"EAGLE's draft of {longest}", target, work)
        max_tokens = longest + 1  # tokens a round can commit
        ordered, tap_rows = self._newest_first(feeds, taps, batch, max_tokens)
        wait = self._chains[batch, longest].launch(tap_rows, ordered, rows, batch * max_tokens)
        drawn = target.drawn = object()

        def resolve() -> tuple[Tokens, Chances]:
            tokens, chances = wait()[:, :length, :count]
            return tokens.T.long().tolist(), chances.T.double().tolist()

        return PendingChains([FutureTokens(b, length, batch) for b in range(count)], resolve, lambda: target.drawn is drawn)

    def _newest_first(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], batch: int, max_tokens: int
    ) -> tuple[list[Feed], Tensor]:  # fmt: skip
        """The last tokens of every feed with their taps: the newest ones of `batch` sequences, then the others.

        Those before the last `max_tokens` are fed by themselves.
        """
        early, recent = split_newest(feeds, max_tokens)
        self._read_early(early, taps)
        taps = [rows_of_seq[-len(feed.tokens) :] for rows_of_seq, feed in zip(taps, recent, strict=True)]
        ordered = newest_first(recent, batch, self._target.pool.pages - 1)
        filling = taps[0].new_zeros(batch - len(feeds), taps[0].shape[1])
        return ordered, torch.cat([*(rows[-1:] for rows in taps), filling, *(rows[:-1] for rows in taps)])

    def _read_early(self, early: Sequence[Feed], taps: Sequence[Tensor]) -> None:
        """Run the head on tokens with the first of the taps."""
        if any(feed.tokens for feed in early):
            tap_rows = torch.cat([rows_of_seq[: len(feed.tokens)] for rows_of_seq, feed in zip(taps, early, strict=True)])
            self.forward([feed for feed in early if feed.tokens], self.fuse(tap_rows))

    @torch.inference_mode()
    def grow(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], rooms: Sequence[int],
        draft_temperatures: Sequence[float], growth: Growth,  # noqa: ARG002 (there is no draft temperature)
    ) -> tuple[list[GrownTree], None]:  # fmt: skip
        """Run the feeds and grow a tree after each by one replay, by temperature and noise alone.

        Returns no trees where logits leave no choice.
        """
        return self._trees.grow(feeds, rows, rooms, growth, self._preparing(taps)), None

    def launches_trees(self, rows: int, count: int, growth: Growth) -> bool:
        """Whether `launch_trees` takes so many trees, for a forward of the target of so many rows."""
        if self._target.decoder.spec.recurrent:  # the host lays out along which branch its states go
            return False
        return rows <= self._target.options.max_graph_rows and takes_at_once(count, growth)

    @torch.inference_mode()
    def launch_trees(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], places: Sequence[tuple[int, int]],
        growth: Growth,
    ) -> PendingTrees:  # fmt: skip
        """What `grow` does, without waiting: see `Trees.launch`."""
        return self._trees.launch(feeds, rows, places, growth, self._preparing(taps))

    def _preparing(self, taps: Sequence[Tensor]) -> Prepare:
        """What runs the head on early tokens, and puts the taps of the others where a graph reads them."""

        def prepare(part: slice, early: Sequence[Feed], sizes: TreeSizes) -> None:
            some, batch, max_tokens = taps[part], sizes.batch, sizes.levels + 1
            self._read_early(early, some)
            recent, buffer = [rows_of_seq[-max_tokens:] for rows_of_seq in some], self._tap_rows(sizes)
            newest, older = torch.cat([part[-1:] for part in recent]), torch.cat([part[:-1] for part in recent])
            buffer[: len(newest)].copy_(newest)
            buffer[batch : batch + len(older)].copy_(older)

        return prepare

    def _tap_rows(self, sizes: TreeSizes) -> Tensor:
        """The taps of the rows that trees of these sizes begin with."""
        if sizes not in self._taps:
            rows, width = text_rows(sizes), self.head.config.target_hidden * len(self.head.config.taps)
            self._taps[sizes] = torch.zeros(rows, width, device=self._target.device)
        return self._taps[sizes]

    def _levels(self, trees: GrowingTrees, meta: AttentionMetadata) -> None:
        """All levels of trees; the first rows are the newest tokens."""
        features, levels = self.head.fuse(self._tap_rows(trees.sizes), self._ops), trees.sizes.levels
        for level in range(levels):
            rows = trees.rows(level)
            hidden = self._run(features, rows if level else meta)[: len(rows.tokens)]
            trees.add(level, self.scores(hidden, rows), self._ids)
            if level + 1 < levels:
                features = hidden.index_select(0, trees.expand(level))

    def _chain(self, taps: Tensor, meta: AttentionMetadata, batch: int, length: int) -> Tensor:
        """Tokens and chances (2, length, batch) of a draft; rows 0..batch-1 are the newest tokens."""
        features = self.head.fuse(taps, self._ops)

        def logits_after(rows: AttentionMetadata) -> Tensor:
            nonlocal features
            features = self._run(features, rows)[:batch]
            return self.scores(features, rows.rows(slice(0, batch)))

        drawn = self._target.future_tokens[: length * batch].view(length, batch)
        return draw_chain(self._kernels, meta, drawn, logits_after, self._ids)

    def scores(self, hidden: Tensor, rows: AttentionMetadata) -> Tensor:  # noqa: ARG002 (a benchmark plants what rows guess)
        """Logits (N, outputs) of what the head gives for some rows."""
        return self.head.logits(hidden, self._ops)

    def _run(self, features: Tensor, meta: AttentionMetadata) -> Tensor:
        """The head's forward by kernels; `EagleHead.forward` is the reference."""
        k, head, c = self._kernels, self.head, self.head.config
        features = features.contiguous()
        embedded, read = k.embed(meta, head.embedding, self._norm_embedding, self._embedding_scale)
        if c.wide:
            feature = k.norm(features, self._norm_feature)
            stream, read = feature.float() if c.norm_before_residual else features.clone(), torch.cat((read, feature), -1)
        elif c.joins_normed:
            pair = torch.cat((read, k.norm(features, self._norm_feature)), -1)
            stream = self._ops.linear(pair, head.fc, head.fc_bias)
            read = k.norm(stream, self._layer.norm_in)
        else:
            stream = self._ops.linear(torch.cat((embedded, features), -1), head.fc, head.fc_bias)
            read = stream.to(k.dtype)
        hidden = self._layer.forward(read, stream, self._norm, CudaRows(meta), (self._pool.keys[0], self._pool.values[0]))
        return stream if self._norm is None else hidden.float()


class CudaMedusaRunner:
    """Medusa heads on their target's device."""

    def __init__(self, heads: MedusaHeads, target: CudaRunner) -> None:
        ops = KernelOps(target.cuda.kernels)
        move_to_target(heads, target, {"output": target.cuda.output})
        self._logits = DeviceNetwork("Medusa", target, lambda rows, _: heads(heads.fuse(rows, ops), ops))

    @torch.inference_mode()
    def logits(self, taps: Tensor) -> Tensor:
        """(heads, N, V) float32 on the host, from the stream leaving the target's last layer."""
        return torch.cat([self._logits(part)[:, : len(part)].cpu() for part in torch.split(taps, GRAPH_ROWS[-1])], 1)
