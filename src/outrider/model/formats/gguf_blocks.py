"""Blocks of GGUF tensors, each type as ggml defines it: as integers with scales, and as float32.

A reader takes blocks as bytes, (n, bytes of a block). Values are bit for bit what `gguf.quants.dequantize` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOATS", "INTEGERS", "Floats", "GroupedBlocks", "decoded", "rounded_to_bfloat16"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class GroupedBlocks(NamedTuple):
    """Blocks whose values are scale * code - least, or scale * (code - offset) where there is no least, group by group."""

    codes: Bytes  # (n, values of a block)
    scale: Floats  # (n, groups of a block)
    least: Floats | None = None  # (n, groups of a block)
    offset: int = 0

    def values(self) -> Floats:
        """(n, values of a block)"""
        by_group = _float(self.codes).reshape(*self.scale.shape, -1)
        if self.least is None:
            return _flat((by_group - np.float32(self.offset)) * self.scale[..., None])
        return _flat(by_group * self.scale[..., None] - self.least[..., None])


_NON_LINEAR = (np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) + 128).astype(np.uint8)
_TWICE_E2M1 = (np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 12).astype(np.uint8)


def _float(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, (n, 1)."""
    return _float(np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16))


def _fields(packed: Bytes, bits: int) -> Bytes:
    """The fields of each byte, lowest first, in a dimension before the last: (..., n) -> (..., 8 / bits, n)."""
    return np.stack([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], axis=-2)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves, then high halves, of 16 bytes each: the 32 values of a block."""
    return _flat(_fields(packed, 4))


def _fifth_bits(packed: Bytes) -> Bytes:
    """One bit for each of 32 values, in the place of the value's fifth bit."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 2:]), _half(blocks, 0), offset=8)


def _q4_1(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), offset=16)


def _q5_1(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0), offset=128)


def _q2_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups of 16 values, each with a scale and a minimum of 4 bits."""
    scales = blocks[:, :16]
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    return GroupedBlocks(_flat(codes), _half(blocks, 80) * _float(scales & 15), _half(blocks, 82) * _float(scales >> 4))


def _q3_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups of 16 values with a scale of 6 bits; the third bits of the values lie apart."""
    low = _fields(blocks[:, 96:104], 4).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scale = (_float(low | high << np.uint8(4)) - 32) * _half(blocks, 108)
    codes = _flat(_fields(blocks[:, 32:96].reshape(-1, 2, 32), 2)) | _flat(_fields(blocks[:, :32], 1)) << np.uint8(2)
    return GroupedBlocks(codes, scale, offset=4)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minima of 6 bits that K-quants of 4 and 5 bits pack into 12 bytes."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 2 & 48)), 1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 2 & 48)), 1)
    return _float(scales), _float(minima)


def _scaled_by_eight(blocks: Bytes, codes: Bytes) -> GroupedBlocks:
    """Codes of 8 groups of 32, with the scales and minima of the block."""
    scales, minima = _six_bits(blocks[:, 4:16])
    return GroupedBlocks(_flat(codes), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q4_k(blocks: Bytes) -> GroupedBlocks:
    return _scaled_by_eight(blocks, _fields(blocks[:, 16:].reshape(-1, 4, 32), 4))


def _q5_k(blocks: Bytes) -> GroupedBlocks:
    low = _flat(_fields(blocks[:, 48:].reshape(-1, 4, 32), 4))
    return _scaled_by_eight(blocks, low | _flat(_fields(blocks[:, 16:48], 1)) << np.uint8(4))


def _q6_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups of 16 values with a scale of 8 bits."""
    low = _flat(_fields(blocks[:, :128].reshape(-1, 2, 64), 4))
    high = _flat(_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2))
    scale = _half(blocks, 208) * _float(blocks[:, 192:208].view(np.int8))
    return GroupedBlocks(low | high << np.uint8(4), scale, offset=32)


def _iq4_nl(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_NON_LINEAR[_nibbles(blocks[:, 2:])], _half(blocks, 0), offset=128)


def _iq4_xs(blocks: Bytes) -> GroupedBlocks:
    """8 groups of 32 values of the non-linear table, with scales of 6 bits."""
    low = _flat(_fields(blocks[:, 4:8, None], 4))
    high = _flat(_fields(blocks[:, 2:4, None], 2))
    scale = _half(blocks, 0) * (_float(low | high << np.uint8(4)) - 32)
    return GroupedBlocks(_NON_LINEAR[_flat(_fields(blocks[:, 8:].reshape(-1, 8, 16), 4))], scale, offset=128)


def _mxfp4(blocks: Bytes) -> GroupedBlocks:
    """A power of two, then the twice-as-large values of e2m1 by half of it."""
    exponent = blocks[:, :1].astype(np.uint32)
    half = np.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23).astype(np.uint32).view(np.float32)
    return GroupedBlocks(_TWICE_E2M1[_nibbles(blocks[:, 1:])], half, offset=12)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return _float(blocks.view(np.float16))


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


FLOATS: dict[str, Callable[[Bytes], Floats]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
INTEGERS: dict[str, Callable[[Bytes], GroupedBlocks]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip


def decoded(kind: str, blocks: Bytes) -> Floats:
    """Values of blocks of a type, (n, values of a block)."""
    return FLOATS[kind](blocks) if kind in FLOATS else INTEGERS[kind](blocks).values()


def rounded_to_bfloat16(values: Floats) -> NDArray[np.int16]:
    """The bits of the nearest bfloat16 of each value, ties to even, as torch rounds. In numpy, so that threads need not meet."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    not_numbers = np.isnan(values)
    if not_numbers.any():
        rounded[not_numbers] = 0x7FC0
    return rounded.view(np.int16)
