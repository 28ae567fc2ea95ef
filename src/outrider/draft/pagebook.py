"""Which pages hold a drafter's own entries, and for what text.

Drafters keep their KV under the target's page ids, so a page that a new sequence finds filled (a
prefix-cache hit) may hold the drafter's entries too. It does where the drafter filled it for the
same text, which this book remembers; where it did not, the drafter reads that text again or does
without it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from outrider.core import Sequence

__all__ = ["Held", "PageBook"]


class Held(NamedTuple):
    """What a sequence finds in its pages when it begins."""

    tokens: int = 0  # leading tokens whose entries are there
    feature: Tensor | None = None  # the target's at the last of them


class PageBook:
    """For each full page, the text up to its end (as a running hash) and the last feature in it.

    A hash that met another text's would cost acceptance, never a token.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[int, tuple[int, Tensor | None]] = {}
        self._hashes: dict[Sequence, list[int]] = {}  # of the text up to the end of each page

    def begin(self, seq: Sequence) -> Held:
        """What the pages a sequence starts with hold; nothing where they are empty."""
        self._hashes[seq] = []
        held = Held()
        for index in range(seq.cached // self.page_size):
            text, feature = self._pages.get(seq.pages[index], (None, None))
            if text != self._hash(seq, index):
                break
            held = Held((index + 1) * self.page_size, feature)
        return held

    def end(self, seq: Sequence) -> None:
        self._hashes.pop(seq, None)

    def overwrite(self, pages: Seq[int], start: int) -> None:
        """Slots from `start` on are about to be written."""
        for page in pages[start // self.page_size :]:
            self._pages.pop(page, None)

    def fill(self, seq: Sequence, index: int, feature: Tensor | None = None) -> None:
        """A sequence's page holds all of its entries, for committed tokens."""
        self._pages[seq.pages[index]] = (self._hash(seq, index), feature)

    def _hash(self, seq: Sequence, index: int) -> int:
        known, size = self._hashes[seq], self.page_size
        while len(known) <= index:
            place = len(known) * size
            known.append(hash((known[-1] if known else 0, *seq.tokens[place : place + size])))
        return known[index]
