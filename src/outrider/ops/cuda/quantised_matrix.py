"""Quantised matrices on the device: their forms, how they are made, and their products by the kernels of `quantised`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from outrider.ops.cuda.matrix import Epilogue, RowForm, Rows
from outrider.ops.cuda.quantised import product, quantise_rows
from outrider.ops.cuda.quantised_tiles import JOINED_ROWS, QuantisedTile, parts_of, quantised_tile_for
from outrider.ops.floats import ScaledFloats
from outrider.ops.groups import Grouped

__all__ = ["QuantisedMatrix", "fp8_matrix", "grouped_matrix", "int4_of", "int8_of"]

_BLOCK = 128  # inputs that share a scale of activations in products by blocks
_FILLED = 256  # inputs that rows of weights are filled up to a multiple of
_SMALL_GROUPS = (16, 32, 64)
_BYTE_OFFSET = 128
_LIMITS = {"fp8": 448.0, "fp8_blocks": 448.0, "int8": 127.0}  # the largest codes of activations
_LOADED = 128  # inputs of a group that is made here


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix in one of the kinds of `quantised.product`."""

    kind: str
    inner: int
    codes: Tensor  # (columns, width): uint8, int8 or FP8; two inputs to a byte in "int4"
    scale: Tensor  # (columns,), (blocks, width / 128), or of groups (groups, columns)
    zero: Tensor | None = None  # of groups (groups, columns); of blocks the block of each column (columns,) int32
    inputs: Tensor | None = None  # (inner,) the input that each code is of; None: in order
    group: int = 0
    offset: int = 0  # of codes in groups without zeros
    counts: Tensor | None = None  # of programs that have ended; zero between products

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.inner)

    @property
    def width(self) -> int:
        """The inner dimension filled up."""
        return self.codes.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.codes, self.scale, self.zero, self.inputs) if tensor is not None)

    @property
    def parts(self) -> int:
        return parts_of(self.shape[0], self.width, _FILLED if self.kind == "int4" and self.group % 64 else _BLOCK)

    @property
    def min_columns(self) -> int:
        return 64  # narrower tiles use other instructions of the tensor cores, which may round otherwise

    def over(self, tensors: Sequence[Tensor]) -> QuantisedMatrix:
        left = iter(tensors)
        codes, scale, zero, inputs = (
            None if own is None else next(left) for own in (self.codes, self.scale, self.zero, self.inputs)
        )
        assert codes is not None
        assert scale is not None
        return replace(self, codes=codes, scale=scale, zero=zero, inputs=inputs)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> QuantisedMatrix:
        codes = order(self.codes.view(torch.uint8)).view(self.codes.dtype)
        if self.kind.startswith("fp8_block"):
            return replace(self, codes=codes, zero=None if self.zero is None else order(self.zero))
        scale, zero = (None if x is None else _by_columns(x, order) for x in (self.scale, self.zero))
        assert scale is not None
        return replace(self, codes=codes, scale=scale, zero=zero)

    def splits(self, rows: int) -> bool:
        return rows <= JOINED_ROWS and self.parts > 1

    def by_library(self, x: Rows, bias: Tensor | None) -> None:
        """No library multiplies these."""

    @property
    def reads(self) -> RowForm | None:
        if self.kind not in _LIMITS:
            return None
        block = _BLOCK if self.kind == "fp8_blocks" else int(triton.next_power_of_2(self.width))
        return RowForm(self.codes.dtype, self.width, block, _LIMITS[self.kind])

    def multiply(self, x: Rows, out: Tensor, then: Epilogue, tile: QuantisedTile | None = None) -> None:
        rows, columns, parts = len(x), self.shape[0], self.parts
        tile = tile or quantised_tile_for(self.kind, rows, columns, then.max_columns)
        split_k = then.form == "split_k"
        join = not split_k and self.splits(rows) and self.counts is not None
        x, x_scale = self._operands(x)
        partial = torch.empty(parts, rows, columns, device=x.device) if join else out
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), parts if split_k or join else 1)
        fast = not interpreted()
        codes = self.codes.view(torch.uint8) if fast and self.kind.endswith("weights") else self.codes
        product[grid](
            x, x_scale, codes, self.scale, self.scale if self.zero is None else self.zero,
            self.scale if then.bias is None else then.bias, out, partial, self.counts if join else out,
            *(then.placed or (out,) * 6), rows, columns, self.inner, self.width, self.kind, self._zero_kind,
            self.offset, self.group, parts, join, tile.swapped, tile.rows, tile.columns, self._step(tile),
            then.form, then.bias is not None, *then.heads, then.activation, then.scale, then.cap, tile.warps, fast,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip

    @property
    def _zero_kind(self) -> str:
        if self.zero is None or self.kind not in ("int4", "bytes"):
            return ""
        return "integer" if self.zero.dtype == torch.uint8 else "value"

    def _step(self, tile: QuantisedTile) -> int:
        """Inputs, or bytes of two, of a step. Where groups are scaled it is fixed, because every step ends with a rounding."""
        if self.kind in ("int4", "bytes"):
            return min(self.group, _BLOCK)
        span = self.width // self.parts
        step = tile.inner
        while span % step:
            step //= 2
        return step

    def _operands(self, x: Rows) -> tuple[Tensor, Tensor]:
        """Rows as the product reads them, and their scales where it reads codes."""
        form = self.reads
        if form is None:
            assert isinstance(x, Tensor)
            x = x if self.inputs is None else x[:, self.inputs]
            return x, x
        if isinstance(x, Tensor):
            made = form.empty(len(x), x.device)
            quantise_rows[(len(x),)](
                x, made.codes, made.scale, self.inner, form.width, form.padded, form.block, form.limit,
                num_warps=min(max(form.padded // 512, 4), 32), enable_fp_fusion=False,
            )  # fmt: skip
            x = made
        return x.codes, x.scale


def fp8_matrix(stored: ScaledFloats, device: torch.device, quantised_rows: bool = True) -> QuantisedMatrix | None:
    """FP8 values on the device; None where products cannot use them. Rows are quantised too, or weights decoded."""
    inner = stored.shape[1]
    multiplies = quantised_rows and multiplies_fp8(device)
    width = -(-inner // _FILLED) * _FILLED
    codes = F.pad(stored.codes.to(device), (0, width - inner)).view(torch.float8_e4m3fn)
    scale, block = stored.scale.to(device), stored.block.to(device)
    if stored.size >= inner:
        kind = "fp8" if multiplies else "fp8_weights"
        return _counted(QuantisedMatrix(kind, inner, codes, scale[block.long(), 0].contiguous()))
    if stored.size % _BLOCK:
        return None
    scale = scale.repeat_interleave(stored.size // _BLOCK, 1)[:, : width // _BLOCK]
    scale = F.pad(scale, (0, width // _BLOCK - scale.shape[1])).contiguous()
    return _counted(QuantisedMatrix("fp8_blocks" if multiplies else "fp8_block_weights", inner, codes, scale, block.int()))


def grouped_matrix(stored: Grouped, device: torch.device) -> QuantisedMatrix | None:
    """Integers in groups on the device; None where products cannot use them."""
    inner = stored.shape[1]
    one = stored.size >= inner
    if stored.bits == 8 and stored.least is None and one and stored.offset == _BYTE_OFFSET and stored.inputs is None:
        codes = (stored.codes.to(device).short() - _BYTE_OFFSET).to(torch.int8)
        return _int8(codes, stored.scale[:, 0].to(device, torch.float32), inner)
    if not (one or stored.size in _SMALL_GROUPS or stored.size % _BLOCK == 0):
        return None
    width = -(-inner // _FILLED) * _FILLED
    group = width if one else stored.size
    codes = F.pad(stored.codes.to(device), (0, width - inner))
    groups, scale = -(-width // group), stored.scale.to(device)
    scale, zero = F.pad(scale, (0, groups - scale.shape[1])), None
    if stored.least is not None:
        least = F.pad(stored.least.to(device), (0, groups - stored.least.shape[1]))
        zero = _integer_zeros(scale, least) if stored.bits == 4 else None
        zero = _narrowest(least).T.contiguous() if zero is None else zero.T.contiguous()
    inputs = None if stored.inputs is None else stored.inputs.to(device, torch.int64)
    if stored.bits == 4:
        codes = _in_fragments(codes) if group % 64 == 0 else codes[:, : width // 2] | codes[:, width // 2 :] << 4
    return _counted(QuantisedMatrix(
        "int4" if stored.bits == 4 else "bytes", inner, codes.contiguous(), _narrowest(scale).T.contiguous(), zero, inputs, group,
        stored.offset if zero is None else 0,
    ))  # fmt: skip


def _in_fragments(codes: Tensor) -> Tensor:
    """128 inputs to 64 bytes, the first half in the low bits. Byte 16 t + 4 s + 2 h + e is of input 16 s + 8 h + 2 t + e: those
    that thread t of four holds of an operand of the tensor cores lie side by side.
    """
    blocks = codes.view(len(codes), -1, 2, 4, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 6)
    low, high = blocks.unbind(2)
    return (low | high << 4).reshape(len(codes), -1)


def int8_of(weight: Tensor) -> QuantisedMatrix:
    """A matrix on the device rounded to int8, with a scale for each column."""
    values = weight.float()
    scale = values.abs().amax(1) / _LIMITS["int8"]
    codes = (values / torch.where(scale > 0, scale, 1.0)[:, None]).round().to(torch.int8)
    return _int8(codes, scale, weight.shape[1])


def int4_of(weight: Tensor) -> QuantisedMatrix:
    """A matrix on the device rounded to four bits in groups with zero points."""
    columns, inner = weight.shape
    values = F.pad(weight.float(), (0, -inner % _LOADED)).view(columns, -1, _LOADED)
    low, high = values.amin(2).clamp(max=0.0), values.amax(2).clamp(min=0.0)
    scale = ((high - low) / 15).half().float()
    unit = torch.where(scale > 0, scale, 1.0)
    zero = (-low / unit).round().clamp(0, 15)
    codes = ((values / unit[..., None]).round() + zero[..., None]).clamp(0, 15).to(torch.uint8).view(columns, -1)[:, :inner]
    made = grouped_matrix(Grouped(codes, scale, scale * zero, 0, 4, _LOADED), weight.device)
    assert made is not None
    return made


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which has no inline assembly."""
    return bool(triton.knobs.runtime.interpret)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the tensor cores multiply FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _int8(codes: Tensor, scale: Tensor, inner: int) -> QuantisedMatrix:
    width = -(-inner // _FILLED) * _FILLED
    return _counted(QuantisedMatrix("int8", inner, F.pad(codes, (0, width - inner)), scale.contiguous()))


def _counted(matrix: QuantisedMatrix) -> QuantisedMatrix:
    """With counters for the programs of every tile of few rows."""
    tiles = -(-matrix.shape[0] // matrix.min_columns) * (JOINED_ROWS // 16)
    return replace(matrix, counts=torch.zeros(tiles, dtype=torch.int32, device=matrix.codes.device))


def _integer_zeros(scale: Tensor, least: Tensor) -> Tensor | None:
    """Zero points, where what is subtracted is a small multiple of each group's scale."""
    zero = torch.where(scale > 0, least / torch.where(scale > 0, scale, 1.0), 0.0).round()
    fits = bool(((zero >= 0) & (zero <= 16)).all()) and torch.equal(scale * zero, least)
    return zero.to(torch.uint8) if fits else None


def _narrowest(values: Tensor) -> Tensor:
    """The same values in two bytes, where that keeps them."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values.float()


def _by_columns(values: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor whose last dimension are columns, with them in another order."""
    return order(values) if values.dim() == 1 else order(values.T.contiguous()).T.contiguous()
