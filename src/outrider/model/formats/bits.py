"""Integers and four-bit floats that formats pack into bytes and words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["E2M1", "fields", "packed_words", "unpacked"]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def fields(packed: Tensor, bits: int) -> Tensor:
    """The fields of each byte beside each other, lowest first: (..., n) uint8 -> (..., n * 8 / bits)."""
    return torch.stack([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1).flatten(-2)


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The unsigned fields of 32-bit words as bytes, lowest first, beside each other along a dimension of a matrix."""
    assert words.dtype == torch.int32
    lines = words.transpose(dim, -1).contiguous()
    return fields(lines.view(torch.uint8), bits).transpose(dim, -1)  # the bytes of little-endian words are in order


def packed_words(values: Tensor, bits: int) -> Tensor:
    """Unsigned bytes (rows, n) as 32-bit words of fields, lowest first; the last word of a row is filled up with zeros."""
    values = F.pad(values, (0, -values.shape[1] % (32 // bits))).view(len(values), -1, 8 // bits)
    packed = values[..., 0].clone()
    for field in range(1, 8 // bits):
        packed |= values[..., field] << field * bits
    return packed.view(torch.int32)
