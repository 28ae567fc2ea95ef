"""Which tile a product uses, by its row count and shape: a fixed table, never tuned at start-up.

Every entry gives the same bits (tests/gpu/test_kernels.py compares all of them); they differ in speed alone.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tile", "every_tile", "tile_for"]


class Tile(NamedTuple):
    """Rows, columns and inner steps of one program, and how it runs."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# up to this many rows -> ((least columns, tile), ...), the widest first
_TABLE: tuple[tuple[int, tuple[tuple[int, Tile], ...]], ...] = (
    (16, ((65536, Tile(16, 64, 128, 4, 4)), (16384, Tile(16, 32, 256, 4, 4)), (0, Tile(16, 16, 256, 4, 5)))),
    (32, ((16384, Tile(32, 64, 128, 4, 4)), (0, Tile(32, 32, 128, 4, 5)))),
    (64, ((16384, Tile(64, 64, 128, 4, 4)), (0, Tile(64, 32, 128, 4, 5)))),
    (128, ((16384, Tile(128, 128, 64, 8, 4)), (0, Tile(64, 64, 128, 4, 4)))),
    (256, ((16384, Tile(128, 128, 64, 8, 4)), (0, Tile(128, 64, 64, 4, 4)))),
    (1 << 30, ((0, Tile(128, 128, 64, 8, 4)),)),
)


def tile_for(rows: int, columns: int, most_columns: int = 1 << 30) -> Tile:
    """The tile of a product; `most_columns` keeps it inside one attention head."""
    for most, tiles in _TABLE:
        if rows <= most:
            tile = next(tile for least, tile in tiles if columns >= least)
            return tile._replace(columns=min(tile.columns, most_columns))
    raise AssertionError("the last entry takes any number of rows")


def every_tile() -> list[Tile]:
    """All tiles in use."""
    return sorted({tile for _, tiles in _TABLE for _, tile in tiles})
