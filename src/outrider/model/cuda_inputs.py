"""Graph inputs: the integers of a forward's rows on the host and on the device, and captured graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core import Request
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.sampling import Row, SamplingParams
from outrider.sampling.noise import prefix_of

if TYPE_CHECKING:
    from outrider.model.cuda_states import RecurrentInputs

__all__ = ["DEPTH", "GRAPH_ROWS", "Graph", "GraphInputs", "SamplingNeeds", "bucket", "noise_key"]

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEPTH = 256  # ancestors of a node that may lie out of order; as many as a draft has nodes
NoiseKey = tuple[SamplingParams, int, int]  # parameters, seed and sample, as in Row
_SECTIONS = 8  # sections of N words between the noise prefixes and the page table; see GraphInputs


class GraphInputs:
    """The integers of a forward on the host and on the device, moved by one copy.

    Words: noise prefixes (two each), temperatures, tokens, sequences, positions, roots, firsts, slots, rows of the penalty
    table; the page table; ancestors; the first row of each sequence's rotary table.
    """

    def __init__(
        self, rows: int, sequences: int, width: int, device: torch.device, depth: int = DEPTH,
        recurrent: RecurrentInputs | None = None,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.recurrent = recurrent  # of rows whose model has recurrent layers
        shapes = ((rows, 2), (_SECTIONS, rows), (sequences, width), (rows, depth), (sequences, 1))
        words = sum(map(math.prod, shapes))
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        prefixes, sections, self.table, self.ancestors, self.starts = (part.numpy() for part in _parts(self._host, shapes))
        self.prefixes = prefixes.reshape(-1).view(np.uint64)
        self.temperatures = sections[0].view(np.float32)
        self.param_rows = sections[7]
        self.fields = sections[1:7]  # tokens, sequences, positions, roots, firsts, slots
        device_prefixes, device_sections, table, ancestors, starts = _parts(self._device, shapes)
        temperatures, tokens, numbers, positions, roots, firsts, slots, param_rows = device_sections.unbind()
        self.meta = AttentionMetadata(
            tokens, numbers, positions, roots, firsts, slots, table, ancestors,
            temperatures.view(torch.float32), device_prefixes.view(-1).view(torch.int64), param_rows, starts,
        )  # fmt: skip
        self.placed: list[list[int] | None] = [None] * sequences  # pages in each row of the page table
        self.needs: SamplingNeeds | None = None  # the requests whose noise is set, one row each
        self.filled = 0  # sequences of the last filling, if it was one row each or a chain: then the padding is still right
        self.order = np.arange(rows, dtype=np.int32)

    def place(self, b: int, pages: Sequence[int], scratch: int, rotary_start: int = 0) -> None:
        """Set a sequence's row of the page table. Entries past its pages point to the padding's page."""
        self.starts[b] = rotary_start
        if self.placed[b] != pages:
            self.placed[b] = list(pages)
            self.table[b, : len(pages)] = pages
            self.table[b, len(pages) :] = scratch

    def pad(self, filled: int, scratch: int, page_size: int) -> None:
        """Turn the rows from `filled` on into padding: one more sequence, in the scratch page."""
        if filled < self.rows:
            self.fields[:, filled:] = 0
            self.fields[1, filled:] = len(self.table) - 1
            self.fields[5, filled:] = scratch * page_size
            self.place(len(self.table) - 1, [], scratch)
            self.temperatures[filled:] = 0.0

    def set_noise(self, rows: slice, keys: Sequence[Row | NoiseKey]) -> None:
        """Set temperature and noise prefix of the rows, by a key for each row or one key for all."""
        self.temperatures[rows] = [0.0 if params.greedy else params.temperature for params, *_ in keys]
        self.prefixes[rows] = [prefix_of(key[1], key[2]) for key in keys]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self.recurrent is not None:
            self.recurrent.send()


def _parts(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Consecutive parts of a flat tensor in their shapes."""
    return [part.view(shape) for part, shape in zip(torch.split(flat, [*map(math.prod, shapes)]), shapes, strict=True)]


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


def noise_key(request: Request) -> NoiseKey:
    return request.params, request.seed, request.index


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that is at least `count`."""
    for size in sizes:
        if count <= size:
            return size
    raise AssertionError(f"{count} is more than the largest graph")
