"""Matrices in blocks of GGUF types, which the native core packs from where they lie; ops/cpu/blocks.h reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK_FORMS", "StoredBlocks"]


class BlockForm(NamedTuple):
    """A type: its number in the files, and what its values are."""

    number: int
    bits: int  # of a code
    size: int  # of a group
    offset: int | None  # of codes; None: groups have a value to subtract


BLOCK_FORMS = {
    "Q4_0": BlockForm(2, 4, 32, 8), "Q8_0": BlockForm(8, 8, 32, 128), "Q4_K": BlockForm(12, 4, 32, None),
    "Q5_K": BlockForm(13, 8, 32, None), "Q6_K": BlockForm(14, 8, 16, 32),
}  # fmt: skip
_FORM_OF = {form.number: form for form in BLOCK_FORMS.values()}


class StoredBlocks(NamedTuple):
    """A matrix (columns, inner) whose columns lie in blocks somewhere in memory. Their types may differ."""

    address: Tensor  # (columns,) int64
    kind: Tensor  # (columns,) int64, numbers of types
    inner: int
    held: tuple[object, ...]  # what the addresses lead into

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.address), self.inner)

    @property
    def forms(self) -> list[BlockForm]:
        return [_FORM_OF[number] for number in torch.unique(self.kind).tolist()]

    @property
    def size(self) -> int:
        """Inputs of a group: those of the smallest."""
        return min(form.size for form in self.forms)

    @property
    def bits(self) -> int:
        """Of a code as it is packed: codes with several offsets have one that fits all."""
        several = not self.has_least and len({form.offset for form in self.forms}) > 1
        return 8 if several else max(form.bits for form in self.forms)

    @property
    def has_least(self) -> bool:
        """Whether groups have a value to subtract: where one type has, the others' offsets become such values."""
        return any(form.offset is None for form in self.forms)

    @property
    def offset(self) -> int:
        """Of all codes, where no value is subtracted."""
        return 0 if self.has_least else max(form.offset or 0 for form in self.forms)

    def rows(self, which: Tensor) -> StoredBlocks:
        """Some of the columns, in another order."""
        return self._replace(address=self.address[which], kind=self.kind[which])

    @staticmethod
    def joined(parts: Sequence[StoredBlocks]) -> StoredBlocks | None:
        """Several matrices one below the other; None where their rows differ in length."""
        if len({part.inner for part in parts}) > 1:
            return None
        held = tuple(memory for part in parts for memory in part.held)
        return StoredBlocks(
            torch.cat([part.address for part in parts]), torch.cat([part.kind for part in parts]), parts[0].inner, held
        )
