"""Weight matrices in the native core's layout; ops/cpu/linear.h explains the layout."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KINDS", "Packed", "pack"]

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
_PANEL = 16  # columns
_STEP = 4  # bytes of a column's weights in a step
_UNIT = 16  # steps that panels are filled up to
_BLOCK = 4  # steps
_HUGE, _ARENA = 2 << 20, 32 << 20
_CACHED_WEIGHTS = 1 << 18  # weights packed at a time, so that they stay in the cache


class Packed(NamedTuple):
    """A matrix in panels of 16 columns. Tensors that do not apply are empty."""

    panels: int
    steps: int
    weights: Tensor  # bytes: [panels][steps][16 columns][4 / size values], or blocks of 12-bit packed bf16
    bias: Tensor  # per packed column
    scale: Tensor  # per packed column, of int8
    high: Tensor  # the sixteen high bytes of 12-bit packed bf16, four times
    escaped: Tensor  # numbers of the blocks with other high bytes, -1 at the end of each panel
    first_escaped: Tensor  # where each panel's list in `escaped` begins
    raw_blocks: Tensor  # the escaped blocks, not packed


class _Arena:
    """Memory in huge pages where the kernel grants them. Matrices packed one after the other share pages, so that small
    matrices have huge pages too. Address translation of 4 KB pages costs 3 to 5 % of a forward.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if size > len(self._left):
            memory = mmap.mmap(-1, max(size, _ARENA) // _HUGE * _HUGE + 2 * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # not every system has them
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
            self._left = self._left[-self._left.data_ptr() % _HUGE :]
        taken, self._left = self._left[:size], self._left[-(-size // 64) * 64 :]
        return taken


_arena = _Arena()


def pack(kind: str, weight: Tensor, bias: Tensor | None, paired: bool, pack_12bit: bool, isolated: bool = False) -> Packed:
    """A matrix (columns, inner), float32 or bf16. Panels of a paired one alternate between its halves: gate 0, up 0, gate 1, ...

    int8 scales the largest magnitude of a column to 127. With `pack_12bit`, bf16 weights are packed to 12 bits where nearly
    all fit. Memory comes from a common arena, or from its own allocation if `isolated`.
    """
    size = 1 if kind == "int8" else 4 if kind == "float32" else 2
    halves, width = 2 if paired else 1, -(-weight.shape[1] * size // (_STEP * _UNIT)) * _STEP * _UNIT // size
    panels, steps = halves * -(-weight.shape[0] // (halves * _PANEL)), width * size // _STEP
    columns, none = panels * _PANEL, torch.empty(0)
    biases = none if bias is None else _in_panels(bias.detach().float()[:, None], halves).flatten()
    scale = torch.zeros(columns) if kind == "int8" else none
    in_panels, words = _in_panels(weight.contiguous(), halves), torch.empty(panels, steps, _PANEL, dtype=torch.int32)
    for first in range(0, panels, step := max(1, _CACHED_WEIGHTS // (_PANEL * width))):
        part = in_panels[first : first + step]
        if kind == "int8":
            part, scale[first * _PANEL : (first + len(part)) * _PANEL] = _quantised(part)
        part = F.pad(part if kind == "int8" else part.to(getattr(torch, kind)), (0, width - part.shape[2]))
        torch.transpose_copy(part.contiguous().view(torch.int32), 1, 2, out=words[first : first + step])
    packed = _pack_12bit(words) if pack_12bit and kind == "bfloat16" else None
    blocks, *tables = (words.view(torch.uint8), none, none, none, none) if packed is None else packed
    weights = blocks.flatten() if isolated else _arena.take(blocks.numel()).copy_(blocks.flatten())
    return Packed(panels, steps, weights, biases, scale, *tables)


def _in_panels(x: Tensor, halves: int) -> Tensor:
    """(panels, 16, inner) of (columns, inner), filled up with zeros."""
    x = x.view(halves, -1, inner := x.shape[1])
    return F.pad(x, (0, 0, 0, -x.shape[1] % _PANEL)).view(halves, -1, _PANEL, inner).transpose(0, 1).reshape(-1, _PANEL, inner)


def _quantised(part: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised weights with 128 added, and the scales of their columns."""
    part = part.float()
    scale = part.abs().amax(2, keepdim=True) / 127.0
    return (part / scale.where(scale > 0, 1.0)).round_().add_(128).to(torch.uint8), scale.flatten()


def _pack_12bit(words: Tensor) -> tuple[Tensor, ...] | None:
    """12-bit packed bf16 (lossless): blocks, high bytes, escapes and raw blocks; None where too many blocks escape.

    The high byte of a bf16 value is its sign and all but one bit of its exponent, and sixteen of them cover nearly all
    weights of a matrix. A packed block has 128 low bytes and 128 four-bit codes of high bytes. That is a quarter less to
    read, decoded in registers to the same bits. Blocks with other high bytes escape: they are stored raw beside the stream.
    A matrix is not packed where one block in sixteen or more escapes.
    """
    panels, blocks = len(words), words.shape[1] // _BLOCK
    values = words.view(torch.int16).view(panels, -1)
    step = max(1, _CACHED_WEIGHTS // values.shape[1])
    parts = [values[first : first + step] for first in range(0, panels, step)]
    counts = torch.stack([torch.bincount((part >> 8).to(torch.uint8).flatten(), minlength=256) for part in parts]).sum(0)
    high = counts.argsort(descending=True, stable=True)[:16].to(torch.uint8)
    table = bytearray(b"\xff" * 256)
    for code, byte in enumerate(high.tolist()):
        table[byte] = code
    packed, rare = torch.empty(panels, blocks, 3, 64, dtype=torch.uint8), []
    for i, part in enumerate(parts):
        to = packed[i * step : (i + 1) * step]
        upper = bytearray(_paired_bytes(part >> 8).numpy()).translate(table)
        codes = torch.frombuffer(upper, dtype=torch.uint8).view(-1, blocks, 2, 64)
        rare.append(codes.amax((2, 3)) > 15)
        to[:, :, :2] = _paired_bytes(part).view(-1, blocks, 2, 64)
        to[:, :, 2] = codes[:, :, 0] & 15 | codes[:, :, 1] << 4
    others = torch.cat(rare)
    if int(others.sum()) * 16 >= panels * blocks:
        return None
    block = F.pad(others, (0, 1), value=True).nonzero()[:, 1]  # one more of each panel ends its list
    ends = (block == blocks).nonzero().flatten()
    first = F.pad(ends[:-1] + 1, (1, 0))
    return packed, high.repeat(4), block.where(block < blocks, -1).int(), first.int(), words.view(panels, blocks, -1)[others]


def _paired_bytes(values: Tensor) -> Tensor:
    """The low bytes of bf16 values, interleaved within 16-byte lanes over two steps: the order of the unpack instructions."""
    return values.to(torch.uint8).view(torch.int64).view(-1, 2, 4).transpose(1, 2).contiguous().view(torch.uint8)
