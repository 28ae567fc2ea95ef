"""Heads beside a target on a GPU, run by the target's kernels in graphs.

Taps and features stay on the device. A chain is one graph. For a tree the logits of each level are copied to the host,
which grows the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.heads.runners import DraftedChains
from outrider.model import Feed
from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaLayer, CudaRows, norm_on, turns_of
from outrider.model.cuda_runner import CudaRunner, split_feeds
from outrider.model.cuda_stack import EXTRA_POSITIONS, CudaPool, kernel_shape
from outrider.model.decoder import RopeTable
from outrider.ops import Plain
from outrider.ops.cuda.launch import AttentionMetadata, Kernels, RowNorm
from outrider.ops.cuda.matrix import Matrix
from outrider.sampling import Row

__all__ = ["CudaEagleRunner", "CudaMedusaRunner"]

Run = Callable[[Sequence[Feed], Sequence[Row]], None]


class _KernelOps(Plain):
    """Products and norms by the target's kernels; products are float32."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, x: Tensor, weight: Tensor | Matrix, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), weight.shape[0], device=x.device)
        self._kernels.linear(x.to(self._kernels.dtype).contiguous(), weight, bias, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.norm(x.float().contiguous(), RowNorm("rms", eps, weight))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._kernels.norm(x.float().contiguous(), RowNorm("layer", eps, weight, bias))


class _Network:
    """A function of rows on the device, captured for each number of rows."""

    def __init__(self, name: str, target: CudaRunner, work: Callable[[Tensor, AttentionMetadata], Tensor]) -> None:
        self._name, self._target, self._work = name, target, work
        self._graphs: dict[int, tuple[Run, Tensor, list[Tensor]]] = {}

    def __call__(self, rows_in: Tensor, feeds: Sequence[Feed] = (), rows: Sequence[Row] = (), size: int = 0) -> Tensor:
        """The outputs of the rows, padded to a graph of `size` rows or the next size. The next call overwrites them."""
        size = size or bucket(len(rows_in), GRAPH_ROWS)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, rows_in.shape[1])
        run, buffer, outputs = self._graphs[size]
        buffer[: len(rows_in)].copy_(rows_in)
        run(feeds, rows)
        return outputs[0]

    def _capture(self, size: int, width: int) -> tuple[Run, Tensor, list[Tensor]]:
        buffer = torch.zeros(size, width, device=self._target.device)
        outputs: list[Tensor] = []

        def work(meta: AttentionMetadata) -> None:
            outputs[:] = [self._work(buffer, meta)]

        return self._target.capture_rows(f"{self._name}, {size} rows", size, work), buffer, outputs


