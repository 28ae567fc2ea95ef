"""Weight matrices as the native core reads them; ops/cpu/linear.h says why they lie so."""

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
_AT_ONCE = 1 << 18  # weights that are packed while they lie in a cache


class Packed(NamedTuple):
    """A matrix in panels of 16 columns. What it has not got is empty."""

    panels: int
    steps: int
    weights: Tensor  # bytes: [panels][steps][16 columns][4 / size values], or thin blocks
    bias: Tensor  # per packed column
    scale: Tensor  # likewise, of int8
    high: Tensor  # of thin weights: their sixteen high bytes, four times,
    escaped: Tensor  # the blocks that need others, behind each panel's -1,
    first_escaped: Tensor  # where a panel's begin,
    whole: Tensor  # and these blocks as they are


class _Arena:
    """Memory in huge pages where the kernel grants them: what is packed in a row lies in a row, so that small matrices
    have them too. Looking up pages of 4 KB costs 3 to 5 % of a forward.
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
        piece, self._left = self._left[:size], self._left[-(-size // 64) * 64 :]
        return piece


_arena = _Arena()


def pack(kind: str, weight: Tensor, bias: Tensor | None, paired: bool, thin: bool, apart: bool = False) -> Packed:
    """A matrix (columns, inner), float32 or bf16. Panels of a paired one alternate between its halves: gate 0, up 0, gate 1, ...

    int8 takes the largest magnitude of a column as 127. bf16 weights become `thin` where nearly all fit. Memory comes from
    a common arena unless matrices shall lie `apart`.
    """
    size = 1 if kind == "int8" else 4 if kind == "float32" else 2
    halves, width = 2 if paired else 1, -(-weight.shape[1] * size // (_STEP * _UNIT)) * _STEP * _UNIT // size
    panels, steps = halves * -(-weight.shape[0] // (halves * _PANEL)), width * size // _STEP
    columns, none = panels * _PANEL, torch.empty(0)
    biases = none if bias is None else _in_panels(bias.detach().float()[:, None], halves).flatten()
    scale = torch.zeros(columns) if kind == "int8" else none
    every, words = _in_panels(weight.contiguous(), halves), torch.empty(panels, steps, _PANEL, dtype=torch.int32)
    for first in range(0, panels, step := max(1, _AT_ONCE // (_PANEL * width))):
        part = every[first : first + step]
        if kind == "int8":
            part, scale[first * _PANEL : (first + len(part)) * _PANEL] = _quantised(part)
        part = F.pad(part if kind == "int8" else part.to(getattr(torch, kind)), (0, width - part.shape[2]))
        torch.transpose_copy(part.contiguous().view(torch.int32), 1, 2, out=words[first : first + step])
    found = _thinned(words) if thin and kind == "bfloat16" else None
    plain, *rest = (words.view(torch.uint8), none, none, none, none) if found is None else found
    weights = plain.flatten() if apart else _arena.take(plain.numel()).copy_(plain.flatten())
    return Packed(panels, steps, weights, biases, scale, *rest)


def _in_panels(x: Tensor, halves: int) -> Tensor:
    """(panels, 16, inner) of (columns, inner), filled up with zeros."""
    x = x.view(halves, -1, inner := x.shape[1])
    return F.pad(x, (0, 0, 0, -x.shape[1] % _PANEL)).view(halves, -1, _PANEL, inner).transpose(0, 1).reshape(-1, _PANEL, inner)


def _quantised(part: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers with 128 added, and the scales of their columns."""
    part = part.float()
    scale = part.abs().amax(2, keepdim=True) / 127.0
    return (part / scale.where(scale > 0, 1.0)).round_().add_(128).to(torch.uint8), scale.flatten()


def _thinned(words: Tensor) -> tuple[Tensor, ...] | None:
    """The high byte of a bf16 value is its sign and all but one bit of its exponent, and sixteen of them cover nearly all
    weights of a matrix. A thin block has 128 low bytes and 128 numbers of four bits that say which high byte: a quarter
    less to read, decoded in registers to the same bits. Blocks with other high bytes are kept whole beside the stream;
    None where these are one in sixteen or more.
    """
    panels, blocks = len(words), words.shape[1] // _BLOCK
    values = words.view(torch.int16).view(panels, -1)
    step = max(1, _AT_ONCE // values.shape[1])
    parts = [values[first : first + step] for first in range(0, panels, step)]
    counts = torch.stack([torch.bincount((part >> 8).to(torch.uint8).flatten(), minlength=256) for part in parts]).sum(0)
    high = counts.argsort(descending=True, stable=True)[:16].to(torch.uint8)
    table = bytearray(b"\xff" * 256)
    for code, byte in enumerate(high.tolist()):
        table[byte] = code
    thin, rare = torch.empty(panels, blocks, 3, 64, dtype=torch.uint8), []
    for i, part in enumerate(parts):
        to = thin[i * step : (i + 1) * step]
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
    return thin, high.repeat(4), block.where(block < blocks, -1).int(), first.int(), words.view(panels, blocks, -1)[others]


def _paired_bytes(values: Tensor) -> Tensor:
    """The low bytes of bf16 values. Two steps are the interleaved halves of 16-byte lanes: that is how bytes unpack to words."""
    return values.to(torch.uint8).view(torch.int64).view(-1, 2, 4).transpose(1, 2).contiguous().view(torch.uint8)
