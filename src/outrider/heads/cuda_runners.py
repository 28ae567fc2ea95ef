"""Heads beside a target on a GPU: their one definition, run by the target's kernels, a graph for each number of rows.

Taps and features stay on the device; logits come to the host, where a draft grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.eagle import EagleHead
from outrider.heads.medusa import MedusaHeads
from outrider.model import Feed
from outrider.model.cuda_runner import GRAPH_ROWS, CudaRunner
from outrider.model.cuda_stack import CudaPool
from outrider.ops import Plain
from outrider.ops.cuda.launch import Kernels, Paged, Shape

__all__ = ["CudaEagleRunner", "CudaMedusaRunner", "fits"]


def fits(head: EagleHead) -> bool:
    """Whether the target's kernels take a head's attention; the processor runs it otherwise."""
    shape = head.config.shape
    return shape.head_dim in (16, 32, 64, 128, 256) and shape.heads // shape.kv_heads in (1, 2, 4, 8, 16)


class _Launched(Plain):
    """Products by the target's kernel, with float32 results."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), len(weight), device=x.device)
        self._kernels.linear(x.to(weight.dtype).contiguous(), weight, bias, out, "store")
        return out


class _Network:
    """A function of rows on the device, captured for each number of rows."""

    def __init__(self, name: str, target: CudaRunner, work: Callable[[Tensor, Paged], Tensor]) -> None:
        self._name, self._target, self._work = name, target, work
        self._graphs: dict[int, tuple[Callable[[Sequence[Feed]], None], Tensor, list[Tensor]]] = {}

    def __call__(self, given: Tensor, feeds: Sequence[Feed] = ()) -> Tensor:
        """What comes out, filled up to a graph's rows; the next call writes there."""
        size = next(size for size in GRAPH_ROWS if len(given) <= size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, given.shape[1])
        run, rows, found = self._graphs[size]
        rows[: len(given)].copy_(given)
        run(feeds)
        return found[0]

    def _capture(self, size: int, width: int) -> tuple[Callable[[Sequence[Feed]], None], Tensor, list[Tensor]]:
        rows = torch.zeros(size, width, device=self._target.device)
        found: list[Tensor] = []

        def work(paged: Paged) -> None:
            found[:] = [self._work(rows, paged)]

        return self._target.capture_rows(f"{self._name}, {size} rows", size, work), rows, found


class CudaEagleRunner:
    """An EAGLE head over its layer of KV, on its target's device."""

    def __init__(self, head: EagleHead, target: CudaRunner) -> None:
        c = head.config.shape
        shape = Shape(c.hidden, c.heads, c.kv_heads, c.head_dim, target.pool.page_size, c.norm_eps)
        self.head = head
        self._device = target.device
        self._kernels = Kernels(shape, target.cuda.dtype)
        self._ops = _Launched(self._kernels)
        self._pool = CudaPool(self._kernels, 1, target.pool.pages, target.device)
        ids = head.vocab_ids  # read on the host
        _move(head, target, {"embedding": target.cuda.embedding, "output": target.cuda.output})
        head.vocab_ids = ids
        self._fuse = _Network("EAGLE's features", target, lambda rows, _: head.fuse(rows, self._ops))
        self._forward = _Network("EAGLE", target, self._run)
        self._logits = _Network("EAGLE's logits", target, lambda rows, _: head.logits(rows, self._ops))

    @torch.inference_mode()
    def fuse(self, taps: Tensor) -> Tensor:
        """Features (N, hidden) of the target's taps (N, taps * target_hidden)."""
        taps = taps.to(self._device)
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
        return self._logits(hidden)[: len(hidden)].cpu()

    def _run(self, features: Tensor, paged: Paged) -> Tensor:
        pool, size, dtype = self._pool, self._pool.page_size, self._kernels.dtype
        slots = paged.slots.long()

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pool.write(0, (slots // size, slots % size), k.to(dtype), v.to(dtype))
            rows = q.to(dtype).reshape(len(q), -1).contiguous()
            mixed = torch.empty_like(rows)
            self._kernels.attend_rows(rows, (pool.keys[0], pool.values[0]), paged, mixed, None)
            return mixed

        where = (paged.positions - 1).clamp_min(0).long()  # row i lies in slot i + 1, beside its token
        return self.head(paged.tokens, features, where, attend, self._ops)  # type: ignore[no-any-return]


class CudaMedusaRunner:
    """Medusa heads on their target's device."""

    def __init__(self, heads: MedusaHeads, target: CudaRunner) -> None:
        ops = _Launched(target.cuda.kernels)
        _move(heads, target, {"output": target.cuda.output})
        self._logits = _Network("Medusa", target, lambda rows, _: heads(heads.fuse(rows, ops), ops))

    @torch.inference_mode()
    def logits(self, taps: Tensor) -> Tensor:
        """(heads, N, V) float32 on the host, from the stream leaving the target's last layer."""
        return self._logits(taps)[:, : len(taps)].cpu()


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
