"""From sources to token stores: corpus, tokenizer (trained, or copied from a model), ids on disk."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from outrider.train.checkpoint import guarded_write
from outrider.train.corpus import SUMMARY, TokenCorpus, copy_tokenizer, document_end, encode_documents, load_tokenizer
from outrider.train.data import Ids, write_store
from recipes.pyrite.bpe import EOS, SPECIAL, save_tokenizer, train_tokenizer
from recipes.pyrite.corpus import SPLITS, CleanDocument, Corpus, CorpusRules, build_corpus
from recipes.pyrite.parallel import chunked, cores, map_chunks
from recipes.pyrite.sources import Source, distributions

__all__ = ["PrepareOptions", "prepare"]

_CHUNK = 48  # documents per task of a worker


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How sources become tokens."""

    vocab: int = 8192
    context: int = 2048
    tokenizer: Path | None = None  # a directory whose tokenizer is used instead of training one
    sample_bytes: int = 40_000_000  # text the tokenizer learns from
    corpus: CorpusRules = field(default_factory=CorpusRules)


def prepare(
    sources: Sequence[Source], options: PrepareOptions, directory: Path, log: Callable[[str], None] = print
) -> TokenCorpus:
    """Build the corpus, train or copy the tokenizer, encode, and write everything into `directory`."""
    clock = _PhaseTimer(log)
    corpus = build_corpus(sources, options.corpus, distributions())
    clock.lap(f"{len(sources)} files read, {len(corpus.documents)} kept, dropped {corpus.dropped}")
    tokenizer, eos = _tokenizer(corpus, options, directory)
    vocab = tokenizer.get_vocab_size()
    clock.lap(f"tokenizer of {vocab}")
    summary = corpus.summary() | {"vocab": vocab, "eos": eos, "tokens": {}}
    workers = options.corpus.workers or cores()
    for split in SPLITS:
        documents = corpus.split(split)
        ids = _encode(documents, directory, eos, workers)
        store = write_store(directory, split, ids, [document.package for document in documents], vocab)
        summary["tokens"][split] = store.tokens
    clock.lap(f"tokens {summary['tokens']}")
    with guarded_write(directory / SUMMARY) as file:  # last: its presence means the folder is complete
        file.write(json.dumps(summary, indent=1).encode())
    return TokenCorpus(directory, summary)


def _tokenizer(corpus: Corpus, options: PrepareOptions, directory: Path) -> tuple[Any, int]:
    """The tokenizer, written to `directory`, and the id that ends documents."""
    if options.tokenizer is not None:
        copy_tokenizer(options.tokenizer, directory)
        return load_tokenizer(directory), document_end(options.tokenizer)
    trained = train_tokenizer(_sample(corpus.split("train"), options.sample_bytes), options.vocab)
    save_tokenizer(trained, directory, options.context)
    return trained, SPECIAL.index(EOS)


def _sample(documents: Sequence[CleanDocument], max_chars: int) -> list[str]:
    """Texts in the order of a hash of their names, up to `max_chars` characters."""
    chosen: list[str] = []
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.blake2b(d.name.encode("utf-8", "replace")).digest()):
        if size >= max_chars:
            break
        chosen.append(document.text)
        size += len(document.text)
    return chosen


def _encode(documents: Sequence[CleanDocument], directory: Path, eos: int, workers: int) -> list[Any]:
    chunks = chunked([document.text for document in documents], _CHUNK)
    encode = partial(_encode_chunk, directory=directory, eos=eos)
    return [ids for chunk in map_chunks(encode, chunks, workers) for ids in chunk]


def _encode_chunk(texts: Sequence[str], directory: Path, eos: int) -> list[Ids]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    return list(encode_documents(texts, directory, eos))


class _PhaseTimer:
    """Logs how long each phase took."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._last = time.monotonic()

    def lap(self, what: str) -> None:
        now = time.monotonic()
        self._log(f"corpus: {what} ({now - self._last:.1f} s)")
        self._last = now
