"""Weights of a layer on their way to the device, in the forms that products take.

Matrices that are stored as integers or in FP8 stay so, where a product takes them; others are decoded, and so are all where the
model is served in float32. A model may be rounded to int8, int4 or FP8 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outrider.model.spec import Norm
from outrider.ops import Grouped, ScaledFloats
from outrider.ops.cuda.launch import RowNorm
from outrider.ops.cuda.matrix import DenseMatrix, Matrix, RowForm
from outrider.ops.cuda.quantised_matrix import fp8_matrix, grouped_matrix, int4_of, int8_of

__all__ = ["DevicePart", "Upload", "norm_on"]


class DevicePart(Protocol):
    """A part of a layer that has matrices: a mixer, or a feed-forward part."""

    @property
    def reads(self) -> RowForm | None:
        """The form of the normed rows that it reads; None: the weights' dtype."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All its matrices."""

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        """Use what `change` makes of each matrix, such as the same with other storage (`Matrix.over`), in their order."""


class Upload:
    """Copies weights to a device. What lies there already is used as it is.

    `rounds` is what matrices in floating point are rounded to: "int8", "int4", "fp8", or "" for none. Without `fp8_rows` products
    decode weights in FP8, and rows stay in bf16.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, rounds: str = "", fp8_rows: bool = True) -> None:
        self.device, self.dtype, self.rounds, self._fp8_rows = device, dtype, rounds, fp8_rows
        self.decoded = 0  # quantised matrices that no product takes as they are

    def tensor(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype).contiguous()

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.tensor(bias)

    def matrix(self, weight: Tensor | Grouped | ScaledFloats) -> Matrix:
        """A matrix as it is stored, where products take that."""
        if not isinstance(weight, Tensor):
            made = self._quantised(weight) if self.dtype == torch.bfloat16 else None
            if made is not None:
                return made
            self.decoded += 1
            weight = weight.values()
        values = self.tensor(weight)
        return self._rounded(values) if self.rounds else DenseMatrix(values)

    def reordered(self, weight: Tensor | Grouped | ScaledFloats, order: Callable[[Tensor], Tensor]) -> Matrix:
        """A matrix with its rows in another order. A weight that lies on the device is moved, not copied."""
        matrix = self.matrix(weight).reordered(order)
        self.release(weight)
        return matrix

    def release(self, weight: Tensor | Grouped | ScaledFloats) -> None:
        """Empty a weight that lies on the device, once its rows are there in another order."""
        if isinstance(weight, Tensor) and weight.is_cuda:
            weight.data = weight.new_empty(0)

    def _quantised(self, stored: Grouped | ScaledFloats) -> Matrix | None:
        if isinstance(stored, ScaledFloats):
            return fp8_matrix(stored, self.device, self._fp8_rows)
        return grouped_matrix(stored, self.device)

    def _rounded(self, values: Tensor) -> Matrix:
        if self.rounds == "fp8":
            made = fp8_matrix(ScaledFloats.of(values), self.device, self._fp8_rows)
            assert made is not None
            return made
        return int8_of(values) if self.rounds == "int8" else int4_of(values)


def norm_on(device: torch.device, norm: Norm | None, weight: Tensor | None, bias: Tensor | None) -> RowNorm | None:
    """A norm with its weights on the device."""
    if norm is None:
        return None
    assert weight is not None
    return RowNorm(norm.kind, norm.eps, weight.detach().to(device), None if bias is None else bias.detach().to(device))
