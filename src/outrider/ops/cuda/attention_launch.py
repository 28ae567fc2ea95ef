"""Calls of the attention kernels from torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import attention, segments

if TYPE_CHECKING:
    from outrider.ops.cuda.launch import AttentionMetadata, Shape

__all__ = ["AttentionKernels"]

_PROGRAMS = 1056  # of a launch over items of rows: eight on each of 132 multiprocessors
_TILE_PROGRAMS = 528  # over items of tiles
_LOG2_E = 1.4426950408889634


class AttentionKernels:
    """Attention of one model's heads over paged KV."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._group = group = shape.heads // shape.kv_heads
        self._padded = max(16, int(triton.next_power_of_2(shape.head)))
        self._alone = max(16, int(triton.next_power_of_2(group)))  # a tile of one row
        self._together = max(64, self._alone)  # a tile of rows that share segments
        self._rows = self._together // group
        self._chunk_tile = max(128 if self._padded <= 128 else 64, self._alone)
        self.chunk_tokens = self._chunk_tile // group
        narrow = self._padded <= 128 and dtype == torch.bfloat16
        # as far as shared memory holds keys and values
        self._stages, self._together_stages = (5, 3) if narrow else (1, 1)
        self._warps, self._together_warps = (
            4 if self._padded * tile <= 64 * 128 else 8 for tile in (self._alone, self._together)
        )
        self._merged = 16 if self._padded <= 128 else 8  # segments that a merge reads at once
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def _scales(self, soft_cap: float | None) -> tuple[float, float]:
        """What makes scores powers of two, and what `_tanh` multiplies by."""
        scale = self.shape.head**-0.5
        if soft_cap is None:
            return scale * _LOG2_E, 0.0
        return soft_cap * _LOG2_E, -2.0 * _LOG2_E * scale / soft_cap

    def _sizes(self, soft_cap: float | None) -> dict[str, object]:
        s = self.shape
        return {
            "KV_HEADS": s.kv_heads, "GROUP": self._group, "HEAD": s.head, "PADDED": self._padded, "PAGE": s.page,
            "BLOCK": segments.BLOCK, "SEGMENT": segments.SEGMENT, "CAPPED": soft_cap is not None, "PRECISION": self._precision,
        }  # fmt: skip

    def rows(
        self, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata, out: Tensor, window: int | None,
        soft_cap: float | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of single rows, draft nodes among them."""
        s, rows, width = self.shape, len(q), meta.table.shape[1]
        slots, alone, together = self._work(meta, rows, window)
        count = segments.scratch_slots(rows, width * s.page)
        tops, totals = (torch.empty(count * s.heads, device=q.device) for _ in range(2))
        partial = (tops, totals, torch.empty(count * s.heads, s.head, device=q.device))
        sizes, scales = self._sizes(soft_cap), self._scales(soft_cap)
        if rows > 1 and self._rows > 1:
            attention.attend_together[(min(count, -(-_TILE_PROGRAMS // s.kv_heads)), s.kv_heads)](
                q, *pool, meta.table, meta.sequences, slots, together, *partial, rows, width, *scales,
                ROWS=self._rows, TILE=self._together, **sizes, num_warps=self._together_warps, num_stages=self._together_stages,
            )  # fmt: skip
        attention.attend_alone[(min(count, -(-_PROGRAMS // s.kv_heads)), s.kv_heads)](
            q, *pool, meta.table, meta.sequences, meta.positions, meta.roots, meta.firsts, meta.ancestors, alone, *partial,
            width, meta.ancestors.shape[1], *scales, TILE=self._alone, WINDOW=window or 0, **sizes,
            num_warps=self._warps, num_stages=self._stages,
        )  # fmt: skip
        attention.merge_segments[(rows, s.heads)](
            slots, *partial, out if sinks is None else sinks, out, rows, s.heads, s.head, self._padded, self._merged,
            sinks is not None, num_warps=1,
        )  # fmt: skip

    def _work(self, meta: AttentionMetadata, rows: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of a forward's rows, and the items of rows and of tiles; made once where the metadata keeps them."""
        key = (self._rows, window)
        if meta.work is not None and key in meta.work:
            return meta.work[key]
        count = segments.scratch_slots(rows, meta.table.shape[1] * self.shape.page)
        device = meta.tokens.device
        work, slots = (torch.empty(n, rows, dtype=torch.int32, device=device) for n in (7, 3))
        alone, together = (torch.empty(1 + 4 * count, dtype=torch.int32, device=device) for _ in range(2))
        attention.count_work[(rows,)](
            meta.sequences, meta.positions, meta.roots, meta.firsts, work, rows, self._rows,
            int(triton.next_power_of_2(self._rows)), segments.SEGMENT, window or 0, num_warps=1,
        )  # fmt: skip
        attention.list_work[(rows,)](work, slots, alone, together, rows, count, int(triton.next_power_of_2(rows)))
        if meta.work is not None:
            meta.work[key] = slots, alone, together
        return slots, alone, together

    def chunks(
        self, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, chunks: Tensor, out: Tensor, window: int | None,
        soft_cap: float | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attention of runs of tokens; `chunks` as attend_chunks reads them, at most `chunk_tokens` each."""
        attention.attend_chunks[(len(chunks), self.shape.kv_heads)](
            q, *pool, table, chunks, out if sinks is None else sinks, out, table.shape[1], *self._scales(soft_cap),
            TILE=self._chunk_tile, WINDOW=window or 0, SINKS=sinks is not None, **self._sizes(soft_cap), num_warps=8,
            num_stages=self._stages,
        )  # fmt: skip
