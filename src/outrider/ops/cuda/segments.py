"""Where attention cuts keys on a GPU, and the size of its scratch. What is here needs no Triton."""

from __future__ import annotations

__all__ = ["BLOCK", "SEGMENT", "scratch_slots"]

BLOCK = 64  # keys of a block, by logical position
SEGMENT = 256  # keys of a segment, by logical position
MAX_SLOTS = 8192  # partial results of one segment of one row, unless there are many more rows
MIN_SHARE = 4  # slots of each row at least


def scratch_slots(rows: int, positions: int) -> int:
    """Slots of the scratch of `rows` decode rows, none of which has more than `positions` positions."""
    return min(rows * -(-positions // SEGMENT), max(MAX_SLOTS, rows * MIN_SHARE))
