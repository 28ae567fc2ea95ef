"""Matrices of small integers with a scale for each group of inputs: quantised checkpoints as they are stored.

A value is scale * code - least, or scale * (code - offset) where all groups share an offset. `Grouped` is such a matrix,
`packed` lays it out as ops/cpu/groups.h reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.blocks import StoredBlocks

__all__ = ["GROUP_STEP", "GroupLayout", "Grouped", "layout_of", "packed"]

GROUP_STEP = 16  # groups begin at multiples of it
_UNIT = 64  # inputs that a panel is filled up to
_LINE = 64  # bytes
_HALF_EXPONENT = 15  # the largest scale of a column is kept near the largest float16, so that small ones keep their bits
_LEAST_EXPONENT = -100
_SMALL, _BYTE = 4, 8  # bits of an integer
_KINDS = {(_SMALL, False): 3, (_SMALL, True): 4, (_BYTE, False): 5, (_BYTE, True): 6}


class Grouped(NamedTuple):
    """A matrix (columns, inner). `size` inputs make a group, the last of them perhaps fewer; it is a multiple of 16, or all."""

    codes: Tensor  # (columns, inner) uint8
    scale: Tensor  # (columns, groups) float32
    least: Tensor | None  # (columns, groups) float32, to subtract
    offset: int  # of all codes, where there is no `least`
    bits: int  # of the largest code: 4 or 8
    size: int
    inputs: Tensor | None = None  # (inner,) the input that each code is of; None: in order

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def has_least(self) -> bool:
        return self.least is not None

    @classmethod
    def of(cls, weight: Tensor, size: int, bits: int = _SMALL) -> Self:
        """A matrix rounded to the nearest integers; the least and the largest value of each group are met."""
        columns, inner = weight.shape
        padded = F.pad(weight.float(), (0, -inner % size)).view(columns, -1, size)
        if inner % size:  # what fills the last group up must not widen its range
            padded[:, -1, inner % size :] = padded[:, -1, :1]
        low, high = padded.amin(2), padded.amax(2)
        scale = ((high - low) / (2**bits - 1)).half().float()
        least = (-low).half().float()
        unit = torch.where(scale > 0, scale, 1.0)
        codes = ((padded + least[..., None]) / unit[..., None]).round().clamp(0, 2**bits - 1)
        return cls(codes.view(columns, -1)[:, :inner].to(torch.uint8), scale, least, 0, bits, size)

    def values(self) -> Tensor:
        """The matrix in float32."""
        inner = self.codes.shape[1]
        codes = F.pad(self.codes, (0, -inner % self.size)).view(len(self.codes), -1, self.size).float()
        if self.least is None:
            values = (codes - self.offset) * self.scale[..., None]
        else:
            values = codes * self.scale[..., None] - self.least[..., None]
        values = values.view(len(self.codes), -1)[:, :inner]
        return values if self.inputs is None else values[:, self.inputs.argsort()]

    def rows(self, which: Tensor) -> Grouped:
        """Some of the columns, in another order."""
        least = None if self.least is None else self.least[which]
        return self._replace(codes=self.codes[which], scale=self.scale[which], least=least)

    @staticmethod
    def joined(parts: Sequence[Grouped]) -> Grouped | None:
        """Several matrices one below the other; None where their groups cannot be joined."""
        size = min(part.size for part in parts)
        orders = [torch.empty(0) if part.inputs is None else part.inputs for part in parts]
        if any(part.size % size for part in parts) or len({part.codes.shape[1] for part in parts}) > 1:
            return None
        if not all(torch.equal(order, orders[0]) for order in orders):
            return None
        split = [part._split(size) for part in parts]
        if len({part.least is None for part in split}) > 1:
            split = [part._with_least() for part in split]
        offset = max(part.offset for part in split)
        bits = max(part.bits for part in split)
        if any(part.least is None and part.offset != offset for part in split):
            bits, offset = _BYTE, 128
        codes = torch.cat([part.codes if part.least is not None else part.codes + (offset - part.offset) for part in split])
        leasts = [part.least for part in split if part.least is not None]
        least = torch.cat(leasts) if leasts else None
        return Grouped(codes, torch.cat([part.scale for part in split]), least, offset, bits, size, parts[0].inputs)

    def _split(self, size: int) -> Grouped:
        """The same in smaller groups."""
        times = self.size // size
        groups = -(-self.codes.shape[1] // size)
        scale = self.scale.repeat_interleave(times, 1)[:, :groups]
        least = None if self.least is None else self.least.repeat_interleave(times, 1)[:, :groups]
        return self._replace(scale=scale, least=least, size=size)

    def _with_least(self) -> Grouped:
        return self if self.least is not None else self._replace(least=self.scale * self.offset, offset=0)


class GroupLayout(NamedTuple):
    """The format of ops/cpu/groups.h for a matrix."""

    kind: int
    steps: int
    group_blocks: int
    panel_stride: int  # bytes
    blocks: int


def layout_of(matrix: Grouped | StoredBlocks) -> GroupLayout:
    """How a matrix is laid out: its inner dimension is filled up to whole groups and whole units."""
    inner, has_least = matrix.shape[1], matrix.has_least
    size = min(matrix.size, -(-inner // _UNIT) * _UNIT)
    whole = math.lcm(_UNIT, size)
    width = -(-inner // whole) * whole
    groups = -(-width // size)
    lines = groups if has_least else -(-groups // 2)
    kind = _KINDS[matrix.bits, has_least]
    return GroupLayout(kind, width // 4, size // GROUP_STEP, lines * _LINE + width * 2 * matrix.bits, width // GROUP_STEP)


def packed(matrix: Grouped, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with the columns `rows` (panels, 16) in each panel, -1 where a panel is filled up: what the core packs, in torch.

    Returns the bytes, and for each packed column a power of two that its scales were divided by: they are kept as float16, so
    those that were float16 keep their value.
    """
    _, steps, group_blocks, _, blocks = layout_of(matrix)
    inner, width, groups = matrix.shape[1], 4 * steps, blocks // group_blocks
    absent = rows < 0
    chosen = rows.clamp(min=0).flatten()
    scale, power = _halves(matrix, chosen, groups, absent)
    codes = F.pad(matrix.codes[chosen], (0, width - inner))
    codes.view(-1, GROUP_STEP, width)[absent] = 0
    tiles = (
        codes.view(len(rows), 16, width // GROUP_STEP, 4, 4)
        .permute(0, 2, 3, 1, 4)
        .reshape(len(rows), width // GROUP_STEP, 4, _LINE)
    )
    if matrix.bits == _SMALL:
        tiles = tiles[:, :, 0::2] | tiles[:, :, 1::2] << 4
    body = tiles.reshape(len(rows), groups, -1)
    return _with_scales(body, scale, matrix.least is not None).flatten(), power


def _halves(matrix: Grouped, chosen: Tensor, groups: int, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, and values to subtract with their sign changed, as float16 (panels, groups, 16 or 32); the power of each column."""
    scale = F.pad(matrix.scale[chosen].float(), (0, groups - matrix.scale.shape[1]))
    parts = [scale]
    if matrix.least is not None:
        parts.append(-F.pad(matrix.least[chosen].float(), (0, groups - matrix.least.shape[1])))
    largest = torch.stack([part.abs().amax(1) for part in parts]).amax(0)
    sound = torch.isfinite(largest)
    exponent = torch.frexp(largest).exponent.clamp(min=_LEAST_EXPONENT) - _HALF_EXPONENT
    power = torch.where(sound & (largest > 0), torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    made = [(part / power[:, None]).half().view(-1, 16, groups).transpose(1, 2) for part in parts]
    joined = torch.cat(made, 2)
    joined.masked_fill_(absent.repeat(1, len(parts))[:, None], 0.0)
    return joined, torch.where(sound, power, torch.nan)


def _with_scales(body: Tensor, scale: Tensor, has_least: bool) -> Tensor:
    """Each group's integers (panels, groups, bytes) behind the line that has its scales."""
    panels, groups, size = body.shape
    bytes_of = scale.contiguous().view(torch.uint8).view(panels, groups, -1)
    if has_least:
        return torch.cat((bytes_of, body), 2).view(panels, -1)
    odd = groups % 2
    heads = F.pad(bytes_of, (0, 0, 0, odd)).view(panels, -1, _LINE)
    pairs = F.pad(body, (0, 0, 0, odd)).view(panels, -1, 2 * size)
    lines = torch.cat((heads, pairs), 2).view(panels, -1)
    return lines[:, : lines.shape[1] - odd * size].contiguous()
