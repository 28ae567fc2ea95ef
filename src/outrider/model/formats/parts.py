"""The stored tensors that make up one quantised matrix, and arithmetic that formats share. What does not fit is a ValueError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.ops import GROUP_STEP, Grouped

__all__ = ["FLOATS", "Integers", "PartHeader", "Parts", "block_scaled", "ceil_div"]

FLOATS = ("F32", "BF16", "F16")


class PartHeader(NamedTuple):
    """Shape and dtype of a stored tensor, the dtype as safetensors names it."""

    shape: tuple[int, ...]
    dtype: str


class Parts:
    """Stored tensors by the endings of their names, read when they are asked for."""

    def __init__(self, headers: Mapping[str, PartHeader], read: Callable[[str], Tensor]) -> None:
        self.headers, self._read = headers, read

    def __contains__(self, ending: str) -> bool:
        return ending in self.headers

    def __getitem__(self, ending: str) -> Tensor:
        return self._read(ending)

    def get(self, ending: str) -> Tensor | None:
        return self._read(ending) if ending in self.headers else None

    def shape(self, ending: str, dtypes: tuple[str, ...], dims: int | None = 2) -> tuple[int, ...]:
        """The shape of a part that must be there, in one of some dtypes and with so many dimensions, or any."""
        header = self.headers.get(ending)
        if header is None:
            raise ValueError(f"lacks {ending!r}")
        if header.dtype not in dtypes or (dims is not None and len(header.shape) != dims) or 0 in header.shape:
            wanted = f"{'' if dims is None else f'{dims} dimensions of '}{' or '.join(dtypes)}"
            raise ValueError(f"has {ending!r} of {header.dtype} {list(header.shape)}; {wanted} are needed")
        return header.shape

    def require(self, ending: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Fail unless a part has a shape."""
        found = self.shape(ending, dtypes, None)
        if found != shape:
            raise ValueError(f"has {ending!r} of shape {list(found)}; {list(shape)} is needed")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Integers(NamedTuple):
    """A matrix whose values are (integer - zero) * scale, with a scale for each row and group of columns.

    `group_of` names the group of every column; without it each `size` columns make a group, the last of them perhaps fewer.
    """

    values: Tensor  # (rows, columns)
    scales: Tensor  # (rows, groups)
    zeros: Tensor | None  # (rows, groups)
    group_of: Tensor | None  # (columns,)
    size: int
    bits: int = 16  # of the values, if they are unsigned

    def decoded(self) -> Tensor:
        """The matrix in float32."""
        values, scales, zeros, group_of, size, _ = self
        rows, columns = values.shape
        groups, scales = scales.shape[1], scales.float()
        if group_of is None and columns != groups * size:
            group_of = torch.arange(columns) // size
        if group_of is not None:
            group_of = group_of.long()
            if bool(((group_of < 0) | (group_of >= groups)).any()):
                raise ValueError(f"has columns in groups beyond the {groups} that have scales")
            shifted = values.float() if zeros is None else values.float() - zeros.float()[:, group_of]
            return shifted * scales[:, group_of]
        by_group = values.reshape(rows, groups, size).float()
        shifted = by_group if zeros is None else by_group - zeros.float()[..., None]
        return (shifted * scales[..., None]).reshape(rows, columns)

    def grouped(self) -> Grouped | None:
        """The matrix as products read it; None where it has to be decoded."""
        columns = self.values.shape[1]
        in_blocks = self.size % GROUP_STEP == 0 or self.size >= columns
        if self.bits > 8 or self.zeros is None or not in_blocks:
            return None
        codes, inputs = self.values.to(torch.uint8), None
        if self.group_of is not None:
            inputs = self.group_of.argsort(stable=True)
            if not torch.equal(self.group_of[inputs].long(), torch.arange(columns) // self.size):
                return None  # groups of other sizes
            codes = codes[:, inputs]
        first = self.zeros.flatten()[0]
        scale, bits = self.scales.float(), 4 if self.bits <= 4 else 8
        if bool((self.zeros == first).all()):
            return Grouped(codes, scale, None, int(first), bits, self.size, inputs)
        return Grouped(codes, scale, scale * self.zeros.float(), 0, bits, self.size, inputs)


def block_scaled(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """value * scale in float32, with a scale for each block of rows and columns; the last blocks may be smaller."""
    rows, columns = values.shape
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return values.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]
