"""Which states of recurrent layers, and which inputs of draft nodes, lie where in a device's memory. No tensors here.

A place is free again when nobody refers to it any more, as a tensor's memory would be. So sequences and the prefix cache handle
states on a device as they handle tensors (cache/states.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

__all__ = ["Place", "Places", "StoredRows"]


class Place:
    """A place that is taken. Its number is free once the last reference to it is gone."""

    __slots__ = ("__weakref__", "_free", "number")

    def __init__(self, number: int, free: list[int]) -> None:
        self.number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self.number)


class Places:
    """A fixed number of places."""

    def __init__(self, count: int, make_room: Callable[[], bool] | None = None) -> None:
        """`make_room` may drop references where no place is free; it says whether it dropped one."""
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._make_room = make_room

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Place | None:
        """A free place; None where there is none."""
        while not self._free:
            if self._make_room is None or not self._make_room():
                return None
        return Place(self._free.pop(), self._free)


class StoredRows(Sequence["Place"]):
    """Inputs of draft nodes, by their places: what a tensor with a row for each node is elsewhere."""

    __slots__ = ("_places",)

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)

    @property
    def numbers(self) -> list[int]:
        return [place.number for place in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, rows: int) -> Place: ...
    @overload
    def __getitem__(self, rows: slice | list[int]) -> StoredRows: ...
    def __getitem__(self, rows: int | slice | list[int]) -> Place | StoredRows:
        if isinstance(rows, int):
            return self._places[rows]
        return StoredRows(self._places[rows] if isinstance(rows, slice) else [self._places[row] for row in rows])
