"""Training text as users have it: JSONL files, plain-text files, and folders of both.

A line of a JSONL file is an object with "text", with "prompt" and "completion", or with "messages". An optional "package"
names what the line belongs to: documents of one package are held out together.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidParameter, OutriderError

__all__ = ["Document", "find_files", "read_documents"]

_FIELDS = '"text", "prompt" and "completion", or "messages"'
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one conversation that the target's chat template turns into text."""

    package: str  # documents of one package are held out together
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


def read_documents(files: Sequence[tuple[Path, str]], skip_unreadable: bool = False) -> tuple[list[Document], dict[str, int]]:
    """The documents of files as `find_files` lists them, and how many were left out for which reason."""
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for path, package in files:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
            if not skip_unreadable:
                raise OutriderError(f"{path} {reason}; mend it, leave it out or pass --skip-unreadable") from None
            dropped["unreadable"] += 1
            continue
        for document in _jsonl_documents(path, text) if path.suffix == ".jsonl" else (Document(package, text),):
            key = document.text or json.dumps(document.messages, sort_keys=True)
            if not key.strip() or key in seen:
                dropped["duplicate" if key.strip() else "empty"] += 1
                continue
            seen.add(key)
            documents.append(document)
    return documents, dict(dropped)


def find_files(paths: Sequence[Path], suffixes: Sequence[str]) -> list[tuple[Path, str]]:
    """Every file with its package, in a fixed order. Folders are searched for the suffixes and for .jsonl."""
    files: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_file():
            files.append((path, path.stem))
        elif path.is_dir():
            files.extend(_files_below(path, (*suffixes, ".jsonl")))
        else:
            raise InvalidParameter("corpus", f"{path} does not exist; pass folders, text files or .jsonl files")
    return files


def _files_below(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files of a folder. Their package is the first component below it: `json/decoder.py` belongs to json, `this.py` to this."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for file in sorted(files):
            if file.endswith(suffixes):
                path = Path(folder, file)
                first = path.relative_to(root).parts[0]
                yield path, Path(first).stem if first == file else first


def _jsonl_documents(path: Path, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _jsonl_document(line, f"{path}, line {number}", f"{path.stem}-{number}")


def _jsonl_document(line: str, place: str, package: str) -> Document:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OutriderError(f"{place}: not JSON ({error})") from None
    if not isinstance(fields, dict) or not fields.keys() & {"text", "prompt", "completion", "messages"}:
        raise OutriderError(f"{place}: not an object with {_FIELDS}")
    package = str(fields.get("package") or package)
    if "messages" in fields:
        return Document(package, messages=_messages(fields["messages"], place))
    names = ("text",) if "text" in fields else ("prompt", "completion")
    missing = [name for name in names if name not in fields]
    if missing:
        raise OutriderError(f"{place}: has no {missing[0]!r}")
    wrong = [name for name in names if not isinstance(fields[name], str)]
    if wrong:
        raise OutriderError(f"{place}: {wrong[0]!r} is not a string")
    return Document(package, "".join(fields[name] for name in names))


def _messages(messages: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise OutriderError(f'{place}: "messages" is not a list of objects with "role" and "content"')
    return tuple(messages)
