"""Which tile a product uses, by its row count and shape: a fixed table, never tuned at start-up.

Every entry gives the same bits (tests/gpu/test_kernels.py compares all of them); they differ in speed alone.
Measured on an H200 with the shapes of 8B and 1B Llama models.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_SPLIT_K_ROWS", "Tile", "every_split_tile", "every_tile", "split_tile_for", "tile_for"]


class Tile(NamedTuple):
    """Rows, columns and inner steps of one program, and how it runs."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class _Entry(NamedTuple):
    columns: int  # smallest number of columns it is for
    inner: int  # smallest inner dimension it is for
    tile: Tile


# up to this many rows -> the first entry that fits
_TABLE: tuple[tuple[int, tuple[_Entry, ...]], ...] = (
    (
        16,
        (
            _Entry(65536, 0, Tile(16, 32, 128, 4, 3)),
            _Entry(12000, 0, Tile(16, 64, 64, 4, 3)),
            _Entry(2560, 2048, Tile(16, 32, 64, 2, 4)),
            _Entry(0, 0, Tile(16, 32, 64, 4, 4)),
        ),
    ),
    (
        32,
        (
            _Entry(65536, 0, Tile(32, 64, 128, 8, 4)),
            _Entry(12000, 0, Tile(32, 128, 64, 4, 4)),
            _Entry(0, 0, Tile(32, 32, 128, 4, 5)),
        ),
    ),
    (
        64,
        (
            _Entry(12000, 0, Tile(64, 128, 64, 4, 4)),
            _Entry(5000, 0, Tile(64, 64, 128, 4, 4)),
            _Entry(0, 0, Tile(64, 32, 128, 4, 5)),
        ),
    ),
    (
        128,
        (
            _Entry(12000, 0, Tile(128, 128, 64, 8, 4)),
            _Entry(5000, 0, Tile(128, 64, 128, 8, 3)),
            _Entry(0, 0, Tile(64, 64, 128, 4, 4)),
        ),
    ),
    (192, (_Entry(12000, 0, Tile(64, 128, 64, 4, 4)), _Entry(0, 0, Tile(128, 128, 64, 8, 4)))),
    (1 << 30, (_Entry(0, 0, Tile(128, 128, 64, 8, 4)),)),
)

# up to this many rows -> the first entry that fits, for products by split-K programs
_SPLIT: tuple[tuple[int, tuple[_Entry, ...]], ...] = (
    (
        16,
        (
            _Entry(4096, 8192, Tile(16, 32, 128, 4, 3)),
            _Entry(4096, 0, Tile(16, 64, 64, 4, 5)),
            _Entry(2048, 4096, Tile(16, 64, 128, 4, 5)),
            _Entry(2048, 0, Tile(16, 32, 128, 2, 4)),
            _Entry(0, 0, Tile(16, 32, 128, 4, 3)),
        ),
    ),
    (32, (_Entry(2048, 0, Tile(32, 64, 128, 4, 4)), _Entry(0, 0, Tile(32, 32, 128, 4, 3)))),
    (64, (_Entry(2048, 0, Tile(64, 64, 64, 4, 5)), _Entry(0, 0, Tile(64, 32, 128, 4, 3)))),
    (128, (_Entry(2048, 0, Tile(128, 128, 64, 8, 4)), _Entry(0, 0, Tile(64, 64, 128, 4, 4)))),
    (
        256,
        (
            _Entry(4096, 0, Tile(128, 256, 64, 8, 3)),
            _Entry(2048, 0, Tile(128, 128, 64, 8, 4)),
            _Entry(0, 0, Tile(64, 64, 128, 4, 4)),
        ),
    ),
)
MAX_SPLIT_K_ROWS = _SPLIT[-1][0]


def tile_for(rows: int, columns: int, inner: int, max_columns: int = 1 << 30) -> Tile:
    """The tile of a product, at most `max_columns` wide."""
    tile = _look_up(_TABLE, rows, columns, inner)
    return tile._replace(columns=min(tile.columns, max_columns))


def split_tile_for(rows: int, columns: int, inner: int) -> Tile:
    """The tile of a split-K product of at most MAX_SPLIT_K_ROWS rows."""
    return _look_up(_SPLIT, rows, columns, inner)


def _look_up(table: tuple[tuple[int, tuple[_Entry, ...]], ...], rows: int, columns: int, inner: int) -> Tile:
    entries = next(entries for max_rows, entries in table if rows <= max_rows)
    return next(entry.tile for entry in entries if columns >= entry.columns and inner >= entry.inner)


def every_split_tile() -> list[Tile]:
    """All tiles of split-K products."""
    return sorted({entry.tile for _, entries in _SPLIT for entry in entries})


def every_tile() -> list[Tile]:
    """All tiles of other products."""
    return sorted({entry.tile for _, entries in _TABLE for entry in entries})