class CudaEagleRunner:
    """An EAGLE head over its layer of KV, on its target's device."""

    drafts_chains = CHAIN_LENGTHS[-1]
    grows_trees = False

    def __init__(self, head: EagleHead, target: CudaRunner) -> None:
        c = head.config.shape
        self.head = head
        self.positions = c.context
        self._target = target
        kernels = self._kernels = Kernels(kernel_shape(c, target.pool.page_size), target.cuda.dtype)
        self._ops = _KernelOps(kernels)
        self._pool = CudaPool(kernels, 1, target.pool.pages, target.device)
        ids = head.vocab_ids  # read on the host
        _move(head, target, {"embedding": target.cuda.embedding, "output": target.cuda.output})
        self._ids, head.vocab_ids = head.vocab_ids, ids
        table = RopeTable(c.ropes[0], c.head_dim, c.context + EXTRA_POSITIONS)
        # row i lies in slot i + 1, beside its token, and carries the rotary position i
        self._layer = CudaLayer(head.layer, kernels, target.device, turns_of(table, target.device, lag=1))
        self._norm = norm_on(target.device, c.norm, head.norm, None) if head.config.norm_output else None
        self._norm_hidden = (
            norm_on(target.device, c.layers[0].norm_in, head.layer.norm_hidden, None) if head.config.wide else None
        )
        is_target_embedding = not head.config.own_embedding
        self._embedding_scale = head.target.embedding_scale if is_target_embedding else 1.0
        self._fuse = _Network("EAGLE's features", target, lambda rows, _: head.fuse(rows, self._ops))
        self._forward = _Network("EAGLE", target, self._run)
        self._logits = _Network("EAGLE's logits", target, lambda rows, _: head.logits(rows, self._ops))
        self._chains: dict[tuple[int, int], _Network] = {}

    def grow(self, *_: object) -> NoReturn:
        raise NotImplementedError("grows_trees is False")

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
        max_tokens = length + 1  # tokens a round can commit; older ones are fed first, without the graph
        early = [feed._replace(tokens=feed.tokens[:-max_tokens]) for feed in feeds]
        if any(feed.tokens for feed in early):
            tap_rows = torch.cat([rows_of_seq[: len(feed.tokens)] for rows_of_seq, feed in zip(taps, early, strict=True)])
            self.forward([feed for feed in early if feed.tokens], self.fuse(tap_rows))
        starts = [feed.start + len(fed.tokens) for feed, fed in zip(feeds, early, strict=True)]
        feeds = [feed._replace(start=start, tokens=feed.tokens[-max_tokens:]) for feed, start in zip(feeds, starts, strict=True)]
        taps = [rows_of_seq[-len(feed.tokens) :] for rows_of_seq, feed in zip(taps, feeds, strict=True)]
        if (batch, length) not in self._chains:
            work = partial(self._chain, batch=batch, length=length)
            self._chains[batch, length] = _Network(f"EAGLE's draft of {length}", self._target, work)
        idle = Feed([self._target.pool.pages - 1], 0, [0])
        ordered = [
            *(feed._replace(start=feed.start + len(feed.tokens) - 1, tokens=feed.tokens[-1:]) for feed in feeds),
            *[idle] * (batch - len(feeds)),
            *(feed._replace(tokens=feed.tokens[:-1]) for feed in feeds if len(feed.tokens) > 1),
        ]
        filling = taps[0].new_zeros(batch - len(feeds), taps[0].shape[1])
        tap_rows = torch.cat([*(rows_of_seq[-1:] for rows_of_seq in taps), filling, *(rows_of_seq[:-1] for rows_of_seq in taps)])
        drafted = self._chains[batch, length](tap_rows, ordered, rows, batch * max_tokens).cpu()[:, :, : len(feeds)]
        return drafted[0].T.long(), drafted[1].T.double()

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
            chosen = k.choose(self._over_target_vocab(self.head.logits(features, self._ops)), before.rows(slice(0, batch)))
            k.next_rows(chosen, before, after, (drawn, probs), step)
            before = after
        return torch.stack((drawn.float(), probs))  # ids below 2^24 are exact

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
        embedded, read = k.embed(meta, head.embedding, self._layer.norm_in, self._embedding_scale)
        if c.wide:
            feature = k.norm(features, self._norm_hidden)
            stream, read = feature.float() if c.norm_before_residual else features.clone(), torch.cat((read, feature), -1)
        else:
            stream = self._ops.linear(torch.cat((embedded, features), -1), head.fc, head.fc_bias)
            read = stream.to(k.dtype)
        hidden = self._layer.forward(read, stream, self._norm, CudaRows(meta), (self._pool.keys[0], self._pool.values[0]))
        return stream if self._norm is None else hidden.float()


class CudaMedusaRunner:
    """Medusa heads on their target's device."""

    def __init__(self, heads: MedusaHeads, target: CudaRunner) -> None:
        ops = _KernelOps(target.cuda.kernels)
        _move(heads, target, {"output": target.cuda.output})
        self._logits = _Network("Medusa", target, lambda rows, _: heads(heads.fuse(rows, ops), ops))

    @torch.inference_mode()
    def logits(self, taps: Tensor) -> Tensor:
        """(heads, N, V) float32 on the host, from the stream leaving the target's last layer."""
        return torch.cat([self._logits(part)[:, : len(part)].cpu() for part in torch.split(taps, GRAPH_ROWS[-1])], 1)


def _move(network: nn.Module, target: CudaRunner, borrowed: dict[str, Tensor | Matrix]) -> None:
    """Move a head to its target's device, with the target's tensors where it borrows and matrices in the target's dtype."""
    parameters = dict(network.named_parameters())
    for name, tensor in borrowed.items():
        if name not in parameters:
            setattr(network, name, tensor)
    for parameter in parameters.values():
        dtype = target.cuda.dtype if parameter.dim() > 1 else parameter.dtype
        parameter.data = parameter.data.to(target.device, dtype)
    network.to(target.device)
