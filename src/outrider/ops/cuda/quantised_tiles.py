"""Which tile a product with a quantised matrix uses, by its row count and shape: fixed tables, one per kind.

Every entry gives the same bits (tests/gpu/test_quantised.py compares all of them); they differ in speed alone. Measured on an
H200 with the shapes of 8B and 70B Llama models (`python -m benchmarks.gpu_tiles`).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["JOINED_ROWS", "QuantisedTile", "every_quantised_tile", "parts_of", "quantised_tile_for"]

JOINED_ROWS = 64  # the largest row count whose parts have programs of their own
_ANY = 1 << 30


class QuantisedTile(NamedTuple):
    """Rows, columns and inner steps of one program, and how it runs. The step of groups and blocks is the matrix's own."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    swapped: bool = True  # the weights are the wide operand


class _Entry(NamedTuple):
    max_rows: int
    min_columns: int
    tile: QuantisedTile


# The first entry that fits is used.
_EIGHT_BITS = (
    _Entry(16, 12000, QuantisedTile(16, 128, 128, 8, 4)),
    _Entry(16, 0, QuantisedTile(16, 64, 256, 4, 3)),
    _Entry(32, 12000, QuantisedTile(32, 128, 128, 8, 4)),
    _Entry(32, 0, QuantisedTile(32, 64, 256, 4, 3)),
    _Entry(64, 12000, QuantisedTile(64, 128, 128, 8, 3, swapped=False)),
    _Entry(64, 0, QuantisedTile(64, 64, 256, 4, 3)),
    _Entry(128, 12000, QuantisedTile(128, 128, 128, 8, 3, swapped=False)),
    _Entry(128, 0, QuantisedTile(64, 64, 128, 4, 4)),
    _Entry(_ANY, 0, QuantisedTile(128, 128, 128, 8, 3, swapped=False)),
)
_BLOCKS = (
    _Entry(16, 12000, QuantisedTile(16, 128, 128, 8, 4)),
    _Entry(16, 0, QuantisedTile(16, 64, 128, 8, 4)),
    _Entry(32, 12000, QuantisedTile(32, 128, 128, 4, 4)),
    _Entry(32, 0, QuantisedTile(32, 64, 128, 4, 4)),
    _Entry(64, 0, QuantisedTile(64, 128, 128, 4, 4, swapped=False)),
    _Entry(_ANY, 0, QuantisedTile(64, 128, 128, 8, 3)),
)
_DECODED = (
    _Entry(16, 0, QuantisedTile(16, 64, 128, 4, 4)),
    _Entry(32, 0, QuantisedTile(32, 64, 128, 4, 4)),
    _Entry(64, 0, QuantisedTile(64, 64, 128, 4, 3)),
    _Entry(_ANY, 0, QuantisedTile(128, 128, 64, 8, 3)),
)
_GROUPS = (
    _Entry(16, 12000, QuantisedTile(16, 128, 128, 8, 4)),
    _Entry(16, 0, QuantisedTile(16, 64, 128, 4, 4)),
    _Entry(32, 12000, QuantisedTile(32, 128, 128, 8, 4)),
    _Entry(32, 0, QuantisedTile(32, 128, 128, 4, 4)),
    _Entry(64, 12000, QuantisedTile(64, 128, 128, 4, 4)),
    _Entry(64, 0, QuantisedTile(64, 64, 128, 4, 4)),
    _Entry(_ANY, 12000, QuantisedTile(128, 128, 128, 8, 3)),
    _Entry(_ANY, 0, QuantisedTile(64, 128, 128, 8, 3)),
)
_TABLES = {
    "fp8": _EIGHT_BITS, "int8": _EIGHT_BITS, "fp8_blocks": _BLOCKS, "fp8_weights": _DECODED, "fp8_block_weights": _DECODED,
    "int4": _GROUPS, "bytes": _GROUPS, "mxfp4": _GROUPS,
}  # fmt: skip


def quantised_tile_for(kind: str, rows: int, columns: int, max_columns: int = _ANY) -> QuantisedTile:
    """The tile of a product, at most `max_columns` wide."""
    tile = next(entry.tile for entry in _TABLES[kind] if rows <= entry.max_rows and columns >= entry.min_columns)
    return tile._replace(columns=min(tile.columns, max_columns))


def every_quantised_tile(kind: str) -> list[QuantisedTile]:
    """All tiles of a kind."""
    return sorted({entry.tile for entry in _TABLES[kind]})


def parts_of(columns: int, width: int, step: int) -> int:
    """Parts of the inner dimension that are summed in order: more where few columns would leave the device idle. Each is a
    multiple of `step` inputs.
    """
    parts = 1 if columns >= 12000 else 2 if columns >= 5000 else 4
    while width % (parts * step):
        parts //= 2
    return max(parts, 1)
