"""Where documents come from: folders, JSONL files and the packages of the running Python.

A source names a file and the package it belongs to; nothing is read here except JSONL.
"""

from __future__ import annotations

import json
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from outrider.errors import InvalidParameter, OutriderError

__all__ = ["STDLIB", "Distribution", "Source", "distributions", "find_sources", "installed_folders", "installed_sources"]

STDLIB = "python"  # the distribution that standard library modules belong to
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_MAX_LICENCE = 120  # longer licence fields are whole licence texts


@dataclass(frozen=True, slots=True)
class Source:
    """One document to read: a file, or a line of a JSONL whose text is already here."""

    path: str
    name: str  # the path below its root, equal on every machine
    package: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Who published a package, for the model card."""

    name: str
    version: str
    licence: str


def find_sources(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Source]:
    """Documents under folders, single files and JSONL files, in a fixed order."""
    sources: list[Source] = []
    for path in paths:
        if path.suffix == ".jsonl" and path.is_file():
            sources.extend(_jsonl_sources(path))
        elif path.is_file():
            sources.append(Source(str(path), path.name, path.stem))
        elif path.is_dir():
            sources.extend(_folder_sources(path, tuple(suffixes)))
        else:
            raise InvalidParameter("corpus", f"{path} does not exist; pass folders, files or a .jsonl")
    return sources


def installed_folders() -> list[Path]:
    """The standard library and every site-packages of the running Python."""
    listed = [sysconfig.get_paths()["stdlib"], *site.getsitepackages(), *sys.path]
    folders: dict[Path, None] = {}
    for name in listed:
        path = Path(name).resolve() if name else None
        if path is None or not path.is_dir():
            continue
        if path.name in ("site-packages", "dist-packages") or path == Path(listed[0]).resolve():
            folders[path] = None
    return list(folders)


def installed_sources(suffixes: Sequence[str] = (".py",)) -> list[Source]:
    """Documents of all installed packages; a package seen in two folders counts once."""
    sources: dict[str, Source] = {}
    for folder in installed_folders():
        for source in _folder_sources(folder, tuple(suffixes)):
            sources.setdefault(source.name, source)
    return list(sources.values())


def distributions() -> dict[str, Distribution]:
    """Importable name -> its distribution, from the installed metadata."""
    stdlib = Distribution(STDLIB, platform.python_version(), "PSF-2.0")
    known = dict.fromkeys(sys.stdlib_module_names, stdlib)
    for name, owners in metadata.packages_distributions().items():
        data = metadata.metadata(owners[0])
        known[name] = Distribution(data["Name"], data["Version"], _licence(data))
    return known


def _licence(data: metadata.PackageMetadata) -> str:
    stated: list[str] = [value.strip() for key in ("License-Expression", "License") for value in data.get_all(key, [])]
    for value in stated:
        if 0 < len(value) <= _MAX_LICENCE and value.upper() != "UNKNOWN":
            return value
    classifiers = [value for value in data.get_all("Classifier", []) if value.startswith("License ::")]
    if classifiers:
        return " / ".join(str(value).rsplit(" :: ", 1)[-1] for value in classifiers)
    return next((value.splitlines()[0] for value in stated if value), "not stated")


def _folder_sources(root: Path, suffixes: tuple[str, ...]) -> Iterator[Source]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for file in sorted(files):
            if file.endswith(suffixes):
                path = os.path.join(folder, file)
                name = os.path.relpath(path, root)
                yield Source(path, name, _package(name))


def _package(relative: str) -> str:
    """The first component: `json/decoder.py` belongs to json, `this.py` to this."""
    first = relative.split(os.sep, 1)[0]
    return first.rsplit(".", 1)[0] if first == relative else first


def _jsonl_sources(path: Path) -> Iterable[Source]:
    """Lines are objects with "text" and, optionally, "package"."""
    sources: list[Source] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    sources.append(_jsonl_source(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"cannot read {path}: {error}") from None
    return sources


def _jsonl_source(path: Path, number: int, line: str) -> Source:
    try:
        data = json.loads(line)
        text = data["text"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise OutriderError(f'{path}, line {number}: not an object with a "text" field') from None
    if not isinstance(text, str):
        raise OutriderError(f'{path}, line {number}: "text" is not a string')
    return Source(f"{path}:{number}", f"{path.name}:{number}", str(data.get("package") or f"{path.stem}-{number}"), text)
