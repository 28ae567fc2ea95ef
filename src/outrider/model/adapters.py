"""The LoRA adapters of a runner, by number: packed for the native core, or applied in torch row by row."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.model.decoder import Decoder, Deltas
from outrider.model.lora import LoraParts
from outrider.ops import Ops, Stack
from outrider.ops.adapters import LowRank, PackedAdapter, adapter_table, rank_dtype

__all__ = ["AdapterRows", "AdapterSlots"]

T = TypeVar("T")
AdapterRows = Sequence[tuple[slice, int]]  # rows of a forward, and the number of their adapter


class AdapterSlots:
    """Adapters by number, from 1 on. A number is free again when its adapter has been removed.

    Any thread may add and remove adapters while another runs forwards, but no row of these may have the one removed.
    """

    def __init__(self, decoder: Decoder, ops: Ops, stack: Stack | None) -> None:
        self._decoder = decoder
        self._ops = ops
        self._stack = stack
        self._lock = threading.Lock()
        self._parts: list[LoraParts | None] = []  # of torch
        self._packed: list[PackedAdapter | None] = []  # of the native core

    @property
    def dtype(self) -> torch.dtype:
        """What adapters are served in."""
        return rank_dtype(self._decoder.spec.dtype) if self._stack is not None else self._decoder.layers[0].qkv.dtype  # type: ignore[return-value]

    def add(self, parts: LoraParts) -> int:
        """Make an adapter ready for rows, and return its number."""
        with self._lock:
            if self._stack is None:
                return _put(self._parts, parts)
            core = self._ops.core
            assert core is not None
            number = _put(self._packed, PackedAdapter(core, self.dtype, self._stack.layers, parts))
            self._stack.adapters = adapter_table(self._packed)
            return number

    def remove(self, number: int) -> None:
        """Free an adapter's memory."""
        with self._lock:
            if self._stack is None:
                self._parts[number - 1] = None
                return
            self._packed[number - 1] = None
            self._stack.adapters = adapter_table(self._packed)

    def deltas(self, rows: AdapterRows) -> Deltas | None:
        """What adapters add to products in torch, for rows that have some."""
        if not rows:
            return None
        by_adapter = [(where, self._parts_of(number)) for where, number in rows]

        def add(layer: int, product: str, x: Tensor, y: Tensor) -> Tensor:
            y = y.float()
            for where, parts in by_adapter:
                for part in parts.get((layer, product), ()):
                    y[where, part.columns] += self._delta(part, x[where])
            return y

        return add

    def _parts_of(self, number: int) -> LoraParts:
        parts = self._parts[number - 1] if number <= len(self._parts) else None
        if parts is None:
            raise InvalidParameter("lora", f"the runner has no adapter of the number {number}")
        return parts

    def _delta(self, part: LowRank, x: Tensor) -> Tensor:
        """A row-invariant product of A, then of B: rows of one adapter are computed apart from all others."""
        return self._ops.linear(self._ops.linear(x, part.down).float() * part.scale, part.up).float()


def _put(slots: list[T | None], entry: T) -> int:
    """The first free slot takes the entry; numbers begin at 1."""
    for place, held in enumerate(slots):
        if held is None:
            slots[place] = entry
            return place + 1
    slots.append(entry)
    return len(slots)
