"""Graph inputs: the integers of a forward's rows on the host and on the device, and captured graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.ops.cuda.launch import AttentionMetadata
from outrider.sampling import Row
from outrider.sampling.noise import prefix_of

if TYPE_CHECKING:
    from outrider.model.cuda_states import RecurrentInputs

__all__ = ["DEPTH", "GRAPH_ROWS", "GraphInputs", "bucket"]

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEPTH = 256  # ancestors of a node that may lie out of order; as many as a draft has nodes
_SECTIONS = 8  # sections of N words between the noise prefixes and the page table; see GraphInputs


class GraphInputs:
    """The integers of a forward on the host and on the device, moved by one copy.

    Words: noise prefixes (two each), temperatures, tokens, sequences, positions, roots, firsts, slots, rows of the penalty
    table; the page table; ancestors; the first row of each sequence's rotary table.
    """

    def __init__(
        self, rows: int, sequences: int, width: int, device: torch.device, depth: int = DEPTH,
        recurrent: RecurrentInputs | None = None, beside: GraphInputs | None = None,
    ) -> None:  # fmt: skip
        """With `beside` they are sent to the same place on the device as that one's."""
        self.rows = rows
        self.recurrent = recurrent  # of rows whose model has recurrent layers
        self._sizes = (rows, sequences, width, device, depth)
        shapes = ((rows, 2), (_SECTIONS, rows), (sequences, width), (rows, depth), (sequences, 1))
        words = sum(map(math.prod, shapes))
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        fresh = torch.zeros(words if beside is None else 0, dtype=torch.int32, device=device)
        self._device: Tensor = fresh if beside is None else beside._device
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
        self.sampled: tuple[object, list[int]] | None = None  # whose noise is set, and their rows; see SamplingMetadata.fill
        self.filled = 0  # sequences of the last filling, if it was one row each or a chain: then the padding is still right
        self.order = np.arange(rows, dtype=np.int32)

    def other_side(self) -> GraphInputs:
        """As many integers on the host, for the same place on the device."""
        recurrent = None if self.recurrent is None else self.recurrent.other_side()
        return GraphInputs(*self._sizes, recurrent, beside=self)

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

    def set_noise(self, rows: slice, sampled: Sequence[Row]) -> None:
        """Set temperature and noise prefix of the rows."""
        self.temperatures[rows] = [0.0 if row.params.greedy else row.params.temperature for row in sampled]
        self.prefixes[rows] = [prefix_of(row.seed, row.sample) for row in sampled]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self.recurrent is not None:
            self.recurrent.send()


def _parts(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Consecutive parts of a flat tensor in their shapes."""
    return [part.view(shape) for part, shape in zip(torch.split(flat, [*map(math.prod, shapes)]), shapes, strict=True)]


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that is at least `count`."""
    for size in sizes:
        if count <= size:
            return size
    raise AssertionError(f"{count} is more than the largest graph")
