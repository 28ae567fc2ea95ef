"""The integers of a forward's rows as the GPU reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core import Request
from outrider.ops.cuda.launch import Paged
from outrider.sampling.noise import prefix_of

__all__ = ["DEPTH", "GRAPH_ROWS", "Asked", "Graph", "Packed", "bucket"]

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEPTH = 256  # ancestors of a node that may lie out of order; as many as a draft has nodes
_MOVED = 8  # sections of N words in front of the page table: see Packed


class Packed:
    """The integers of a forward on the host and on the device, moved by one copy.

    Words: prefixes (two each), temperatures, tokens, sequences, positions, roots, firsts, slots, heads of Wishes; the page
    table; ancestors.
    """

    def __init__(self, rows: int, sequences: int, width: int, device: torch.device, depth: int = DEPTH) -> None:
        self.rows, self._table_shape, self._depth = rows, (sequences, width), depth
        self._short = (2 + _MOVED) * rows + sequences * width
        words = self._short + rows * depth
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        flat = self._host.numpy()
        self.prefixes = flat[: 2 * rows].view(np.uint64)
        sections = flat[2 * rows : (2 + _MOVED) * rows].reshape(_MOVED, rows)
        self.temperatures = sections[0].view(np.float32)
        self.shaped = sections[7]
        self.fields = sections[1:7]  # tokens, sequences, positions, roots, firsts, slots
        self.table = flat[(2 + _MOVED) * rows : self._short].reshape(sequences, width)
        self.ancestors = flat[self._short :].reshape(rows, depth)
        self.paged = self._views()
        self.placed: list[list[int] | None] = [None] * sequences  # the page table's rows
        self.asked: Asked | None = None  # whose noise lies here, one row each
        self.filled = 0  # sequences of one row each, or of a chain, where the last filling was that: padding lies as it should
        self.order = np.arange(rows, dtype=np.int32)

    def _views(self) -> Paged:
        n, flat = self.rows, self._device
        sections = flat[2 * n : (2 + _MOVED) * n].view(_MOVED, n)
        tokens, sequences, positions, roots, firsts, slots, shaped = sections[1:].unbind()
        table = flat[(2 + _MOVED) * n : self._short].view(self._table_shape)
        ancestors, prefixes = flat[self._short :].view(n, self._depth), flat[: 2 * n].view(torch.int64)
        temperatures = sections[0].view(torch.float32)
        return Paged(tokens, sequences, positions, roots, firsts, slots, table, ancestors, temperatures, prefixes, shaped)

    def place(self, b: int, pages: Sequence[int], scratch: int) -> None:
        """A sequence's row of the page table; what it does not own is the padding's page."""
        if self.placed[b] != pages:
            self.placed[b] = list(pages)
            self.table[b, : len(pages)] = pages
            self.table[b, len(pages) :] = scratch

    def pad(self, filled: int, scratch: int, page_size: int) -> None:
        """Rows beyond those filled: of a sequence of their own, in the last page."""
        if filled < self.rows:
            self.fields[:, filled:] = 0
            self.fields[1, filled:] = len(self.table) - 1
            self.fields[5, filled:] = scratch * page_size
            self.place(len(self.table) - 1, [], scratch)
            self.temperatures[filled:] = 0.0

    def hear(self, asked: Asked) -> None:
        """Noise of one row for each request."""
        self.asked, rows = asked, len(asked.requests)
        self.temperatures[:rows] = [0.0 if own.params.greedy else own.params.temperature for own in asked.requests]
        self.prefixes[:rows] = [prefix_of(own.seed, own.index) for own in asked.requests]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class Asked(NamedTuple):
    """Requests, and what any of them asks of the choice."""

    requests: list[Request]
    shapes: bool  # more than a temperature
    logprobs: bool
    of_prompts: bool  # log probabilities

    @classmethod
    def by(cls, requests: list[Request]) -> Asked:
        params = [own.params for own in requests]
        return cls(
            requests,
            any(own.adjusts or own.truncates for own in params),
            any(own.logprobs is not None for own in params),
            any(own.prompt_logprobs is not None for own in params),
        )


class Graph(NamedTuple):
    """A captured forward for a fixed number of rows."""

    packed: Packed
    launch: Callable[[], None]
    found: list[Any]  # after a launch: logits, taps or None; the next one writes there
    host: Tensor  # pinned: the choices
    done: Any  # an event

    def start(self) -> None:
        """Launch it; its integers on the host may change again when it is done."""
        self.launch()
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds so many."""
    for size in sizes:
        if count <= size:
            return size
    raise AssertionError(f"{count} is more than the largest graph")
