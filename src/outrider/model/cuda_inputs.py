"""Graph inputs: the integers of a forward's rows on the host and on the device, and captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core import Request
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.sampling.noise import prefix_of

__all__ = ["DEPTH", "GRAPH_ROWS", "Graph", "GraphInputs", "SamplingNeeds", "bucket"]

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEPTH = 256  # ancestors of a node that may lie out of order; as many as a draft has nodes
_SECTIONS = 8  # sections of N words between the noise prefixes and the page table; see GraphInputs


class GraphInputs:
    """The integers of a forward on the host and on the device, moved by one copy.

    Words: noise prefixes (two each), temperatures, tokens, sequences, positions, roots, firsts, slots, rows of the penalty
    table; the page table; ancestors.
    """

    def __init__(self, rows: int, sequences: int, width: int, device: torch.device, depth: int = DEPTH) -> None:
        self.rows, self._table_shape, self._depth = rows, (sequences, width), depth
        self._short = (2 + _SECTIONS) * rows + sequences * width
        words = self._short + rows * depth
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        flat = self._host.numpy()
        self.prefixes = flat[: 2 * rows].view(np.uint64)
        sections = flat[2 * rows : (2 + _SECTIONS) * rows].reshape(_SECTIONS, rows)
        self.temperatures = sections[0].view(np.float32)
        self.param_rows = sections[7]
        self.fields = sections[1:7]  # tokens, sequences, positions, roots, firsts, slots
        self.table = flat[(2 + _SECTIONS) * rows : self._short].reshape(sequences, width)
        self.ancestors = flat[self._short :].reshape(rows, depth)
        self.meta = self._views()
        self.placed: list[list[int] | None] = [None] * sequences  # pages in each row of the page table
        self.needs: SamplingNeeds | None = None  # the requests whose noise is set, one row each
        self.filled = 0  # sequences of the last filling, if it was one row each or a chain: then the padding is still right
        self.order = np.arange(rows, dtype=np.int32)

    def _views(self) -> AttentionMetadata:
        n, flat = self.rows, self._device
        sections = flat[2 * n : (2 + _SECTIONS) * n].view(_SECTIONS, n)
        tokens, sequences, positions, roots, firsts, slots, param_rows = sections[1:].unbind()
        table = flat[(2 + _SECTIONS) * n : self._short].view(self._table_shape)
        ancestors, prefixes = flat[self._short :].view(n, self._depth), flat[: 2 * n].view(torch.int64)
        temperatures = sections[0].view(torch.float32)
        rows = (tokens, sequences, positions, roots, firsts, slots)
        return AttentionMetadata(*rows, table, ancestors, temperatures, prefixes, param_rows)

    def place(self, b: int, pages: Sequence[int], scratch: int) -> None:
        """Set a sequence's row of the page table. Entries past its pages point to the padding's page."""
        if self.placed[b] != pages:
            self.placed[b] = list(pages)
            self.table[b, : len(pages)] = pages
            self.table[b, len(pages) :] = scratch

    def pad(self, filled: int, scratch: int, page_size: int) -> None:
        """Turn the rows from `filled` on into padding: a sequence of its own in the scratch page."""
        if filled < self.rows:
            self.fields[:, filled:] = 0
            self.fields[1, filled:] = len(self.table) - 1
            self.fields[5, filled:] = scratch * page_size
            self.place(len(self.table) - 1, [], scratch)
            self.temperatures[filled:] = 0.0

    def set_noise(self, needs: SamplingNeeds) -> None:
        """Set temperature and noise prefix of one row for each request."""
        self.needs, rows = needs, len(needs.requests)
        self.temperatures[:rows] = [0.0 if request.params.greedy else request.params.temperature for request in needs.requests]
        self.prefixes[:rows] = [prefix_of(request.seed, request.index) for request in needs.requests]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class SamplingNeeds(NamedTuple):
    """Requests, and which kinds of sampling parameters any of them has."""

    requests: list[Request]
    penalties: bool  # penalties, biases, bans or filters
    logprobs: bool
    prompt_logprobs: bool

    @classmethod
    def of(cls, requests: list[Request]) -> SamplingNeeds:
        params = [request.params for request in requests]
        return cls(
            requests,
            any(p.adjusts or p.truncates for p in params),
            any(p.logprobs is not None for p in params),
            any(p.prompt_logprobs is not None for p in params),
        )


class Graph(NamedTuple):
    """A captured forward for a fixed number of rows."""

    inputs: GraphInputs
    launch: Callable[[], None]
    outputs: list[Any]  # logits and taps (or None) of the last launch; the next launch overwrites them
    host: Tensor  # the choices, in pinned memory
    done: Any  # a CUDA event

    def start(self) -> None:
        """Launch the graph. Its host inputs may change again once it is done."""
        self.launch()
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that is at least `count`."""
    for size in sizes:
        if count <= size:
            return size
    raise AssertionError(f"{count} is more than the largest graph")
