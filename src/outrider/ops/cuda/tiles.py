"""Which tile a product uses, by its row count and shape: a fixed table, never tuned at start-up.

Every entry gives the same bits (tests/gpu/test_kernels.py compares all of them); they differ in speed alone.
Measured on an H200 with the shapes of 8B and 1B Llama models.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ANY_WIDTH", "MAX_SPLIT_K_ROWS", "Tile", "every_split_tile", "every_tile", "split_tile_for", "tile_for"]


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
# The first entry that fits is used.
_TABLE = (
    _Entry(16, 65536, 0, Tile(16, 32, 128, 4, 3)),
    _Entry(16, 12000, 0, Tile(16, 64, 64, 4, 3)),
    _Entry(16, 2560, 2048, Tile(16, 32, 64, 2, 4)),
    _Entry(16, 0, 0, Tile(16, 32, 64, 4, 4)),
    _Entry(32, 65536, 0, Tile(32, 64, 128, 8, 4)),
    _Entry(32, 12000, 0, Tile(32, 128, 64, 4, 4)),
    _Entry(32, 0, 0, Tile(32, 32, 128, 4, 5)),
    _Entry(64, 12000, 0, Tile(64, 128, 64, 4, 4)),
    _Entry(64, 5000, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(64, 0, 0, Tile(64, 32, 128, 4, 5)),
    _Entry(128, 12000, 0, Tile(128, 128, 64, 8, 4)),
    _Entry(128, 5000, 0, Tile(128, 64, 128, 8, 3)),
    _Entry(128, 0, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(192, 12000, 0, Tile(64, 128, 64, 4, 4)),
    _Entry(192, 0, 0, Tile(128, 128, 64, 8, 4)),
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
    _Entry(128, 2048, 0, Tile(128, 128, 64, 8, 4)),
    _Entry(128, 0, 0, Tile(64, 64, 128, 4, 4)),
    _Entry(256, 4096, 0, Tile(128, 256, 64, 8, 3)),
    _Entry(256, 2048, 0, Tile(128, 128, 64, 8, 4)),
    _Entry(256, 0, 0, Tile(64, 64, 128, 4, 4)),
)
MAX_SPLIT_K_ROWS = _SPLIT[-1].max_rows


def tile_for(rows: int, columns: int, inner: int, max_columns: int = ANY_WIDTH) -> Tile:
    """The tile of a product, at most `max_columns` wide."""
    tile = _look_up(_TABLE, rows, columns, inner)
    return tile._replace(columns=min(tile.columns, max_columns))


def split_tile_for(rows: int, columns: int, inner: int) -> Tile:
    """The tile of a split-K product of at most MAX_SPLIT_K_ROWS rows."""
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


# Of the first and the second product of experts, by the most pairs of an expert on average.
_EXPERTS = (
    (8.0, Tile(16, 64, 64, 4, 4), Tile(16, 32, 64, 4, 4)),
    (24.0, Tile(32, 64, 64, 4, 4), Tile(32, 64, 64, 4, 4)),
    (96.0, Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    (float("inf"), Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 4)),
)


def expert_tiles_for(pairs: float) -> tuple[Tile, Tile]:
    """The tiles of both products of experts which so many pairs have on average. Both have as many rows."""
    return next((first, second) for most, first, second in _EXPERTS if pairs <= most)


def every_expert_tile() -> list[tuple[Tile, Tile]]:
    """All tiles of products of experts."""
    return [(first, second) for _, first, second in _EXPERTS]
