"""MXFP4 experts of gpt-oss: two e2m1 values to a byte, and a power of two for each 32 of them.

`*_blocks` is (experts, outputs, groups, 16) and `*_scales` (experts, outputs, groups). The matrices are (experts, inputs,
outputs), as Transformers names and orders them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.model.fields import Fields
from outrider.model.formats.bits import E2M1, fields
from outrider.model.formats.parts import Parts
from outrider.ops import FourBitFloats

__all__ = ["MXFP4", "powers_of_two"]


@dataclass(frozen=True, slots=True)
class MXFP4:
    """There is nothing to set."""

    endings = ("_blocks", "_scales")
    ignored = ()
    name = ""

    @classmethod
    def read(cls, _: Fields) -> MXFP4:
        return cls()

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """(experts, inputs, outputs)"""
        experts, outputs, groups, size = parts.shape("_blocks", ("U8",), 4)
        if size != 16:
            raise ValueError(f"has groups of {2 * size} values; 32 are needed")
        parts.require("_scales", ("U8",), (experts, outputs, groups))
        return experts, groups * 32, outputs

    def integers(self, parts: Parts) -> None:
        """Its values are no integers."""

    def floats(self, parts: Parts) -> FourBitFloats:
        """The outputs of all experts one below the other."""
        experts, inputs, outputs = self.shape(parts)
        return FourBitFloats(parts["_blocks"].view(experts * outputs, inputs // 2), parts["_scales"].flatten(0, 1))

    def decode(self, parts: Parts) -> Tensor:
        """In bfloat16, which holds the values as they are."""
        experts, inputs, outputs = self.shape(parts)
        blocks, scales = parts["_blocks"], parts["_scales"]
        decoded = torch.empty(experts, inputs, outputs, dtype=torch.bfloat16)
        for expert in range(experts):  # one at a time, to need little memory beyond the result
            values = E2M1[fields(blocks[expert], 4).int()] * powers_of_two(scales[expert])[..., None]
            decoded[expert] = values.flatten(1).T
        return decoded


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 ** (byte - 127) in float32; 255 stands for NaN."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()
