"""The KV tensors of one model: a pool of pages per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidParameter

__all__ = ["KVPool", "Slots", "in_int8"]

_INT8_SLOTS = 16  # the native core widens whole vectors of slots
Slots = tuple[Tensor, Tensor] | tuple[int, int]  # pages and offsets, of several rows or of one


class KVPool:
    """Keys and values of every layer, (layers, pages, KV heads, page_size, width) float32.

    They are float32 so that attention reads pages in place without widening a copy of the context. The width is head_dim
    padded with zeros to a multiple of 16: matrix libraries treat rows differently at odd widths. Slot s lies in page
    s // page_size at offset s % page_size. The native core has another layout inside a page and head: see `keep_words`.

    With `int8` keys and values become integers with a scale for each token and head as they are written. The layout of torch
    holds their products, the core's the integers.
    """

    def __init__(self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, int8: bool = False) -> None:
        if int8 and page_size % _INT8_SLOTS:
            raise InvalidParameter("page_size", f"{page_size} is not a multiple of {_INT8_SLOTS}, which KV in int8 needs")
        self.int8 = int8
        self.page_size = page_size
        self.pages = pages
        self.head_dim = head_dim
        shape = (layers, pages, kv_heads, page_size, _filled(head_dim))
        self.keys, self.values = _zeros(shape), _zeros(shape)
        self._layers = list(zip(self.keys, self.values, strict=True))
        self._per_word = 0  # values per 32-bit word of the native core's layout; 0: the layout of torch

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, value_bytes: int = 4) -> int:
        """Bytes of a slot in all layers; see `value_bytes`. Values of one byte have a scale of four for each head."""
        scale = 4 if value_bytes == 1 else 0
        return 2 * layers * kv_heads * (value_bytes * _filled(head_dim) + scale)

    @staticmethod
    def value_bytes(bf16: bool, page_size: int, int8: bool = False) -> int:
        """Bytes of one value in the native core's layout. Two slots of bf16 values share a word, so pages of odd size stay
        float32.
        """
        return 1 if int8 else 2 if bf16 and page_size % 2 == 0 else 4

    @property
    def token_bytes(self) -> int:
        """Bytes of a slot in all layers."""
        return (self.keys.nbytes + self.values.nbytes) // (self.pages * self.page_size)

    def keep_words(self, bf16: bool) -> None:
        """Switch to the layout of ops/cpu/attention.h: keys as [width][slot], values as [slot][width], in words of one
        float32, of two bf16 or of four int8 values, and behind the latter a word for the scale of each slot. The pool must be
        empty, or have that layout already.
        """
        per_word = 4 // self.value_bytes(bf16, self.page_size, self.int8)
        if self._per_word == per_word:
            return
        assert self._per_word == 0, "a pool has one layout"
        layers, pages, kv_heads, size, width = self.keys.shape
        outer, self._per_word = (layers, pages, kv_heads), per_word
        dtype = {1: torch.float32, 2: torch.bfloat16, 4: torch.int8}[per_word]
        scales = 1 if self.int8 else 0
        self.keys = _zeros((*outer, width // per_word + scales, size, per_word), dtype)
        self.values = _zeros((*outer, size * width + scales * size * per_word), dtype)
        self._layers = list(zip(self.keys, self.values, strict=True))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self._layers[layer]

    def slots(self, pages: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Physical slots of a sequence's storage positions."""
        size = self.page_size
        return [pages[p // size] * size + p % size for p in positions]

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Store rows (N, KV heads, d) at their pages and offsets.

        Rows that do not see a slot multiply its value by zero, which gives NaN for a value that is not finite. Such a value
        is stored as zero and its key as NaN, so that only rows that see the slot have a result that is not finite.
        """
        page, offset = slots
        if not math.isfinite((keys.sum() + values.sum()).item()):
            sound = (keys.isfinite() & values.isfinite()).all(-1, keepdim=True)
            keys, values = keys.where(sound, torch.nan), values.where(sound, 0.0)
        if self.int8:
            keys, values = in_int8(keys), in_int8(values)
        for pool, rows in zip(self._layers[layer], (keys, values), strict=True):
            pool[page, :, offset, : self.head_dim] = rows

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slots to slots in every layer; sources are read before any target is written."""
        if not source:
            return
        src, dst, size, per_word = torch.tensor(source), torch.tensor(target), self.page_size, self._per_word
        if per_word == 0:
            for pool in (self.keys, self.values):
                pool[:, dst // size, :, dst % size] = pool[:, src // size, :, src % size]
            return
        self.keys[:, dst // size, :, :, dst % size] = self.keys[:, src // size, :, :, src % size]
        to, at, codes = dst % size, src % size, size * _filled(self.head_dim)
        outer = self.values.shape[:-1]
        values = self.values[..., :codes].view(*outer, size // per_word, -1, per_word)
        values[:, dst // size, :, to // per_word, :, to % per_word] = values[:, src // size, :, at // per_word, :, at % per_word]
        if self.int8:
            scales = self.values[..., codes:].view(*outer, size, per_word)
            scales[:, dst // size, :, to] = scales[:, src // size, :, at]

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the pages, so that a NaN in them cannot reach a later owner through a masked product."""
        index = torch.tensor(list(pages), dtype=torch.int64)
        self.keys[:, index] = 0
        self.values[:, index] = 0


def in_int8(x: Tensor) -> Tensor:
    """Rows (..., d) as the integers of the native core, times their scales. Rows of NaN stay so."""
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    units = torch.where(scale > 0.0, 1.0 / scale, 0.0)
    return (x * units).round() * scale


def _zeros(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros from calloc: a large pool takes no memory until its pages are written.

    Kernels read whole vectors and may read past the last page's keys, hence 16 words of padding.
    """
    size = math.prod(shape)
    words = np.zeros(size * dtype.itemsize // 4 + 16, dtype=np.float32)
    return torch.from_numpy(words).view(dtype)[:size].view(shape)


def _filled(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
