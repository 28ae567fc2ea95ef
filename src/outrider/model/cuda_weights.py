"""Weights of a layer on their way to the device, in the forms that products take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outrider.model.spec import Norm
from outrider.ops.cuda.launch import RowNorm
from outrider.ops.cuda.matrix import DenseMatrix, Matrix

__all__ = ["DevicePart", "Upload", "norm_on"]


class DevicePart(Protocol):
    """A part of a layer that has matrices: a mixer, or a feed-forward part."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All its matrices."""

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        """Use what `change` makes of each matrix, such as the same with other storage (`Matrix.over`), in their order."""


class Upload:
    """Copies weights to a device. What lies there already is used as it is."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def tensor(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype).contiguous()

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.tensor(bias)

    def matrix(self, weight: Tensor) -> Matrix:
        return DenseMatrix(self.tensor(weight))

    def reordered(self, weight: Tensor, order: Callable[[Tensor], Tensor]) -> Matrix:
        """A matrix with its rows in another order. A weight that lies on the device is moved, not copied."""
        matrix = self.matrix(weight).reordered(order)
        if weight.is_cuda:
            weight.data = weight.new_empty(0)
        return matrix


def norm_on(device: torch.device, norm: Norm | None, weight: Tensor | None, bias: Tensor | None) -> RowNorm | None:
    """A norm with its weights on the device."""
    if norm is None:
        return None
    assert weight is not None
    return RowNorm(norm.kind, norm.eps, weight.detach().to(device), None if bias is None else bias.detach().to(device))
