"""Which tile a product uses, by its row count and shape: a fixed table, never tuned at start-up.

Every entry gives the same bits (tests/gpu/test_kernels.py compares all of them); they differ in speed alone.
Measured on an H200 with the shapes of 8B and 1B Llama models.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ANY_WIDTH",
    "MAX_SPLIT_K_ROWS",
    "WIDE",
    "Tile",
    "every_split_tile",
    "every_tile",
    "split_tile_for",
    "splits_inner",
    "tile_for",
]


class Tile(NamedTuple):
    """Rows, columns and inner steps of one program, and how it runs."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class _Entry(NamedTuple):
    max_rows: int
    min_columns: int
    min_inner: int
    tile: Tile


_ANY = ANY_WIDTH = 1 << 30
WIDE = 12000  # columns from which on a product sums its inner dimension in one part
# The first entry that fits is used.
_TABLE = (
    _Entry(16, 65536, 0, Tile(16, 64, 64, 4, 5)),
    _Entry(16, WIDE, 0, Tile(16, 32, 128, 4, 3)),
    _Entry(16, 2560, 2048, Tile(16, 32, 64, 2, 4)),
    _Entry(16, 0, 0, Tile(16, 32, 64, 4, 4)),
    _Entry(32, 65536, 0, Tile(32, 64, 128, 8, 4)),
    _Entry(32, WIDE, 0, Tile(32, 128, 64, 4, 4)),
    _Entry(32, 0, 0, Tile(32, 32, 128, 4, 5)),
    _Entry(64, WIDE, 0, Tile(64, 128, 64, 4, 4)),
    _Entry(64, 5000, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(64, 0, 0, Tile(64, 32, 128, 4, 5)),
    _Entry(128, 24000, 0, Tile(128, 256, 64, 8, 4)),
    _Entry(128, WIDE, 0, Tile(128, 128, 64, 8, 3)),
    _Entry(128, 5000, 0, Tile(128, 64, 64, 8, 5)),
    _Entry(128, 0, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(_ANY, 24000, 0, Tile(128, 256, 64, 8, 4)),
    _Entry(_ANY, WIDE, 0, Tile(128, 128, 64, 8, 3)),
    _Entry(256, 5000, 0, Tile(128, 128, 128, 8, 3)),
    _Entry(_ANY, 0, 0, Tile(128, 128, 64, 8, 4)),
)
# The entries of products by split-K programs.
_SPLIT = (
    _Entry(16, 4096, 8192, Tile(16, 32, 128, 4, 3)),
    _Entry(16, 4096, 0, Tile(16, 64, 64, 4, 5)),
    _Entry(16, 2048, 4096, Tile(16, 64, 128, 4, 5)),
    _Entry(16, 2048, 0, Tile(16, 32, 128, 2, 4)),
    _Entry(16, 0, 0, Tile(16, 32, 128, 4, 3)),
    _Entry(32, 2048, 0, Tile(32, 64, 128, 4, 4)),
    _Entry(32, 0, 0, Tile(32, 32, 128, 4, 3)),
    _Entry(64, 2048, 0, Tile(64, 64, 64, 4, 5)),
    _Entry(64, 0, 0, Tile(64, 32, 128, 4, 3)),
    _Entry(128, 2048, 0, Tile(64, 128, 64, 4, 4)),
    _Entry(128, 0, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(256, 4096, 0, Tile(128, 256, 64, 8, 3)),
    _Entry(256, 2048, 0, Tile(128, 128, 64, 8, 4)),
    _Entry(256, 0, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(512, 0, 0, Tile(128, 128, 64, 8, 3)),
)
MAX_SPLIT_K_ROWS = 256
_DEEP, _MAX_DEEP_ROWS = 8192, 512  # an inner dimension so long is worth programs for each part longer


def tile_for(rows: int, columns: int, inner: int, max_columns: int = ANY_WIDTH) -> Tile:
    """The tile of a product, at most `max_columns` wide."""
    tile = _look_up(_TABLE, rows, columns, inner)
    return tile._replace(columns=min(tile.columns, max_columns))


def splits_inner(rows: int, inner: int) -> bool:
    """Whether each part of the inner dimension has programs of its own."""
    return rows <= (_MAX_DEEP_ROWS if inner >= _DEEP else MAX_SPLIT_K_ROWS)


def split_tile_for(rows: int, columns: int, inner: int) -> Tile:
    """The tile of a split-K product."""
    return _look_up(_SPLIT, rows, columns, inner)


def _look_up(table: tuple[_Entry, ...], rows: int, columns: int, inner: int) -> Tile:
    fitting = (e.tile for e in table if rows <= e.max_rows and columns >= e.min_columns and inner >= e.min_inner)
    return next(fitting)


def every_split_tile() -> list[Tile]:
    """All tiles of split-K products."""
    return sorted({entry.tile for entry in _SPLIT})


def every_tile() -> list[Tile]:
    """All tiles of other products."""
    return sorted({entry.tile for entry in _TABLE})


# Of the first and the second product of experts, by the rows of a work item.
_EXPERTS = {
    16: (Tile(16, 32, 64, 2, 4), Tile(16, 32, 64, 2, 4)),
    32: (Tile(32, 64, 64, 4, 4), Tile(32, 64, 64, 4, 4)),
    64: (Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    128: (Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 4)),
}
_PAIRS = ((8.0, 16), (24.0, 32), (96.0, 64))  # that an expert has at most on average, and the rows of a work item


def item_rows_for(pairs: float) -> int:
    """Rows of a work item where experts have so many pairs on average."""
    return next((rows for most, rows in _PAIRS if pairs <= most), 128)


def expert_tile_for(rows: int, second: bool) -> Tile:
    """The tile of a product of experts in floating point, for work items of so many rows."""
    return _EXPERTS[rows][second]
