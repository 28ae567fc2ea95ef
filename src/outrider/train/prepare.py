"""From sources to token stores: corpus, tokenizer (trained or given), ids on disk.

With a given tokenizer this is the quick first half of training a draft model or a head.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.train.checkpoint import guarded_write
from outrider.train.corpus import SPLITS, Corpus, CorpusOptions, Document, build_corpus
from outrider.train.data import TokenStore, write_store
from outrider.train.parallel import chunked, cores, map_chunks
from outrider.train.sources import Source, distributions
from outrider.train.tokenizer import EOS, encode_documents, load_tokenizer, save_tokenizer, train_tokenizer

__all__ = ["PrepareOptions", "Prepared", "prepare"]

_SUMMARY = "corpus.json"
_CHUNK = 48  # documents per task of a worker


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How sources become tokens."""

    vocab: int = 8192
    context: int = 2048
    tokenizer: Path | None = None  # a directory whose tokenizer is used instead of training one
    sample_bytes: int = 40_000_000  # text the tokenizer learns from
    corpus: CorpusOptions = field(default_factory=CorpusOptions)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder with token stores, the tokenizer and corpus.json."""

    directory: Path
    summary: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> Prepared:
        """A folder that `prepare` finished."""
        try:
            return cls(directory, json.loads((directory / _SUMMARY).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ModelError(f"{directory} holds no prepared corpus: {error}") from None

    @property
    def vocab(self) -> int:
        return int(self.summary["vocab"])

    @property
    def eos(self) -> int:
        return int(self.summary["eos"])

    def store(self, split: str) -> TokenStore:
        return TokenStore.open(self.directory, split)


def prepare(sources: Sequence[Source], options: PrepareOptions, directory: Path, say: Callable[[str], None] = print) -> Prepared:
    """Build the corpus, train or take the tokenizer, encode, and write everything into `directory`."""
    clock = _Stopwatch(say)
    corpus = build_corpus(sources, options.corpus, distributions())
    clock.lap(f"{len(sources)} files read, {len(corpus.documents)} kept, dropped {corpus.dropped}")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else _learn(corpus, options)
    save_tokenizer(tokenizer, directory, options.context)
    eos, vocab = tokenizer.token_to_id(EOS), tokenizer.get_vocab_size()
    if eos is None:
        raise ModelError(f"{options.tokenizer} has no {EOS} token to end documents with")
    clock.lap(f"tokenizer of {vocab}")
    summary = corpus.summary() | {"vocab": vocab, "eos": eos, "tokens": {}}
    workers = options.corpus.workers or cores()
    for split in SPLITS:
        documents = corpus.split(split)
        ids = _encode(documents, directory, eos, workers)
        store = write_store(directory, split, ids, [document.package for document in documents], vocab)
        summary["tokens"][split] = store.tokens
    clock.lap(f"tokens {summary['tokens']}")
    with guarded_write(directory / _SUMMARY) as file:  # last: its presence means the folder is complete
        file.write(json.dumps(summary, indent=1).encode())
    return Prepared(directory, summary)


def _learn(corpus: Corpus, options: PrepareOptions) -> Any:
    return train_tokenizer(_sample(corpus.split("train"), options.sample_bytes), options.vocab)


def _sample(documents: Sequence[Document], most: int) -> list[str]:
    """Texts in the order of a hash of their names, up to `most` characters."""
    chosen: list[str] = []
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.blake2b(d.name.encode("utf-8", "replace")).digest()):
        if size >= most:
            break
        chosen.append(document.text)
        size += len(document.text)
    return chosen


def _encode(documents: Sequence[Document], directory: Path, eos: int, workers: int) -> list[Any]:
    chunks = chunked([document.text for document in documents], _CHUNK)
    encode = partial(encode_documents, path=str(directory), eos=eos)
    return [ids for chunk in map_chunks(encode, chunks, workers) for ids in chunk]


class _Stopwatch:
    """Says how long each part took."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = time.monotonic()

    def lap(self, what: str) -> None:
        now = time.monotonic()
        self._say(f"corpus: {what} ({now - self._last:.1f} s)")
        self._last = now
