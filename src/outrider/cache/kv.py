"""The KV tensors of one model: a pool of pages per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["KVPool"]


class KVPool:
    """Keys and values of every layer, (layers, pages, KV heads, page_size, width) float32.

    Kept in float32 so that attention reads pages in place without widening a copy of the context.
    The width is head_dim filled up with zeros to a multiple of 16: products of odd widths are where
    matrix libraries treat rows differently. Slot s lies in page s // page_size at s % page_size.
    The native core keeps its own order inside a page and head, see `keep_words`.
    """

    def __init__(self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self.head_dim = head_dim
        shape = (layers, pages, kv_heads, page_size, _filled(head_dim))
        self.keys, self.values = _zeros(shape), _zeros(shape)
        self._per_word = 0  # 0: rows of slots; 1 or 2: the native core's words

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int) -> int:
        return 2 * 4 * layers * kv_heads * _filled(head_dim)

    def keep_words(self, bf16: bool) -> None:
        """Take the layout of ops/cpu/attention.h: keys as [width][slot], values as [slot][width], in words of one
        float32 or of two bf16. Two slots of a value share a word, so odd pages stay float32. The pool must be empty,
        or be kept so already.
        """
        per_word = 2 if bf16 and self.page_size % 2 == 0 else 1
        if self._per_word == per_word:
            return
        assert self._per_word == 0, "a pool has one layout"
        layers, pages, kv_heads, size, width = self.keys.shape
        outer, self._per_word = (layers, pages, kv_heads), per_word
        flat = [
            pool.view(-1).view(torch.bfloat16)[: pool.numel()] if per_word == 2 else pool for pool in (self.keys, self.values)
        ]
        self.keys = flat[0].view(*outer, width // per_word, size, per_word)
        self.values = flat[1].view(*outer, size // per_word, width, per_word)

    def slots(self, pages: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Physical slots of a sequence's storage positions."""
        size = self.page_size
        return [pages[p // size] * size + p % size for p in positions]

    def write(self, layer: int, slots: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Store rows (N, KV heads, d) at (page, offset) pairs."""
        page, offset = slots
        self.keys[layer][page, :, offset, : self.head_dim] = keys
        self.values[layer][page, :, offset, : self.head_dim] = values

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
        to, at = dst % size, src % size
        moved = self.values[:, src // size, :, at // per_word, :, at % per_word]
        self.values[:, dst // size, :, to // per_word, :, to % per_word] = moved

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, so that a NaN in them cannot reach a later owner through a masked product."""
        index = torch.tensor(list(pages), dtype=torch.int64)
        self.keys[:, index] = 0.0
        self.values[:, index] = 0.0


def _zeros(shape: tuple[int, ...]) -> Tensor:
    """Calloc'd memory: a large pool costs nothing until its pages are written.

    Whole vectors of the last page's keys may be read past its end, hence the 16 values more.
    """
    size = math.prod(shape)
    return torch.from_numpy(np.zeros(size + 16, dtype=np.float32))[:size].view(shape)


def _filled(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
