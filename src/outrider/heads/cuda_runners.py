"""Heads beside a target on a GPU, run by the target's kernels in graphs.

Taps and features stay on the device. A chain is one graph; for a tree the logits of each level come to the host, where
it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.heads.runners import Drawn
from outrider.model import Feed
from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_rows import GRAPH_ROWS
from outrider.model.cuda_runner import CudaRunner
from outrider.model.cuda_stack import BEYOND, CudaPool
from outrider.model.decoder import RopeTable
from outrider.ops import Plain
from outrider.ops.cuda.launch import Kernels, Paged, Shape, pair_rows
from outrider.sampling import Row

__all__ = ["CudaEagleRunner", "CudaMedusaRunner", "fits"]

Run = Callable[[Sequence[Feed], Sequence[Row]], None]


def fits(head: EagleHead) -> bool:
    """Whether the target's kernels take a head's attention; the processor runs it otherwise."""
    shape = head.config.shape
    group = shape.heads // shape.kv_heads
    return not shape.qk_norm and shape.head_dim in (16, 32, 64, 128, 256) and group in (1, 2, 4, 8, 16)


class _Launched(Plain):
    """Products and norms by the target's kernels; products are float32."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), len(weight), device=x.device)
        self._kernels.linear(x.to(weight.dtype).contiguous(), weight, bias, out, "store")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if eps != self._kernels.shape.eps:
            return super().rms_norm(x, weight, eps)
        return self._kernels.norm(x.float().contiguous(), weight)


class _Network:
    """A function of rows on the device, captured for each number of rows."""

    def __init__(self, name: str, target: CudaRunner, work: Callable[[Tensor, Paged], Tensor]) -> None:
        self._name, self._target, self._work = name, target, work
        self._graphs: dict[int, tuple[Run, Tensor, list[Tensor]]] = {}

    def __call__(self, given: Tensor, feeds: Sequence[Feed] = (), rows: Sequence[Row] = (), size: int = 0) -> Tensor:
        """What comes out, filled up to a graph's rows (`size`, or the next that is captured); the next call writes there."""
        size = size or _next(len(given), GRAPH_ROWS)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, given.shape[1])
        run, inside, found = self._graphs[size]
        inside[: len(given)].copy_(given)
        run(feeds, rows)
        return found[0]

    def _capture(self, size: int, width: int) -> tuple[Run, Tensor, list[Tensor]]:
        given = torch.zeros(size, width, device=self._target.device)
        found: list[Tensor] = []

        def work(paged: Paged) -> None:
            found[:] = [self._work(given, paged)]

        return self._target.capture_rows(f"{self._name}, {size} rows", size, work), given, found


