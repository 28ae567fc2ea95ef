"""Matrices of FP8 values (e4m3) with scales, and of four-bit floats, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FourBitFloats", "ScaledFloats"]

_LARGEST = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class ScaledFloats(NamedTuple):
    """A matrix (columns, inner). A scale is of `size` inputs of the columns of one block."""

    codes: Tensor  # (columns, inner) uint8, the bits of e4m3
    scale: Tensor  # (blocks, ceil(inner / size)) float32
    block: Tensor  # (columns,) int32, the block of each column
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    @classmethod
    def of(cls, weight: Tensor) -> ScaledFloats:
        """A matrix rounded to FP8 with a scale for each column, whose largest magnitude becomes the largest of FP8."""
        values = weight.float()
        scale = values.abs().amax(1, keepdim=True) / _LARGEST
        codes = (values / torch.where(scale > 0, scale, 1.0)).to(torch.float8_e4m3fn).view(torch.uint8)
        return cls(codes, scale, torch.arange(len(values), dtype=torch.int32, device=values.device), values.shape[1])

    @classmethod
    def stored(cls, values: Tensor, scale: Tensor, block: tuple[int, int]) -> ScaledFloats:
        """FP8 values with a scale for each block of so many columns and inputs."""
        of_column = torch.arange(len(values), dtype=torch.int32) // block[0]
        return cls(values.view(torch.uint8), scale.float(), of_column, block[1])

    def values(self) -> Tensor:
        """The matrix in float32."""
        by_input = self.scale[self.block.long()].repeat_interleave(self.size, 1)[:, : self.shape[1]]
        return self.codes.view(torch.float8_e4m3fn).float() * by_input

    def rows(self, which: Tensor) -> ScaledFloats:
        """Some of the columns, in another order."""
        return self._replace(codes=self.codes[which], block=self.block[which])

    @staticmethod
    def joined(parts: Sequence[ScaledFloats]) -> ScaledFloats | None:
        """Several matrices one below the other; None where their blocks cannot be joined."""
        if len({(part.size, part.shape[1]) for part in parts}) > 1:
            return None
        blocks, before = [], 0
        for part in parts:
            blocks.append(part.block + before)
            before += len(part.scale)
        return ScaledFloats(
            torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]), torch.cat(blocks), parts[0].size
        )


class FourBitFloats(NamedTuple):
    """A matrix (columns, inner) of e2m1 values with a power of two for each group of inputs (MXFP4)."""

    codes: Tensor  # (columns, inner / 2) uint8, two inputs to a byte, the first in the low bits
    scale: Tensor  # (columns, groups) uint8, the exponents with 127 added

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], 2 * self.codes.shape[1])

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.scale.shape[1]

    def values(self) -> Tensor:
        """The matrix in float32."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)
        scale = (self.scale.int() << 23).view(torch.float32).repeat_interleave(self.size, 1)
        return torch.tensor(_E2M1, device=codes.device)[codes.int()] * scale

    def rows(self, which: Tensor) -> FourBitFloats:
        """Some of the columns, in another order."""
        return FourBitFloats(self.codes[which], self.scale[which])
