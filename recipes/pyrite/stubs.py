"""Stubs (signature and docstring of a function) in the tokens of Python source.

Nothing here imports torch, so worker processes start fast.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.text import byte_letters
from recipes.pyrite.parallel import chunked, map_chunks

if TYPE_CHECKING:
    from outrider.train.data import TokenStore

__all__ = ["Stubs", "find_stubs"]

Ids = npt.NDArray[np.int64]

# A line with def, balanced brackets, a colon, and a docstring closed at the end of a line.
_STUB = re.compile(
    rb'^[ ]*(?:async )?def \w+\((?:[^()]|\((?:[^()]|\([^()]*\))*\)){0,800}\)[^\n:]{0,80}:\n[ ]+[rR]?"""[^"].{0,1200}?"""\n',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Stubs:
    """Where stubs lie in a store, shortest first."""

    starts: Ids
    lengths: Ids

    def cut(self, store: TokenStore, begin: int, end: int, more: int = 0, lead: int = 0) -> tuple[Ids, Ids]:
        """Stubs begin .. end as prompts (B, P) with their lengths (B,); tokens beyond a length are undefined.

        The prompt includes `more` tokens that follow the stub in the store, and up to `lead` of its document before it, so
        that it is no longer than the longest stub.
        """
        stubs, sizes = self.starts[begin:end], self.lengths[begin:end]
        documents = store.starts[np.searchsorted(store.starts, stubs, side="right") - 1]
        starts = np.maximum(stubs - np.minimum(lead, self.lengths.max() - sizes), documents)
        lengths = np.minimum(stubs - starts + sizes + more, store.tokens - starts)
        longest = int(lengths.max())
        rows = np.zeros((len(lengths), longest), dtype=np.int64)
        for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
            row[:length] = store.ids[start : start + length]
        return rows, lengths


def find_stubs(store: TokenStore, tokenizer: Any, shortest: int, longest: int, workers: int = 1) -> Stubs:
    """Stubs of shortest .. longest tokens in a store."""
    table = _token_bytes(tokenizer)
    bounds = store.starts.tolist()
    documents = [(begin, np.asarray(store.ids[begin:end])) for begin, end in pairwise(bounds)]
    chunks = chunked(documents, max(len(documents) // (4 * workers), 1))
    spans = [pair for chunk in map_chunks(partial(_in_documents, table=table), chunks, workers) for pair in chunk]
    kept = sorted((length, start) for start, length in spans if shortest <= length <= longest)
    lengths, starts = (np.array([pair[i] for pair in kept], dtype=np.int64) for i in (0, 1))
    return Stubs(starts, lengths)


def _in_documents(documents: Sequence[tuple[int, Ids]], table: list[bytes]) -> list[tuple[int, int]]:
    """(start, length) of the stubs that begin and end at token borders, in documents that come with their place in the store."""
    sizes = np.array([len(piece) for piece in table])
    stubs: list[tuple[int, int]] = []
    for place, ids in documents:
        text = b"".join(map(table.__getitem__, ids.tolist()))
        spans = [match.span() for match in _STUB.finditer(text)]
        bounds = np.concatenate(([0], np.cumsum(sizes[ids]))) if spans else np.zeros(1, np.int64)
        for span in spans:
            first, end = (int(np.searchsorted(bounds, byte)) for byte in span)
            if (bounds[first], bounds[end]) == span:
                stubs.append((place + first, end - first))
    return stubs


def _token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token of a byte-level tokenizer."""
    letters, table = byte_letters(), [b""] * tokenizer.get_vocab_size()
    for token, i in tokenizer.get_vocab().items():
        table[i] = bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else b""
    return table
