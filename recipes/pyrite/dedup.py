"""Near-duplicate documents, recognised by the lines they share.

A document is a set of line hashes. Hashes that are 0 modulo SAMPLE index the documents kept so far. The sample of a part is
a part of the sample, so a copy with lines added or removed is still recognised.
"""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import numpy as np
import numpy.typing as npt

__all__ = ["Lines", "NearDuplicates", "line_hashes"]

Lines = npt.NDArray[np.uint32]

SAMPLE = 8
_SHORTEST = 12  # characters; shorter lines occur in too many documents
_POSTINGS = 12  # documents remembered per line; more is a common line
_CHECKED = 3  # best candidates compared in full
_SMALLEST = 4  # hashes that always index, for short documents


def line_hashes(text: str) -> Lines:
    """Sorted distinct hashes of the distinctive lines of a text, whitespace and case aside."""
    lines = {" ".join(line.split()).lower() for line in text.split("\n")}
    return np.array(sorted({crc32(line.encode()) for line in lines if len(line) >= _SHORTEST}), dtype=np.uint32)


class NearDuplicates:
    """Remembers documents and recognises copies of them."""

    def __init__(self, threshold: float = 0.7) -> None:
        self._threshold = threshold
        self._kept: list[Lines] = []
        self._index: dict[int, list[int]] = {}

    def add(self, lines: Lines) -> bool:
        """Whether the document is new; a new one is remembered. One without distinctive lines never is."""
        if lines.size == 0:
            return False
        keys = self._keys(lines)
        votes = Counter(doc for key in keys for doc in self._index.get(key, ()))
        for doc, _ in votes.most_common(_CHECKED):
            shared = np.intersect1d(lines, self._kept[doc], assume_unique=True).size
            if shared >= self._threshold * lines.size:
                return False
        for key in keys:
            postings = self._index.setdefault(key, [])
            if len(postings) < _POSTINGS:
                postings.append(len(self._kept))
        self._kept.append(lines)
        return True

    @staticmethod
    def _keys(lines: Lines) -> list[int]:
        keys: list[int] = np.union1d(lines[lines % SAMPLE == 0], lines[:_SMALLEST]).tolist()
        return keys
