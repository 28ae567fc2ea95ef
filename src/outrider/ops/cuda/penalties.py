"""The penalty table: parameters and token penalties of a round on the device, and the choice that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from outrider.ops.cuda import penalty_kernels as kernels
from outrider.ops.cuda.choice import VOCAB_TILE
from outrider.ops.cuda.launch import AttentionMetadata

__all__ = ["ADJUSTS", "BANS", "COUNTED", "FILTERS", "SEEN", "STOPS", "PenaltyTable", "TokenPenalty"]

ADJUSTS, FILTERS, BANS = kernels.ADJUSTS.value, kernels.FILTERS.value, kernels.BANS.value
SEEN, COUNTED, STOPS = kernels.SEEN.value, kernels.COUNTED.value, kernels.STOPS.value
_ROW_PARAMS, _PENALTY = kernels.ROW_PARAMS.value, kernels.PENALTY.value
_MAX_SCAN_TOKENS = 16384  # tokens that a program reads together
_MAX_PENALTIES = 1 << 18  # 4 MiB: 64 sequences of 4,096 different tokens

TokenPenalty = tuple[int, int, int, int]  # token, flags, and the bits of two float32: bias, frequency penalty times count
Words = NDArray[np.int32]


class PenaltyTable:
    """Row parameters and token penalties of a round, on the host and on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        sizes = ((rows, _ROW_PARAMS), (_MAX_PENALTIES, _PENALTY))
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for size in sizes]
        self._device = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        self.row_params: Words = self._host[0].numpy()
        self._penalties: Words = self._host[1].numpy()
        self._placed = self._used = 0
        self._sent: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Forget the last round, once it has been sent."""
        if self._sent is not None:
            self._sent.synchronize()
        self._placed = self._used = 0

    def place(self, params_words: Words, rows: int, penalties: int) -> range | None:
        """Reserve `rows` rows with equal parameters; None where they or that many token penalties do not fit."""
        first, last = self._placed, self._placed + rows
        if last > len(self.row_params) or self._used + penalties > len(self._penalties):
            return None
        self.row_params[first:last] = params_words
        self._placed = last
        return range(first, last)

    def add(self, penalties: Words | Sequence[TokenPenalty]) -> tuple[int, int]:
        """Append token penalties. Returns the first index and the one after the last."""
        begin = self._used
        self._used += len(penalties)
        if self._used > begin:
            self._penalties[begin : self._used] = penalties
        return begin, self._used

    def send(self) -> None:
        """Copy the round's rows and penalties to the device."""
        for host, device, used in zip(self._host, self._device, (self._placed, self._used), strict=True):
            if used:
                device[:used].copy_(host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def choose(self, logits: Tensor, meta: AttentionMetadata, out: Tensor | None = None) -> Tensor:
        """The choice (N,) int32 of every row, -1 where there is none."""
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, VOCAB_TILE)
        device = logits.device
        adjusted = torch.empty_like(logits)
        tops = torch.empty(rows * tiles, device=device, dtype=torch.float64)
        ids = torch.empty(rows * tiles, device=device, dtype=torch.int32)
        peaks = torch.empty(rows * tiles, device=device)
        chosen = torch.empty(rows, device=device, dtype=torch.int32) if out is None else out
        row_params, penalties = self._device
        params = (meta.temperatures, meta.prefixes, meta.positions, meta.param_rows, row_params)
        kernels.penalised_tiles[(rows, tiles)](logits, adjusted, *params, penalties, tops, ids, peaks, vocab, tiles, VOCAB_TILE)
        kernels.penalised_winner[(rows,)](
            logits, adjusted, *params, row_params.view(torch.float64), tops, ids, peaks, chosen, vocab, tiles,
            max(int(triton.next_power_of_2(tiles)), 2), VOCAB_TILE, min(int(triton.next_power_of_2(vocab)), _MAX_SCAN_TOKENS),
            num_warps=16,
        )  # fmt: skip
        return chosen
