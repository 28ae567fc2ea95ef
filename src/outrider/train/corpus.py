"""The corpus: read sources in parallel, clean, drop near-duplicates, hold out packages and files.

Two held-out sets: whole packages never trained on, and single files whose siblings are.
Held-out packages are read first, so that copies of them elsewhere are what gets dropped.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.train.clean import decode, rejection, strip_licence
from outrider.train.dedup import Lines, NearDuplicates, line_hashes
from outrider.train.parallel import chunked, cores, map_chunks
from outrider.train.sources import Distribution, Source

__all__ = ["SPLITS", "TRAIN", "Corpus", "CorpusOptions", "Document", "PackageShare", "build_corpus", "choose_packages"]

TRAIN, PACKAGES, FILES = SPLITS = ("train", "heldout_packages", "heldout_files")
_CHUNK = 64  # files per task of a worker
_VENDORED = ("/_vendor/", "/vendored/", "/_vendored/", "/externals/", "/extern/", "/third_party/", "/vendor/")


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What to keep and what to hold out."""

    heldout: tuple[str, ...] = ()  # packages held out by name; those not present are passed over
    package_share: float = 0.025  # of the bytes, chosen by hash where no name is given
    file_share: float = 0.008  # of the other files
    near_duplicate: float = 0.7  # share of lines found in one earlier file
    skip_unreadable: bool = False
    workers: int = 0  # 0: every core
    seconds: float | None = None  # stop reading after this long


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned text and where it belongs."""

    text: str
    package: str
    name: str
    split: str


@dataclass(slots=True)
class PackageShare:
    """What one package gave."""

    package: str
    distribution: str
    version: str
    licence: str
    split: str
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and the account of where they came from."""

    documents: list[Document]
    shares: list[PackageShare]
    dropped: dict[str, int] = field(default_factory=dict)

    def split(self, name: str) -> list[Document]:
        """The documents of one split, in order."""
        return [document for document in self.documents if document.split == name]

    def summary(self) -> dict[str, Any]:
        """Plain data for the model card."""
        size: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for document in self.documents:
            size[document.split] += len(document.text.encode())
            files[document.split] += 1
        return {
            "bytes": dict(size),
            "files": dict(files),
            "dropped": self.dropped,
            "packages": [asdict(share) for share in sorted(self.shares, key=lambda s: -s.bytes)],
        }


@dataclass(frozen=True, slots=True)
class _Read:
    """What a worker made of one source: a text with its line hashes, or why not."""

    index: int
    text: str = ""
    reason: str | None = None
    lines: Lines | None = None


def build_corpus(sources: Sequence[Source], options: CorpusOptions, known: dict[str, Distribution] | None = None) -> Corpus:
    """Read and clean every source; see the file's docstring for what is dropped and held out."""
    dropped: Counter[str] = Counter()
    kept: list[tuple[Source, _Read]] = []
    for read in _read_all(sources, options):
        source = sources[read.index]
        if read.reason is None:
            kept.append((source, read))
        elif read.reason.startswith("unreadable") and not options.skip_unreadable:
            raise OutriderError(f"cannot read {source.path}: {read.reason}; make it readable or pass --skip-unreadable")
        else:
            dropped[read.reason.split(":")[0]] += 1
    dropped["not read in time"] = len(sources) - len(kept) - sum(dropped.values())
    heldout = choose_packages(_bytes_by_package(kept), options)
    kept.sort(key=lambda pair: _priority(pair[0], heldout))
    seen = NearDuplicates(options.near_duplicate)
    documents: list[Document] = []
    for source, read in kept:
        if read.lines is None or not seen.add(read.lines):
            dropped["near-duplicate"] += 1
            continue
        documents.append(Document(read.text, source.package, source.name, _split_of(source, heldout, options)))
    return Corpus(documents, _shares(documents, known or {}), {k: v for k, v in sorted(dropped.items()) if v})


def choose_packages(sizes: dict[str, int], options: CorpusOptions) -> frozenset[str]:
    """The packages to hold out: those named, else some by the hash of their name."""
    if options.heldout:
        return frozenset(name for name in options.heldout if name in sizes)
    wanted = options.package_share * sum(sizes.values())
    chosen: set[str] = set()
    taken = 0
    for name in sorted(sizes, key=_hash):
        if taken >= wanted or len(sizes) < 2:
            break
        if sizes[name] <= 1.5 * wanted:  # one large package would make the figure about itself
            chosen.add(name)
            taken += sizes[name]
    return frozenset(chosen)


def _read_all(sources: Sequence[Source], options: CorpusOptions) -> Iterable[_Read]:
    """Files in the order of a hash, so that a deadline leaves a fair sample."""
    order = sorted(range(len(sources)), key=lambda i: _hash(sources[i].name))
    tasks = chunked([(i, sources[i]) for i in order], _CHUNK)
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    for chunk in map_chunks(_read_chunk, tasks, options.workers or cores(), deadline):
        yield from chunk


def _read_chunk(chunk: Sequence[tuple[int, Source]]) -> list[_Read]:
    return [_read(index, source) for index, source in chunk]


def _read(index: int, source: Source) -> _Read:
    try:
        text = source.text if source.text is not None else decode(Path(source.path).read_bytes())
    except OSError as error:
        return _Read(index, reason=f"unreadable: {error.strerror}")
    if text is None:
        return _Read(index, reason="not UTF-8")
    reason = rejection(text, source.path)
    if reason is not None:
        return _Read(index, reason=reason)
    if source.path.endswith((".py", ".pyi")):
        text = strip_licence(text)
    return _Read(index, text, None, line_hashes(text))


def _bytes_by_package(kept: Sequence[tuple[Source, _Read]]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for source, read in kept:
        sizes[source.package] += len(read.text)
    return dict(sizes)


def _priority(source: Source, heldout: frozenset[str]) -> tuple[bool, bool, str]:
    """Earlier documents win over their copies: held-out packages, then originals, then vendored."""
    vendored = any(mark in source.path for mark in _VENDORED)
    return source.package not in heldout, vendored, source.name


def _split_of(source: Source, heldout: frozenset[str], options: CorpusOptions) -> str:
    if source.package in heldout:
        return PACKAGES
    return FILES if _hash(source.name) < options.file_share * 2**64 else TRAIN


def _shares(documents: Sequence[Document], known: dict[str, Distribution]) -> list[PackageShare]:
    shares: dict[tuple[str, bool], PackageShare] = {}
    for document in documents:
        held = document.split == PACKAGES
        key = (document.package, held)
        if key not in shares:
            owner = known.get(document.package) or Distribution(document.package, "", "not stated")
            split = PACKAGES if held else TRAIN
            shares[key] = PackageShare(document.package, owner.name, owner.version, owner.licence, split)
        shares[key].files += 1
        shares[key].bytes += len(document.text.encode())
    return list(shares.values())


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
