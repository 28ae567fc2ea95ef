"""Low-rank adapters in the native core's layout; ops/cpu/lora.h explains how rows use them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.native import AdapterTable, Core, LayerWeights, PackedLinear
from outrider.ops.packing import PANEL, Arena

__all__ = ["PARTS", "LowRank", "PackedAdapter", "adapter_table", "rank_dtype"]

PARTS = ("qkv", "out", "gate_up", "down")  # the products of a layer, in the order of LayerLoras in lora.h
_STEPS = 4  # of a block


class LowRank(NamedTuple):
    """What an adapter adds to some columns of a product: scale * up (down x)."""

    columns: slice  # rows of the product's matrix
    down: Tensor  # (rank, inner)
    up: Tensor  # (columns, rank)
    scale: float


def rank_dtype(kind: str) -> torch.dtype:
    """The dtype of adapters beside weights of a kind."""
    return torch.float32 if kind == "float32" else torch.bfloat16


class PackedLora:
    """An adapter's part in one product: A of all projections that the product fuses, and of B what reaches each panel."""

    def __init__(self, core: Core, dtype: torch.dtype, base: PackedLinear, parts: Sequence[LowRank], arena: Arena) -> None:
        kind, block = str(dtype).removeprefix("torch."), _STEPS * 4 // dtype.itemsize
        firsts = [0]
        for part in parts:
            firsts.append(firsts[-1] + -(-len(part.down) // block) * block)
        down, scale = torch.zeros(firsts[-1], base.inner, dtype=dtype), torch.zeros(-(-firsts[-1] // PANEL) * PANEL)
        for part, first in zip(parts, firsts, strict=False):
            down[first : first + len(part.down)] = part.down
            scale[first : first + len(part.down)] = part.scale
        up, self.start, self.first = _panels_of_up(base.columns_in_panels(), parts, firsts, dtype)
        self.down, self.scale = PackedLinear(core, kind, down, arena=arena), scale
        self.up = PackedLinear(core, kind, up, arena=arena)
        self.escaped = torch.searchsorted(self.up.escaped_blocks, self.start[:-1], out_int32=True)
        tensors = (self.scale, self.start, self.first, self.escaped)
        self._value_bytes = dtype.itemsize
        self._spec = array("q", (self.down.handle, self.up.handle, *(tensor.data_ptr() for tensor in tensors)))
        self.handle = self._spec.buffer_info()[0]

    @property
    def rank_words(self) -> int:
        """Words that hold a row's ranks."""
        return len(self.scale) * self._value_bytes // 4

    @property
    def bytes(self) -> int:
        return self.down.bytes + self.up.bytes


def _panels_of_up(
    columns: Tensor, parts: Sequence[LowRank], firsts: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """B as one panel (16, ranks of all panels), each panel's first block in it and the end, and the word of a row's ranks at
    which each begins.

    `columns` are the matrix's rows by panel (panels, 16), -1 past the end. A panel has the ranks from the first part that
    reaches one of its columns to the last.
    """
    rows, width, values = int(columns.max()) + 1, firsts[-1], 4 // dtype.itemsize
    up, part_of = torch.zeros(rows + 1, width, dtype=dtype), torch.full((rows + 1,), -1)
    for i, part in enumerate(parts):
        up[:rows][part.columns, firsts[i] : firsts[i] + len(part.down)] = part.up.to(dtype)
        part_of[:rows][part.columns] = i
    reached = part_of[columns]  # the last row, where columns are -1, stays empty
    begins, ends = torch.tensor([*firsts[:-1], width]), torch.tensor([*firsts[1:], 0])
    low, high = begins[reached].amin(1), ends[reached].amax(1)
    low = low.minimum(high)
    start = F.pad((high - low).cumsum(0), (1, 0))
    one_panel = torch.zeros(PANEL, int(start[-1]), dtype=dtype)
    for first, end in set(zip(low.tolist(), high.tolist(), strict=True)):
        panels = ((low == first) & (high == end)).nonzero().flatten()
        places = start[panels, None] + torch.arange(end - first)
        one_panel[:, places] = up[columns[panels]][:, :, first:end].transpose(0, 1)
    return one_panel, (start // (_STEPS * values)).int(), (low // values).int()


class PackedAdapter:
    """An adapter of a stack. Its memory is free when it is."""

    def __init__(
        self, core: Core, dtype: torch.dtype, layers: Sequence[LayerWeights], parts: Mapping[tuple[int, str], Sequence[LowRank]]
    ) -> None:
        """`parts` are by layer and product; what the adapter leaves alone is not among them."""
        arena = Arena()
        self._loras = {
            (i, name): PackedLora(core, dtype, getattr(layers[i], name), low_ranks, arena)
            for (i, name), low_ranks in parts.items()
        }
        places = ((i, name) for i in range(len(layers)) for name in PARTS)
        self._spec = array("q", [self._loras[place].handle if place in self._loras else 0 for place in places])
        self.handle = self._spec.buffer_info()[0]
        self.rank_words = max(lora.rank_words for lora in self._loras.values())

    @property
    def bytes(self) -> int:
        """Bytes that one row reads."""
        return sum(lora.bytes for lora in self._loras.values())


def adapter_table(adapters: Sequence[PackedAdapter | None]) -> AdapterTable:
    """The adapters of a stack by number, from 1 on."""
    held = tuple(adapters)
    words = max((adapter.rank_words for adapter in held if adapter is not None), default=0)
    return AdapterTable(array("q", [0 if adapter is None else adapter.handle for adapter in held]), words, held)
