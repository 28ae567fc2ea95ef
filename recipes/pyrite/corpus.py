"""The corpus: read sources in parallel, clean, drop near-duplicates, hold out packages and files.

Two held-out sets: whole packages never trained on, and single files whose siblings are.
Held-out packages are read first, so that copies of them elsewhere are what gets dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.train.corpus import choose_packages, name_hash
from recipes.pyrite.clean import decode, rejection, strip_licence
from recipes.pyrite.dedup import Lines, NearDuplicates, line_hashes
from recipes.pyrite.parallel import chunked, cores, map_chunks
from recipes.pyrite.sources import Distribution, Source

__all__ = ["SPLITS", "TRAIN", "CleanDocument", "Corpus", "CorpusRules", "PackageShare", "build_corpus", "heldout_packages"]

TRAIN, PACKAGES, FILES = SPLITS = ("train", "heldout_packages", "heldout_files")
_CHUNK = 64  # files per task of a worker
_VENDORED = ("/_vendor/", "/vendored/", "/_vendored/", "/externals/", "/extern/", "/third_party/", "/vendor/")


@dataclass(frozen=True, slots=True)
class CorpusRules:
    """What to keep and what to hold out."""

    heldout: tuple[str, ...] = ()  # packages held out by name; those not installed are ignored
    package_share: float = 0.025  # of the bytes, chosen by hash where no package is named
    file_share: float = 0.008  # of the other files
    near_duplicate: float = 0.7  # share of lines that one earlier file has too
    skip_unreadable: bool = False
    workers: int = 0  # 0: every core
    seconds: float | None = None  # stop reading after this long


@dataclass(frozen=True, slots=True)
class CleanDocument:
    """A cleaned text and where it belongs."""

    text: str
    package: str
    name: str
    split: str


@dataclass(slots=True)
class PackageShare:
    """What one package contributed."""

    package: str
    distribution: str
    version: str
    licence: str
    split: str
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and which packages they came from."""

    documents: list[CleanDocument]
    shares: list[PackageShare]
    dropped: dict[str, int] = field(default_factory=dict)

    def split(self, name: str) -> list[CleanDocument]:
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
    """One source as a worker read it: a text with its line hashes, or the reason it was left out."""

    index: int
    text: str = ""
    reason: str | None = None
    lines: Lines | None = None


def build_corpus(sources: Sequence[Source], options: CorpusRules, known: dict[str, Distribution] | None = None) -> Corpus:
    """Read and clean every source, drop near-duplicates, and hold out packages and files."""
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
    heldout = heldout_packages(_bytes_by_package(kept), options)
    kept.sort(key=lambda pair: _priority(pair[0], heldout))
    seen = NearDuplicates(options.near_duplicate)
    documents: list[CleanDocument] = []
    for source, read in kept:
        if read.lines is None or not seen.add(read.lines):
            dropped["near-duplicate"] += 1
            continue
        documents.append(CleanDocument(read.text, source.package, source.name, _split_of(source, heldout, options)))
    return Corpus(documents, _shares(documents, known or {}), {k: v for k, v in sorted(dropped.items()) if v})


def heldout_packages(sizes: dict[str, int], options: CorpusRules) -> frozenset[str]:
    """The packages to hold out: those named, else some by the hash of their name."""
    if options.heldout:
        return frozenset(name for name in options.heldout if name in sizes)
    return choose_packages(sizes, options.package_share * sum(sizes.values()))


def _read_all(sources: Sequence[Source], options: CorpusRules) -> Iterable[_Read]:
    """Read files in the order of a hash, so that a deadline leaves a fair sample."""
    order = sorted(range(len(sources)), key=lambda i: name_hash(sources[i].name))
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


def _split_of(source: Source, heldout: frozenset[str], options: CorpusRules) -> str:
    if source.package in heldout:
        return PACKAGES
    return FILES if name_hash(source.name) < options.file_share * 2**64 else TRAIN


def _shares(documents: Sequence[CleanDocument], known: dict[str, Distribution]) -> list[PackageShare]:
    shares: dict[tuple[str, bool], PackageShare] = {}
    for document in documents:
        held = document.split == PACKAGES
        key = (document.package, held)
        if key not in shares:
            published = known.get(document.package) or Distribution(document.package, "", "not stated")
            split = PACKAGES if held else TRAIN
            shares[key] = PackageShare(document.package, published.name, published.version, published.licence, split)
        shares[key].files += 1
        shares[key].bytes += len(document.text.encode())
    return list(shares.values())
