"""Matrices on the device, in the forms that products take, and what may follow a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from outrider.ops.cuda import kernels
from outrider.ops.cuda.tiles import ANY_WIDTH, MAX_SPLIT_K_ROWS, Tile, split_tile_for, tile_for

__all__ = ["DenseMatrix", "Epilogue", "Matrix", "QuantisedRows", "RowForm", "Rows", "matrix_of", "pair_qkv", "pair_rows"]

_SPLIT_K = 4  # parts of every inner dimension of a dense matrix, summed in order
_MIN_COLUMNS = 16  # that the tensor cores compute together


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a product in its kernel: a form of `kernels.linear`, and what that form needs."""

    form: str = "store"
    bias: Tensor | None = None
    activation: str = ""
    scale: float = 1.0
    cap: float = 0.0
    placed: tuple[Tensor, ...] = ()  # keys, values, slots, positions, cosines and sines of "qkv"
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)  # heads, KV heads, head width and page size of "qkv"
    max_columns: int = ANY_WIDTH  # of a tile


class RowForm(NamedTuple):
    """Codes that a product reads instead of rows in the weights' dtype."""

    dtype: torch.dtype
    width: int  # of a row, filled up
    block: int  # inputs that share a scale
    limit: float  # the largest code

    @property
    def padded(self) -> int:
        """The power of two that a row fits."""
        return int(triton.next_power_of_2(self.width))

    def empty(self, rows: int, device: torch.device) -> QuantisedRows:
        """Rows that are to be written."""
        codes = torch.empty(rows, self.width, device=device, dtype=self.dtype)
        return QuantisedRows(codes, torch.empty(rows, max(self.width // self.block, 1), device=device))


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows as codes with their scales."""

    codes: Tensor  # (N, width)
    scale: Tensor  # (N, blocks) float32

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device


Rows = Tensor | QuantisedRows


class Matrix(Protocol):
    """A matrix (columns, inner) on the device. Its form decides how products sum, which is the same at every row count."""

    @property
    def kind(self) -> str:
        """Of a quantised matrix; "" of a dense one."""

    @property
    def shape(self) -> tuple[int, int]:
        """Columns of the product, and the inner dimension."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its storage."""

    @property
    def reads(self) -> RowForm | None:
        """The form of rows that products read; None: the weights' dtype. Rows in the latter may be passed all the same."""

    @property
    def parts(self) -> int:
        """Parts of the inner dimension, each one chain of additions, which are added in order."""

    @property
    def min_columns(self) -> int:
        """Of a tile in which sums are the same."""

    def over(self, tensors: Sequence[Tensor]) -> Matrix:
        """The matrix with other storage of the same shapes, of which `tensors` are all."""

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Matrix:
        """The matrix with its rows in another order; `order` is applied to tensors whose first dimension they are."""

    def splits(self, rows: int) -> bool:
        """Whether a stored product of so many rows has programs for each part."""

    def multiply(self, x: Rows, out: Tensor, then: Epilogue, tile: Any = None) -> None:
        """The product with rows x (N, inner), and what follows it, into `out`; `tile` is one of the form's table."""

    def by_library(self, x: Rows, bias: Tensor | None) -> Tensor | None:
        """The product as another library computes it, without row invariance; None where there is none."""


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A matrix in bf16 or float32."""

    values: Tensor  # (columns, inner)

    @property
    def kind(self) -> str:
        return ""

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    @property
    def reads(self) -> None:
        """Rows are read as they are."""

    @property
    def parts(self) -> int:
        return _SPLIT_K if self.values.shape[1] % 64 == 0 else 1

    @property
    def min_columns(self) -> int:
        return _MIN_COLUMNS

    def over(self, tensors: Sequence[Tensor]) -> DenseMatrix:
        return DenseMatrix(*tensors)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> DenseMatrix:
        return DenseMatrix(order(self.values))

    def splits(self, rows: int) -> bool:
        return rows <= MAX_SPLIT_K_ROWS and self.parts > 1

    def multiply(self, x: Rows, out: Tensor, then: Epilogue, tile: Tile | None = None) -> None:
        assert isinstance(x, Tensor)
        w, rows, (columns, inner), split_k = self.values, len(x), self.shape, then.form == "split_k"
        if tile is None:
            tile = split_tile_for(rows, columns, inner) if split_k else tile_for(rows, columns, inner, then.max_columns)
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), self.parts if split_k else 1)
        kernels.linear[grid](
            x, w, w if then.bias is None else then.bias, out, *(then.placed or (out,) * 6), rows, columns,
            inner, tile.rows, tile.columns, tile.inner, then.form, then.bias is not None, *then.heads,
            PRECISION="ieee" if w.dtype == torch.float32 else "tf32", SPLIT_K=self.parts, IN_REGISTER=tile.rows <= 16,
            ACTIVATION=then.activation, SCALE=then.scale, CAP=then.cap, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def by_library(self, x: Rows, bias: Tensor | None) -> Tensor | None:
        assert isinstance(x, Tensor)
        return F.linear(x, self.values, bias)


def matrix_of(weight: Tensor | Matrix) -> Matrix:
    """A matrix; a tensor is a dense one."""
    return DenseMatrix(weight) if isinstance(weight, Tensor) else weight


def pair_rows(weight: Tensor, groups: int) -> Tensor:
    """Rows i and i + half of every group side by side."""
    if weight.dim() == 1:
        return weight.view(groups, 2, -1).transpose(1, 2).reshape(-1).contiguous()
    return weight.view(groups, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def pair_qkv(fused: Tensor, turned_heads: int, head: int) -> Tensor:
    """Rows of q and k, whose heads are rotated, in pairs; rows of v as they are."""
    turned = turned_heads * head
    return torch.cat((pair_rows(fused[:turned], turned_heads), fused[turned:]))
