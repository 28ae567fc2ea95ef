"""Calls of the attention kernels from torch tensors, and the sizes of their scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import attention
from outrider.ops.cuda.attention import BLOCK, SEGMENT

if TYPE_CHECKING:
    from outrider.ops.cuda.launch import AttentionMetadata, Shape

__all__ = ["AttentionKernels", "scratch_slots"]

MAX_SLOTS = 8192  # partial results of one segment of one row, unless there are more rows
_MIN_SHARE = 4  # slots that each row has at least
_PROGRAMS = 1056  # of one launch over items: eight on each of 132 multiprocessors
_LOG2_E = 1.4426950408889634


def scratch_slots(rows: int, positions: int) -> int:
    """Slots of the scratch of `rows` decode rows, none of which has more than `positions` positions."""
    return min(rows * -(-positions // SEGMENT), max(MAX_SLOTS, rows * _MIN_SHARE))


class AttentionKernels:
    """Attention of one model's heads over paged KV."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._group = group = shape.heads // shape.kv_heads
        self._padded = max(16, int(triton.next_power_of_2(shape.head)))
        self._alone = max(16, int(triton.next_power_of_2(group)))  # a tile of one row
        self._tile = max(32, self._alone)
        self._rows = self._tile // group  # of a tile that shares segments
        self._chunk_tile = max(128 if self._padded <= 128 else 64, self._alone)
        self.chunk_tokens = self._chunk_tile // group
        narrow = self._padded <= 128 and dtype == torch.bfloat16
        self._stages, self._chunk_stages = (3, 5) if narrow else (1, 1)  # as far as shared memory holds keys and values
        self._warps, self._chunk_warps = 4 if self._padded * self._tile <= 64 * 128 else 8, 8
        self._registers = 128 if narrow and self._tile == 32 else None  # of a thread, so that four programs share a multiprocessor
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def _scales(self, soft_cap: float | None) -> tuple[float, float]:
        """What makes scores powers of two, and what `_tanh` multiplies by."""
        scale = self.shape.head**-0.5
        if soft_cap is None:
            return scale * _LOG2_E, 0.0
        return soft_cap * _LOG2_E, -2.0 * _LOG2_E * scale / soft_cap

    def _sizes(self, window: int | None, soft_cap: float | None) -> dict[str, object]:
        s = self.shape
        return {
            "KV_HEADS": s.kv_heads, "GROUP": self._group, "HEAD": s.head, "PADDED": self._padded, "PAGE": s.page,
            "BLOCK": BLOCK, "SEGMENT": SEGMENT, "WINDOW": window or 0, "CAPPED": soft_cap is not None,
            "PRECISION": self._precision,
        }  # fmt: skip

    def rows(
        self, q: Tensor, pool: tuple[Tensor, Tensor], meta: AttentionMetadata, out: Tensor, window: int | None,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        """Attention of single rows, draft nodes among them."""
        s, rows, width = self.shape, len(q), meta.table.shape[1]
        slots, items = self._work(meta, rows, window)
        count = scratch_slots(rows, width * s.page)
        tops, totals = (torch.empty(count * s.heads, device=q.device) for _ in range(2))
        mixes = torch.empty(count * s.heads, s.head, device=q.device)
        attention.attend_items[(min(count, -(-_PROGRAMS // s.kv_heads)), s.kv_heads)](
            q, *pool, meta.table, meta.sequences, meta.positions, meta.roots, meta.firsts, meta.ancestors, slots, items,
            tops, totals, mixes, rows, width, meta.ancestors.shape[1], *self._scales(soft_cap),
            ROWS=self._rows, TILE=self._tile, ALONE=self._alone, **self._sizes(window, soft_cap),
            num_warps=self._warps, num_stages=self._stages, maxnreg=self._registers,
        )  # fmt: skip
        attention.merge_segments[(rows, s.heads)](
            slots, tops, totals, mixes, out, rows, s.heads, s.head, self._padded, 16 if self._padded <= 128 else 8, num_warps=1
        )

    def _work(self, meta: AttentionMetadata, rows: int, window: int | None) -> tuple[Tensor, Tensor]:
        """The slots and items of a forward's rows, made once where the metadata keeps them."""
        key = (self._rows, window)
        if meta.work is not None and key in meta.work:
            return meta.work[key]
        count = scratch_slots(rows, meta.table.shape[1] * self.shape.page)
        work, slots = (torch.empty(n, rows, dtype=torch.int32, device=meta.tokens.device) for n in (7, 3))
        items = torch.empty(1 + 3 * count, dtype=torch.int32, device=meta.tokens.device)
        attention.count_work[(rows,)](
            meta.sequences, meta.positions, meta.roots, meta.firsts, work, rows, self._rows,
            int(triton.next_power_of_2(self._rows)), SEGMENT, window or 0, num_warps=1,
        )  # fmt: skip
        attention.list_work[(rows,)](work, slots, items, rows, count, int(triton.next_power_of_2(rows)))
        if meta.work is not None:
            meta.work[key] = slots, items
        return slots, items

    def chunks(
        self, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, chunks: Tensor, out: Tensor, window: int | None,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        """Attention of runs of tokens; `chunks` as attend_chunks reads them, at most `chunk_tokens` each."""
        attention.attend_chunks[(len(chunks), self.shape.kv_heads)](
            q, *pool, table, chunks, out, table.shape[1], *self._scales(soft_cap),
            TILE=self._chunk_tile, **self._sizes(window, soft_cap), num_warps=self._chunk_warps, num_stages=self._chunk_stages,
        )  # fmt: skip
