"""Heads beside a target on a GPU, run by the target's kernels in graphs.

Taps and features stay on the device. A draft, chain or tree, is one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.heads.cuda_network import DeviceNetwork, KernelOps, move_to_target
from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.heads.runners import DraftedChains, Growth
from outrider.model import Feed
from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaLayer, CudaRows, norm_on, turns_of
from outrider.model.cuda_runner import CudaRunner, split_feeds
from outrider.model.cuda_stack import EXTRA_POSITIONS, CudaPool, kernel_shape
from outrider.model.decoder import RopeTable
from outrider.ops import GrownTree
from outrider.ops.cuda.launch import AttentionMetadata, Kernels
from outrider.ops.cuda.tree_launch import GrowingTrees
from outrider.ops.cuda.tree_sizes import MAX_LEVELS, TreeSizes
from outrider.sampling import Row

__all__ = ["CudaEagleRunner", "CudaMedusaRunner"]

_MAX_GROWN_ROWS = 512  # rows of a level, and of the texts that trees grow after


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
        self._growing: dict[TreeSizes, tuple[GrowingTrees, DeviceNetwork]] = {}

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
        starts = range(0, len(feeds), max_batch)
        parts = [self._draft(feeds[i : i + max_batch], taps[i : i + max_batch], rows[i : i + max_batch], length) for i in starts]
        tokens, chances = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        return DraftedChains(tokens[:, :length], chances[:, :length])

    def _draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> tuple[Tensor, Tensor]:
        """Draft for as many sequences as the largest graph has, with a captured length."""
        batch = bucket(len(feeds), GRAPH_ROWS)
        captured = sorted(tokens for sequences, tokens in self._chains if sequences == batch and tokens >= length)
        length = captured[0] if captured else bucket(length, CHAIN_LENGTHS)
        if (batch, length) not in self._chains:
            work = partial(self._chain, batch=batch, length=length)
            self._chains[batch, length] = DeviceNetwork(f"EAGLE's draft of {length}", self._target, work)
        max_tokens = length + 1  # tokens a round can commit
        ordered, tap_rows = self._newest_first(feeds, taps, batch, max_tokens)
        drafted = self._chains[batch, length](tap_rows, ordered, rows, batch * max_tokens).cpu()[:, :, : len(feeds)]
        return drafted[0].T.long(), drafted[1].T.double()

    def _newest_first(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], batch: int, max_tokens: int
    ) -> tuple[list[Feed], Tensor]:  # fmt: skip
        """The last tokens of every feed with their taps: the newest ones of `batch` sequences, then the others.

        Those before the last `max_tokens` are fed by themselves.
        """
        early = [feed._replace(tokens=feed.tokens[:-max_tokens]) for feed in feeds]
        if any(feed.tokens for feed in early):
            tap_rows = torch.cat([rows_of_seq[: len(feed.tokens)] for rows_of_seq, feed in zip(taps, early, strict=True)])
            self.forward([feed for feed in early if feed.tokens], self.fuse(tap_rows))
        starts = [feed.start + len(fed.tokens) for feed, fed in zip(feeds, early, strict=True)]
        feeds = [feed._replace(start=start, tokens=feed.tokens[-max_tokens:]) for feed, start in zip(feeds, starts, strict=True)]
        taps = [rows_of_seq[-len(feed.tokens) :] for rows_of_seq, feed in zip(taps, feeds, strict=True)]
        idle = Feed([self._target.pool.pages - 1], 0, [0])
        ordered = [
            *(feed._replace(start=feed.start + len(feed.tokens) - 1, tokens=feed.tokens[-1:]) for feed in feeds),
            *[idle] * (batch - len(feeds)),
            *(feed._replace(tokens=feed.tokens[:-1]) for feed in feeds if len(feed.tokens) > 1),
        ]
        filling = taps[0].new_zeros(batch - len(feeds), taps[0].shape[1])
        return ordered, torch.cat([*(rows[-1:] for rows in taps), filling, *(rows[:-1] for rows in taps)])

    @torch.inference_mode()
    def grow(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], rooms: Sequence[int],
        draft_temperatures: Sequence[float], growth: Growth,  # noqa: ARG002 (there is no draft temperature)
    ) -> tuple[list[GrownTree], None]:  # fmt: skip
        """Run the feeds and grow a tree after each by one replay, by temperature and noise alone.

        Returns no trees where logits leave no choice.
        """
        levels = min(growth.levels, MAX_LEVELS)
        captured = levels if growth.is_fixed else bucket(levels, CHAIN_LENGTHS)
        widest = max(captured + 1, growth.beam)
        max_batch = max(size for size in GRAPH_ROWS if size == 1 or size * widest <= _MAX_GROWN_ROWS)
        grown: list[GrownTree] = []
        for i in range(0, len(feeds), max_batch):
            part = slice(i, i + max_batch)
            sizes = TreeSizes(bucket(len(feeds[part]), GRAPH_ROWS), captured, growth.beam, growth.branch)
            trees = self._grow(feeds[part], taps[part], rows[part], [(room, levels) for room in rooms[part]], sizes)
            if not trees:
                return [], None
            grown += trees
        return grown, None

    def _grow(
        self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], limits: Sequence[tuple[int, int]],
        sizes: TreeSizes,
    ) -> list[GrownTree]:  # fmt: skip
        """Grow trees of as many sequences as a graph has; the limits of each are its nodes and its levels."""
        if sizes not in self._growing:
            pool = self._target.pool
            trees = GrowingTrees(sizes, pool.page_size, (pool.pages - 1) * pool.page_size, self._target.device)
            network = DeviceNetwork(f"EAGLE's trees of {sizes.levels} levels", self._target, partial(self._levels, trees=trees))
            self._growing[sizes] = trees, network
        trees, network = self._growing[sizes]
        max_tokens, idle = sizes.levels + 1, [0] * (sizes.batch - len(feeds))
        ordered, tap_rows = self._newest_first(feeds, taps, sizes.batch, max_tokens)
        rooms, levels = zip(*limits, strict=True)
        numbers = [*rooms, *idle, *levels, *idle]
        finished = network(tap_rows, ordered, rows, sizes.batch * max_tokens, numbers).cpu()
        return [GrownTree(*tree, []) for tree in trees.read(finished, len(feeds))]

    def _levels(self, taps: Tensor, meta: AttentionMetadata, trees: GrowingTrees) -> Tensor:
        """The finished trees of all levels; rows 0..batch-1 are the newest tokens."""
        trees.begin(meta)
        features, levels = self.head.fuse(taps, self._ops), trees.sizes.levels
        for level in range(levels):
            rows = trees.rows(level) if level else meta
            hidden = self._run(features, rows)[: len(trees.rows(level).tokens)]
            trees.add(level, self.scores(hidden, trees.rows(level)), self._ids)
            if level + 1 < levels:
                features = hidden.index_select(0, trees.expand(level))
        return trees.finish()

    def _chain(self, taps: Tensor, meta: AttentionMetadata, batch: int, length: int) -> Tensor:
        """Tokens and chances (2, length, batch) of a draft; rows 0..batch-1 are the newest tokens."""
        k, device = self._kernels, taps.device
        integers = torch.empty(6 + length, batch, dtype=torch.int32, device=device)
        tokens, sequences, positions, roots, slots, ancestors = integers[:6].unbind()
        temperatures, prefixes = torch.empty(batch, device=device), torch.empty(batch, dtype=torch.int64, device=device)
        firsts = meta.firsts[:batch].clone()
        after = AttentionMetadata(
            tokens, sequences, positions, roots, firsts, slots, meta.table, ancestors[:, None], temperatures, prefixes
        )
        drawn, probs = integers[6:], torch.empty(length, batch, device=device)
        before, features = meta, self.head.fuse(taps, self._ops)
        for step in range(length):
            features = self._run(features, before)[:batch]
            newest = before.rows(slice(0, batch))
            chosen = k.choose(self._over_target_vocab(self.scores(features, newest)), newest)
            k.next_rows(chosen, before, after, (drawn, probs), step)
            before = after
        return torch.stack((drawn.float(), probs))  # ids below 2^24 are exact

    def scores(self, hidden: Tensor, rows: AttentionMetadata) -> Tensor:  # noqa: ARG002 (a benchmark plants what rows guess)
        """Logits (N, outputs) of what the head gives for some rows."""
        return self.head.logits(hidden, self._ops)

    def _over_target_vocab(self, logits: Tensor) -> Tensor:
        """The logits over the target's vocabulary, -inf for tokens the head does not have."""
        if self._ids is None:
            return logits
        all_logits = torch.full((len(logits), self.head.config.shape.vocab), float("-inf"), device=logits.device)
        return all_logits.index_copy_(1, self._ids, logits)

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