class CudaEagleRunner:
    """An EAGLE head over its layer of KV, on its target's device."""

    drafts_chains = CHAIN_LENGTHS[-1]

    def __init__(self, head: EagleHead, target: CudaRunner) -> None:
        c = head.config.shape
        shape = Shape(c.hidden, c.heads, c.kv_heads, c.head_dim, target.pool.page_size, c.norm_eps)
        self.head = head
        self._target = target
        self._kernels = Kernels(shape, target.cuda.dtype)
        self._ops = _Launched(self._kernels)
        self._pool = CudaPool(self._kernels, 1, target.pool.pages, target.device)
        ids = head.vocab_ids  # read on the host
        _move(head, target, {"embedding": target.cuda.embedding, "output": target.cuda.output})
        self._ids, head.vocab_ids = head.vocab_ids, ids
        self._pair_weights()
        rope = RopeTable(c.rope, c.head_dim, c.context + BEYOND)
        # row i lies in slot i + 1, beside its token, and carries the rotary position i
        cos, sin = (torch.cat((part[:1], part[:-1])).to(target.device) for part in (rope.cos, rope.sin))
        self._turns = (cos, sin)
        self._fuse = _Network("EAGLE's features", target, lambda rows, _: head.fuse(rows, self._ops))
        self._forward = _Network("EAGLE", target, self._run)
        self._logits = _Network("EAGLE's logits", target, lambda rows, _: head.logits(rows, self._ops))
        self._chains: dict[tuple[int, int], _Network] = {}

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
        for part in _in_parts(feeds, GRAPH_ROWS[-1]):
            end = row + sum(len(feed.tokens) + len(feed.nodes) for feed in part)
            out.append(self._forward(features[row:end], part)[: end - row].clone())
            row = end
        return torch.cat(out)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(N, outputs) float32, on the host."""
        return torch.cat([self._logits(part)[: len(part)].cpu() for part in torch.split(hidden, GRAPH_ROWS[-1])])

    @torch.inference_mode()
    def draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> Drawn:
        """Chains after feeds by one replay: tokens and chances (feeds, length). The law is not sharpened."""
        most = GRAPH_ROWS[-1]
        starts = range(0, len(feeds), most)
        parts = [self._draft(feeds[i : i + most], taps[i : i + most], rows[i : i + most], length) for i in starts]
        tokens, chances = (torch.cat(own).numpy() for own in zip(*parts, strict=True))
        return Drawn(tokens[:, :length], chances[:, :length])

    def _draft(self, feeds: Sequence[Feed], taps: Sequence[Tensor], rows: Sequence[Row], length: int) -> tuple[Tensor, Tensor]:
        """Chains of as many sequences as a graph takes, of a captured length."""
        batch = _next(len(feeds), GRAPH_ROWS)
        captured = sorted(own for own_batch, own in self._chains if own_batch == batch and own >= length)
        length = captured[0] if captured else _next(length, CHAIN_LENGTHS)
        most = length + 1  # as many rows as a round can give; what is older is read before
        early = [feed._replace(tokens=feed.tokens[:-most]) for feed in feeds]
        if any(feed.tokens for feed in early):
            given = torch.cat([own[: len(feed.tokens)] for own, feed in zip(taps, early, strict=True)])
            self.forward([feed for feed in early if feed.tokens], self.fuse(given))
        starts = [feed.start + len(own.tokens) for feed, own in zip(feeds, early, strict=True)]
        feeds = [feed._replace(start=start, tokens=feed.tokens[-most:]) for feed, start in zip(feeds, starts, strict=True)]
        taps = [own[-len(feed.tokens) :] for own, feed in zip(taps, feeds, strict=True)]
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
        given = torch.cat([*(own[-1:] for own in taps), filling, *(own[:-1] for own in taps)])
        found = self._chains[batch, length](given, ordered, rows, batch * most).cpu()[:, :, : len(feeds)]
        return found[0].T.long(), found[1].T.double()

    def _chain(self, taps: Tensor, paged: Paged, batch: int, length: int) -> Tensor:
        """Tokens and chances (2, length, batch) of a draft; rows 0..batch-1 are the newest tokens."""
        k, device = self._kernels, taps.device
        whole = torch.empty(6 + length, batch, dtype=torch.int32, device=device)
        tokens, sequences, positions, roots, slots, ancestors = whole[:6].unbind()
        heat, prefixes = torch.empty(batch, device=device), torch.empty(batch, dtype=torch.int64, device=device)
        firsts = paged.firsts[:batch].clone()
        after = Paged(tokens, sequences, positions, roots, firsts, slots, paged.table, ancestors[:, None], heat, prefixes)
        drawn, odds = whole[6:], torch.empty(length, batch, device=device)
        before, features = paged, self.head.fuse(taps, self._ops)
        for step in range(length):
            features = self._run(features, before)[:batch]
            found = k.choose(self._whole(self.head.logits(features, self._ops)), before.rows(slice(0, batch)))
            k.next_rows(found, before, after, (drawn, odds), step)
            before = after
        return torch.stack((drawn.float(), odds))  # ids below 2^24 are exact

    def _whole(self, logits: Tensor) -> Tensor:
        """Over the target's ids, -inf where the head has no say."""
        if self._ids is None:
            return logits
        whole = torch.full((len(logits), self.head.config.shape.vocab), float("-inf"), device=logits.device)
        return whole.index_copy_(1, self._ids, logits)

    def _pair_weights(self) -> None:
        """The layer's matrices in the order the kernels read: pairs of q, k, gate and up side by side."""
        c, layer = self.head.config.shape, self.head.layer
        groups = c.heads + c.kv_heads
        turned = groups * c.head_dim

        def paired(fused: Tensor) -> Tensor:
            return torch.cat((pair_rows(fused[:turned], groups), fused[turned:]))

        self._qkv = paired(layer.qkv.data)
        self._qkv_bias = None if layer.qkv_bias is None else paired(layer.qkv_bias.data)
        self._gate_up = pair_rows(layer.gate_up.data, 1)
        self._gate_up_bias = None if layer.gate_up_bias is None else pair_rows(layer.gate_up_bias.data, 1)

    def _run(self, features: Tensor, paged: Paged) -> Tensor:
        """What `EagleHead.forward` defines."""
        k, head, layer, c = self._kernels, self.head, self.head.layer, self.head.config
        features = features.contiguous()
        if c.wide:
            assert layer.norm_hidden is not None
            _, embedded = k.embed(paged, head.embedding, layer.norm_in)
            normed = k.norm(features, layer.norm_hidden)
            x = torch.cat((embedded, normed), -1)
            stream = normed.float() if c.norm_before_residual else features.clone()
        else:
            embedded, _ = k.embed(paged, head.embedding, head.target_norm)
            stream = self._ops.linear(torch.cat((embedded, features), -1), head.fc, head.fc_bias)
            x = stream.to(k.dtype)
        kv = (self._pool.keys[0], self._pool.values[0])
        q, mixed = (torch.empty(len(x), c.shape.heads * c.shape.head_dim, device=x.device, dtype=k.dtype) for _ in range(2))
        k.qkv(x, self._qkv, self._qkv_bias, q, kv, paged, self._turns)
        k.attend_rows(q, kv, paged, mixed, None)
        k.linear(mixed, layer.out, layer.out_bias, stream, "add")
        gated = torch.empty(len(x), c.shape.ffn, device=x.device, dtype=k.dtype)
        k.linear(k.norm(stream, layer.norm_mlp), self._gate_up, self._gate_up_bias, gated, "silu")
        k.linear(gated, layer.down, layer.down_bias, stream, "add")
        if not c.norm_output:
            return stream
        assert head.norm is not None
        return k.norm(stream, head.norm).float()


