"""The draft lengths among which the controller chooses: single nodes for most drafters, multiples of them for large trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

__all__ = ["LENGTHS", "Ladder", "ladder"]

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # of drafts, in units; from one to the next is a step
_CHANCE = 0.6  # of a node after its parent, of a drafter that nothing is known of


@dataclass(frozen=True, slots=True)
class Ladder:
    """Lengths in nodes, and what lies between them."""

    unit: int
    lengths: tuple[int, ...]
    spans: tuple[slice, ...]  # nodes of each step, the likeliest first
    widths: tuple[int, ...]
    distances: tuple[float, ...]  # nodes between the middles of two steps
    prior: tuple[float, ...]  # accepted tokens that every step adds, until something is known

    @property
    def longest(self) -> int:
        return self.lengths[-1]


@lru_cache(maxsize=8)
def ladder(unit: int = 1) -> Ladder:
    """The lengths of drafts that are planned in units of so many nodes."""
    lengths = tuple(unit * length for length in LENGTHS)
    spans = tuple(slice(*ends) for ends in pairwise((0, *lengths)))
    widths = tuple(span.stop - span.start for span in spans)
    distances = (1.0, *((before + width) / 2 for before, width in pairwise(widths)))
    prior = tuple(sum(_CHANCE**place for place in range(span.start + 1, span.stop + 1)) for span in spans)
    return Ladder(unit, lengths, spans, widths, distances, prior)
