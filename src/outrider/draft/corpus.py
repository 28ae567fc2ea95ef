"""The user's texts as a suffix array in a file: built once for a tokenizer and these contents, mapped by every start after.

A file is a header, the tokens and the order. It is written under a temporary name and then renamed, so that nobody sees a part of
one. A file that is damaged, or is something else, is written again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from outrider.draft.corpus_files import CorpusFile, CorpusTexts, corpus_files
from outrider.draft.suffix_array import SEPARATOR, Ids, SuffixArray, suffix_order
from outrider.errors import InvalidParameter
from outrider.platform import cache_folder
from outrider.text import Tokenizer

__all__ = ["SEARCH_CORPUS", "Corpus", "open_corpus"]

SEARCH_CORPUS = frozenset({"ngram", "suffix"})  # methods that look it up
_log = logging.getLogger("outrider.progress")
_HEADER = struct.Struct("<16sQQI4x32s")  # magic, tokens, reach, CRC-32 of what follows, key
_MAGIC = b"outrider corpus1"
_REACH = 64  # tokens by which places are ordered; a match is at most one shorter
_MAX_TOKENS = 2**28
_PART = 2**14  # characters that are encoded as one text, cut at the end of a line
_BATCH = 2**20  # characters that are encoded at once
_KEPT_FILES = 8  # in the cache folder; the latest used


@dataclass(frozen=True, slots=True)
class Corpus:
    """The user's texts, ready to be looked up, and how they came to be so."""

    text: SuffixArray
    files: int
    skipped: int  # files of folders that are no text
    seconds: float
    was_built: bool

    def __str__(self) -> str:
        skipped = f" ({self.skipped} that are no text left out)" if self.skipped else ""
        how = f"built in {self.seconds:.1f} s" if self.was_built else "reused"
        return f"{self.files} files{skipped}, {self.text.size} tokens, {how}"


def open_corpus(paths: Iterable[Path], tokenizer: Tokenizer, vocab: int) -> Corpus:
    """The corpus of these files for a model's tokenizer, from the cache where it is there."""
    started = time.monotonic()
    files = corpus_files(paths)
    texts = CorpusTexts(files)
    for _ in texts:
        pass
    key = _key(texts, tokenizer)
    text = _mapped(_path(key), key)
    was_built = text is None
    if text is None:
        text = _built(files, texts.bytes, tokenizer, vocab)
    corpus = Corpus(text, texts.read, texts.skipped, time.monotonic() - started, was_built)
    _log.info("corpus: %s", corpus)
    return corpus


def _built(files: list[CorpusFile], size: int, tokenizer: Tokenizer, vocab: int) -> SuffixArray:
    """Encode and order the texts, write both to the cache, and map the file."""
    texts = CorpusTexts(files)
    with tqdm(total=size, desc="reading corpus", unit="B", unit_scale=True, disable=None) as bar:
        tokens = _encoded(texts, tokenizer, vocab, bar.update)
    if not (tokens >= 0).any():
        raise InvalidParameter("corpus", "the files hold no text; pass text files, folders of them, or .jsonl files")
    with tqdm(total=_REACH.bit_length() - 1, desc="ordering corpus", disable=None) as bar:
        order = suffix_order(tokens, _REACH, bar.update)
    key = _key(texts, tokenizer)  # of what was read this time
    try:
        return _kept(tokens, order, key)
    except OSError as error:
        _log.warning("corpus: cannot be kept for the next start (%s); set OUTRIDER_CACHE to a folder with room", error)
        return SuffixArray(tokens, order, _REACH)


def _kept(tokens: Ids, order: Ids, key: bytes) -> SuffixArray:
    """The same from a file in the cache. Of several processes that write it at once, the last one's stays."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            _write(file, tokens, order, key)
            text = _map(file, key)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _drop_oldest(path.parent)
    return text


def _encoded(texts: Iterable[str], tokenizer: Tokenizer, vocab: int, count: Callable[[int], object]) -> Ids:
    """The tokens of all texts, a separator before each and at the end."""
    parts: list[Ids] = []
    total = 0
    for batch in _batches(texts):
        encoded = tokenizer.encode_many([part for part, _ in batch])
        for ids, (_, begins) in zip(encoded, batch, strict=True):
            parts.append(np.array([SEPARATOR, *ids] if begins else ids, np.int32))
            total += len(parts[-1])
        if total > _MAX_TOKENS:
            raise InvalidParameter("corpus", f"has more than {_MAX_TOKENS} tokens; pass fewer files")
        count(sum(len(part.encode("utf-8", "surrogatepass")) for part, _ in batch))
    tokens = np.concatenate([*parts, np.array([SEPARATOR], np.int32)])
    tokens[tokens >= vocab] = SEPARATOR  # a tokenizer may know more than the model
    return tokens


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Parts of texts, each with whether a text begins there."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        start = 0
        while start < len(text):
            cut = text.rfind("\n", start, start + _PART) + 1
            end = len(text) if len(text) - start <= _PART else cut if cut > start else start + _PART
            batch.append((text[start:end], start == 0))
            size += end - start
            start = end
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _key(texts: CorpusTexts, tokenizer: Tokenizer) -> bytes:
    return blake2b(texts.digest + tokenizer.to_json().encode(), digest_size=32).digest()


def _path(key: bytes) -> Path:
    return cache_folder() / "corpus" / f"{key.hex()[:32]}.corpus"


def _write(file: IO[bytes], tokens: Ids, order: Ids, key: bytes) -> None:
    crc = zlib.crc32(order.data.cast("B"), zlib.crc32(tokens.data.cast("B")))
    file.write(_HEADER.pack(_MAGIC, len(tokens), _REACH, crc, key))
    file.write(tokens.data.cast("B"))
    file.write(order.data.cast("B"))
    file.flush()


def _mapped(path: Path, key: bytes) -> SuffixArray | None:
    """The corpus in a file, or None where there is none that can be used."""
    try:
        with path.open("rb") as file:
            text = _map(file, key)
        os.utime(path)  # used now
        return text
    except (OSError, ValueError, struct.error):
        return None


def _map(file: IO[bytes], key: bytes) -> SuffixArray:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, size, reach, crc, written = _HEADER.unpack_from(pages)
    whole = len(pages) == _HEADER.size + 8 * size
    if (magic, reach, written) != (_MAGIC, _REACH, key) or not whole or zlib.crc32(memoryview(pages)[_HEADER.size :]) != crc:
        raise ValueError("not a corpus of these texts, or a damaged one")
    tokens = np.frombuffer(pages, np.int32, size, _HEADER.size)
    order = np.frombuffer(pages, np.int32, size, _HEADER.size + 4 * size)
    return SuffixArray(tokens, order, reach)


def _drop_oldest(folder: Path) -> None:
    """Corpora that were not used for the longest time. Those who have one mapped keep it."""
    with contextlib.suppress(OSError):
        files = sorted((path.stat().st_mtime, path) for path in folder.iterdir())
        for _, path in files[:-_KEPT_FILES]:
            path.unlink()