class CudaMedusaRunner:
    """Medusa heads on their target's device."""

    def __init__(self, heads: MedusaHeads, target: CudaRunner) -> None:
        ops = _Launched(target.cuda.kernels)
        _move(heads, target, {"output": target.cuda.output})
        self._logits = _Network("Medusa", target, lambda rows, _: heads(heads.fuse(rows, ops), ops))

    @torch.inference_mode()
    def logits(self, taps: Tensor) -> Tensor:
        """(heads, N, V) float32 on the host, from the stream leaving the target's last layer."""
        return torch.cat([self._logits(part)[:, : len(part)].cpu() for part in torch.split(taps, GRAPH_ROWS[-1])], 1)


def _next(count: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if count <= size)


def _move(network: nn.Module, target: CudaRunner, borrowed: dict[str, Tensor]) -> None:
    """Put a head where its target is; what it borrows is the target's own there, matrices are of the target's kind."""
    own = dict(network.named_parameters())
    for name, tensor in borrowed.items():
        if name not in own:
            setattr(network, name, tensor)
    for parameter in own.values():
        kind = target.cuda.dtype if parameter.dim() > 1 else parameter.dtype
        parameter.data = parameter.data.to(target.device, kind)
    network.to(target.device)


def _in_parts(feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
    """The same rows, at most so many at a time; a long run of tokens is cut."""
    part: list[Feed] = []
    room = most
    for feed in feeds:
        rest: Any = feed
        while rest is not None:
            rows = len(rest.tokens) + len(rest.nodes)
            if rows <= room:
                part.append(rest)
                room, rest = room - rows, None
                continue
            if not rest.nodes and room:
                part.append(rest._replace(tokens=rest.tokens[:room]))
                rest = rest._replace(start=rest.start + room, tokens=rest.tokens[room:])
            yield part
            part, room = [], most
    if part:
        yield part
