"""What rows with penalties, biases, bans and filters bring to the device, and the choice that heeds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from outrider.ops.cuda import shape_kernels as kernels
from outrider.ops.cuda.choice import VOCAB_TILE
from outrider.ops.cuda.launch import Paged

__all__ = ["ADJUSTS", "BANS", "COUNTED", "FILTERS", "SEEN", "STOPS", "Entry", "Shaping"]

ADJUSTS, FILTERS, BANS = kernels.ADJUSTS.value, kernels.FILTERS.value, kernels.BANS.value
SEEN, COUNTED, STOPS = kernels.SEEN.value, kernels.COUNTED.value, kernels.STOPS.value
_HEAD, _ENTRY = kernels.HEAD.value, kernels.ENTRY.value
_WIDEST = 16384  # tokens a program looks at together
_ENTRIES = 1 << 18  # 4 MiB: 64 sequences of 4,096 different tokens

Entry = tuple[int, int, int, int]  # token, marks, and the bits of two float32: bias, frequency penalty times count
Words = NDArray[np.int32]


class Shaping:
    """Heads and entries of a round on the host and on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        sizes = ((rows, _HEAD), (_ENTRIES, _ENTRY))
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for size in sizes]
        self._device = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        self.heads: Words = self._host[0].numpy()
        self._entries: Words = self._host[1].numpy()
        self._placed = self._used = 0

    def clear(self) -> None:
        """Forget the last round."""
        self._placed = self._used = 0

    def place(self, head: Words, rows: int, entries: int) -> range | None:
        """Heads for so many rows, all alike so far; None where they or so many entries do not fit."""
        first, last = self._placed, self._placed + rows
        if last > len(self.heads) or self._used + entries > len(self._entries):
            return None
        self.heads[first:last] = head
        self._placed = last
        return range(first, last)

    def add(self, entries: Words | Sequence[Entry]) -> tuple[int, int]:
        """Take entries in; from and to."""
        begin = self._used
        self._used += len(entries)
        if self._used > begin:
            self._entries[begin : self._used] = entries
        return begin, self._used

    def send(self) -> None:
        """Move what was taken in to the device."""
        for host, device, used in zip(self._host, self._device, (self._placed, self._used), strict=True):
            if used:
                device[:used].copy_(host[:used], non_blocking=True)

    def choose(self, logits: Tensor, paged: Paged, out: Tensor | None = None) -> Tensor:
        """The choice (N,) int32 of every row, -1 where there is none."""
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, VOCAB_TILE)
        device = logits.device
        adjusted = torch.empty_like(logits)
        tops = torch.empty(rows * tiles, device=device, dtype=torch.float64)
        ids = torch.empty(rows * tiles, device=device, dtype=torch.int32)
        peaks = torch.empty(rows * tiles, device=device)
        chosen = torch.empty(rows, device=device, dtype=torch.int32) if out is None else out
        heads, entries = self._device
        asked = (paged.temperatures, paged.prefixes, paged.positions, paged.shaped, heads)
        kernels.shaped_tiles[(rows, tiles)](logits, adjusted, *asked, entries, tops, ids, peaks, vocab, tiles, VOCAB_TILE)
        kernels.shaped_winner[(rows,)](
            logits, adjusted, *asked, heads.view(torch.float64), tops, ids, peaks, chosen, vocab, tiles,
            max(int(triton.next_power_of_2(tiles)), 2), VOCAB_TILE, min(int(triton.next_power_of_2(vocab)), _WIDEST),
            num_warps=16,
        )  # fmt: skip
        return chosen
