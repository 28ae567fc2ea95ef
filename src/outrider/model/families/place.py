"""Where a stored tensor goes in the decoder, and how its values are arranged there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["Place"]


class Place(NamedTuple):
    """Rows of a parameter that a stored tensor fills."""

    parameter: str
    rows: slice = slice(None)  # of each expert, where the tensor holds those of several
    order: Callable[[], Tensor] | None = None  # the stored row of each row; None: in order
    transposed: bool = False
    add: float = 0.0
    columns: int = 0  # a vector that is stored in rows of that many values
    experts: int = 0  # in the parameter so many lie one below the other; the tensor has them as its first dimension

    def part(self, parameter: Tensor) -> Tensor:
        """The rows, as a view: (rows, ...), or (experts, rows, ...)."""
        if not self.experts:
            return parameter[self.rows]
        return parameter.view(self.experts, -1, *parameter.shape[1:])[:, self.rows]

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape that the tensor must be stored in."""
        shape = tuple(self.part(parameter).shape)
        if self.columns:
            return (shape[0] // self.columns, self.columns)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def arrange(self, stored: Tensor) -> Tensor:
        """The stored tensor as `part` has it."""
        tensor = stored.mT if self.transposed else stored.flatten() if self.columns else stored
        tensor = tensor if self.order is None else tensor.index_select(self._dim, self.order())
        return tensor + self.add if self.add else tensor

    def stored(self, parameter: Tensor) -> Tensor:
        """The parameter's rows as they are stored; the inverse of `arrange`."""
        rows = self.part(parameter)
        tensor = rows - self.add if self.add else rows
        tensor = tensor if self.order is None else tensor.index_select(self._dim, self.order().argsort())
        return (tensor.mT if self.transposed else tensor.view(-1, self.columns) if self.columns else tensor).contiguous()

    @property
    def _dim(self) -> int:
        """The dimension of the rows."""
        return 1 if self.experts else 0
