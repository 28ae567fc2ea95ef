"""Weight matrices in the native core's layout; ops/cpu/linear.h explains the layout."""

from __future__ import annotations

import mmap
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.blocks import StoredBlocks
from outrider.ops.groups import Grouped, layout_of

if TYPE_CHECKING:
    from outrider.ops.native import Core

__all__ = ["KINDS", "PANEL", "Arena", "Packed", "pack", "pack_groups"]

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
PANEL = 16  # columns
_STEP = 4  # bytes of a column's weights in a step
_UNIT = 16  # steps that panels are filled up to
_BLOCK = 4  # steps
_HUGE, _ARENA = 2 << 20, 32 << 20
_COUNTS, _RAW, _12BIT, _LISTED = range(4)  # Make of pack.h
_OUTPUTS = ("to", "scale", "counts", "codes", "escaped", "listed", "order")


_NONE = torch.empty(0)


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
    group_blocks: int = 1  # blocks of a group of integers
    offset: int = 0  # of integers in groups
    panel_stride: int = 0  # bytes of a panel of groups; 0: there are none
    inputs: Tensor = _NONE  # of groups: the input that each place reads, int32, where they are not in order


class Arena:
    """Memory in huge pages where the kernel grants them. Matrices packed one after the other share pages, so that small
    matrices have huge pages too. Address translation of 4 KB pages costs 3 to 5 % of a forward.
    """

    def __init__(self) -> None:
        self._left = self._before = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if size > len(self._left):
            memory = mmap.mmap(-1, max(size, _ARENA) // _HUGE * _HUGE + 2 * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # not every system has them
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
            self._left = self._left[-self._left.data_ptr() % _HUGE :]
        taken, self._left, self._before = self._left[:size], self._left[-(-size // 64) * 64 :], self._left
        return taken

    def give_back(self, taken: Tensor) -> None:
        """Return what was taken last."""
        if taken.data_ptr() == self._before.data_ptr():
            self._left = self._before


_arena = Arena()


def pack(
    core: Core,
    kind: str,
    weight: Tensor,
    bias: Tensor | None,
    paired: bool,
    pack_12bit: bool,
    order: Tensor | None = None,
    arena: Arena | None = None,
) -> Packed:
    """A matrix (columns, inner), read where it lies. `order` is the row of each column, where they are not in order.

    Panels of a paired one alternate between its halves: gate 0, up 0, gate 1, ...
    int8 scales the largest magnitude of a column to 127. With `pack_12bit`, bf16 weights are packed to 12 bits where nearly
    all fit. Memory comes from an arena, by default the common one, or from its own allocation if the core isolates matrices.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.stride(1) != 1:
        weight = weight.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).contiguous()
    size, halves = {"int8": 1, "float32": 4, "bfloat16": 2}[kind], 2 if paired else 1
    panels = halves * -(-weight.shape[0] // (halves * PANEL))
    steps = -(-weight.shape[1] * size // (_STEP * _UNIT)) * _UNIT
    none = torch.empty(0)
    biases = none if bias is None else _in_panels((bias if order is None else bias[order]).detach().float(), halves)
    source = _Source(core, KINDS[kind], weight, halves, panels, steps, order, arena or _arena)
    in_12_bits = _pack_12bit(source) if pack_12bit and core.packs_12bit and kind == "bfloat16" else None
    if in_12_bits is not None:
        weights, high, escaped, first, raw = in_12_bits
        return Packed(panels, steps, weights, biases, none, high, escaped, first, raw)
    weights, scale = source.room(_STEP), torch.zeros(panels * PANEL) if kind == "int8" else none
    source.make(_RAW, to=weights, scale=scale)
    return Packed(panels, steps, weights, biases, scale, none, none, none, none)


class _Source(NamedTuple):
    """A matrix that the core packs."""

    core: Core
    kind: int
    weight: Tensor
    halves: int
    panels: int
    steps: int
    order: Tensor | None
    arena: Arena

    def make(self, what: int, **tensors: Tensor) -> None:
        """Call the core with a Packing of pack.h, whose fields all have 64 bits."""
        weight, listed = self.weight, len(tensors.get("listed", ()))
        if self.order is not None:
            tensors["order"] = self.order
        sizes = (*weight.shape, self.halves, self.panels, self.steps)
        where = (weight.data_ptr(), weight.stride(0) * weight.element_size(), *sizes)
        outputs = (tensors[name].data_ptr() if name in tensors else 0 for name in _OUTPUTS)
        spec = array("q", (what, self.kind, weight.dtype == torch.bfloat16, *where, *outputs, listed))
        if self.core.pack(spec.buffer_info()[0], self.core.threads):
            raise MemoryError("the native core has too little memory to pack a matrix")

    def room(self, step: int) -> Tensor:
        """Memory for the weights, in bytes for every column of a step."""
        return self.memory(self.panels * self.steps * PANEL * step)

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8) if self.core.isolates_matrices else self.arena.take(size)


def pack_groups(
    core: Core, matrix: Grouped | StoredBlocks, bias: Tensor | None, rows: Tensor, arena: Arena | None = None
) -> tuple[int, Packed]:
    """The kind and the panels of a matrix in groups; `rows` (panels, 16) are its columns in each, -1 where there is none."""
    kind, steps, group_blocks, stride, blocks = layout_of(matrix)
    size = len(rows) * stride
    weights = torch.empty(size, dtype=torch.uint8) if core.isolates_matrices else (arena or _arena).take(size)
    power, rows = torch.empty(rows.numel()), rows.contiguous()
    order = _NONE
    if isinstance(matrix, Grouped):
        least = None if matrix.least is None else matrix.least.contiguous()
        source: tuple[Tensor | None, ...] = (matrix.codes.contiguous(), matrix.scale.contiguous(), least, None, None)
        order = _NONE if matrix.inputs is None else matrix.inputs.int().contiguous()
        groups = matrix.scale.shape[1]
    else:
        source, groups = (None, None, None, matrix.address, matrix.kind), -(-matrix.shape[1] // matrix.size)
    addresses = [0 if part is None else part.data_ptr() for part in (*source, rows)]
    sizes = (matrix.shape[1], groups, len(rows), blocks, group_blocks, matrix.bits, stride, matrix.has_least, matrix.offset)
    spec = array("q", (*addresses, *sizes, weights.data_ptr(), power.data_ptr()))
    if core.pack_groups(spec.buffer_info()[0], core.threads):
        raise MemoryError("the native core has too little memory to pack a matrix")
    biases = _NONE if bias is None else torch.where(rows < 0, 0.0, bias.detach().float()[rows.clamp(min=0)]).flatten()
    none = (_NONE,) * 4
    return kind, Packed(len(rows), steps, weights, biases, power, *none, group_blocks, matrix.offset, stride, order)


def _in_panels(bias: Tensor, halves: int) -> Tensor:
    """A bias for every packed column, filled up with zeros."""
    return F.pad(bias.view(halves, -1), (0, -(len(bias) // halves) % PANEL)).view(halves, -1, PANEL).transpose(0, 1).flatten()


def _pack_12bit(source: _Source) -> tuple[Tensor, ...] | None:
    """12-bit packed bf16 (lossless): blocks, high bytes, escapes and raw blocks; None where too many blocks escape.

    The high byte of a bf16 value is its sign and all but one bit of its exponent, and sixteen of them cover nearly all
    weights of a matrix. A packed block has 128 low bytes and 128 four-bit codes of high bytes. That is a quarter less to
    read, decoded in registers to the same bits. Blocks with other high bytes escape: they are stored raw beside the stream.
    A matrix is not packed where one block in sixteen or more escapes.
    """
    counts = torch.zeros(256, dtype=torch.int64)
    source.make(_COUNTS, counts=counts)
    high = counts.argsort(descending=True, stable=True)[:16]
    codes = torch.full((256,), 255, dtype=torch.uint8).index_put((high,), torch.arange(16, dtype=torch.uint8))
    escaped = torch.empty(source.panels, source.steps // _BLOCK, dtype=torch.uint8)
    packed = source.room(_STEP - 1)
    source.make(_12BIT, to=packed, codes=codes, escaped=escaped)
    listed = escaped.flatten().nonzero().flatten()
    if len(listed) * 16 >= escaped.numel():
        source.arena.give_back(packed)
        return None
    raw = source.memory(len(listed) * _BLOCK * PANEL * _STEP)  # not from the heap, which would keep holes of temporary tensors
    source.make(_LISTED, to=raw, listed=listed)
    block = F.pad(escaped, (0, 1), value=1).nonzero()[:, 1]  # one more of each panel ends its list
    ends = (block == escaped.shape[1]).nonzero().flatten()
    first = F.pad(ends[:-1] + 1, (1, 0))
    block = block.where(block < escaped.shape[1], -1).int()
    return packed, high.to(torch.uint8).repeat(4), block, first.int(), raw
