"""Token stores on disk and the packed rows a training step reads.

Documents lie end to end, each closed by the end-of-document token. An epoch shuffles documents, cuts
the stream into rows and shuffles those, so a batch is a pure function of seed and step, and training
resumes at any step. A row may hold several documents: attention is plain causal across the boundary and
positions run on, because torch's fused causal kernels take no document mask and a dense mask leaves the
fast path. The separator is trained on, so the model learns to ignore what stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.errors import InvalidParameter, ModelError
from outrider.train.checkpoint import guarded_write

__all__ = ["Ids", "TokenStore", "TrainingRows", "write_store"]

Ids = npt.NDArray[np.integer]
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Documents as one memory-mapped array of ids; document i is ids[starts[i] : starts[i + 1]]."""

    ids: Ids
    starts: Array
    groups: list[str]  # the package of each document

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return len(self.groups)

    @classmethod
    def open(cls, directory: Path, name: str) -> TokenStore:
        """A store written by `write_store`."""
        try:
            meta = json.loads((directory / f"{name}.json").read_text())
            if meta["tokens"] == 0:
                return cls(np.zeros(0, np.uint16), np.zeros(1, np.int64), [])
            ids = np.memmap(directory / f"{name}.bin", dtype=meta["dtype"], mode="r", shape=(meta["tokens"],))
            return cls(ids, np.cumsum([0, *meta["lengths"]], dtype=np.int64), meta["groups"])
        except (OSError, KeyError, ValueError) as error:
            raise ModelError(
                f"{directory}/{name}.bin cannot be read: {error}; remove the folder to read the text again"
            ) from None


def write_store(directory: Path, name: str, documents: Sequence[Ids], groups: Sequence[str], vocab: int) -> TokenStore:
    """Write documents (each closed by its end token) as `name`.bin and `name`.json."""
    dtype = np.uint16 if vocab <= 2**16 else np.uint32
    directory.mkdir(parents=True, exist_ok=True)
    with guarded_write(directory / f"{name}.bin") as file:
        for document in documents:
            file.write(document.astype(dtype).tobytes())
    lengths = [len(document) for document in documents]
    meta = {"dtype": np.dtype(dtype).name, "tokens": sum(lengths), "lengths": lengths, "groups": list(groups)}
    with guarded_write(directory / f"{name}.json") as file:
        file.write(json.dumps(meta).encode())
    return TokenStore.open(directory, name)


class TrainingRows:
    """Rows of context + 1 ids, shuffled by seed; row r's last id is the next row's first."""

    def __init__(self, store: TokenStore, context: int, seed: int) -> None:
        self._store = store
        self._context = context
        self._seed = seed
        self.per_epoch = (store.tokens - 1) // context
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def require(self, rows: int) -> None:
        """Refuse a corpus that does not fill one batch."""
        if self.per_epoch < rows:
            needed = rows * self._context + 1
            shortage = f"{self._store.tokens} tokens to train on, one batch needs {needed}"
            raise InvalidParameter("corpus", f"{shortage}; add text or lower --rows or --context")

    def batch(self, step: int, rows: int) -> Array:
        """(rows, context + 1) ids of a step."""
        first = step * rows
        return np.stack([self._row(index) for index in range(first, first + rows)])

    def _row(self, index: int) -> Array:
        epoch, place = divmod(index, self.per_epoch)
        shuffled = self._epoch(epoch)
        begin = int(shuffled.rows[place]) * self._context
        return _slice(self._store, shuffled, begin, begin + self._context + 1)

    def _shuffle(self, epoch: int) -> _Epoch:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        documents = generator.permutation(self._store.documents)
        lengths = np.diff(self._store.starts)[documents]
        return _Epoch(documents, np.concatenate(([0], np.cumsum(lengths))), generator.permutation(self.per_epoch))


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One shuffled pass: the order of documents, where each begins in the stream, the order of rows."""

    documents: Array
    starts: Array
    rows: Array


def _slice(store: TokenStore, epoch: _Epoch, begin: int, end: int) -> Array:
    """Ids begin..end of the shuffled stream."""
    out = np.empty(end - begin, dtype=np.int64)
    at = int(np.searchsorted(epoch.starts, begin, side="right")) - 1
    filled = 0
    while filled < out.size:
        source = int(store.starts[epoch.documents[at]]) + begin + filled - int(epoch.starts[at])
        count = min(int(epoch.starts[at + 1]) - begin - filled, out.size - filled)
        out[filled : filled + count] = store.ids[source : source + count]
        filled += count
        at += 1
    return out
