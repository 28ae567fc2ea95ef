"""The texts of the files and folders that a user names as a corpus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from outrider import checks
from outrider.errors import InvalidParameter

__all__ = ["CorpusFile", "CorpusTexts", "corpus_files", "corpus_paths"]

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of a corpus. One that lies in a folder is left out where it is no text; one that was named is refused."""

    path: Path
    was_named: bool


class CorpusTexts:
    """The texts of files, read one file at a time. `digest` and the counts are those of the texts read so far."""

    def __init__(self, files: Sequence[CorpusFile]) -> None:
        self._files = files
        self._hash = blake2b(digest_size=32)
        self.read = self.skipped = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            try:
                texts = list(_texts(file.path))
            except InvalidParameter:
                if file.was_named:
                    raise
                self.skipped += 1
                continue
            self.read += 1
            for text in texts:
                encoded = text.encode("utf-8", "surrogatepass")
                self._hash.update(len(encoded).to_bytes(8, "little"))
                self._hash.update(encoded)
                self.bytes += len(encoded)
                if text:
                    yield text

    @property
    def digest(self) -> bytes:
        return self._hash.digest()


def corpus_paths(corpus: object) -> tuple[Path, ...]:
    """The paths that a setting names: one, or several, each perhaps a list with commas. They need not exist."""
    items = [corpus] if isinstance(corpus, str | os.PathLike) else corpus
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        raise InvalidParameter("corpus", f"must be a path or several, got {checks.shown(corpus)}")
    paths: list[Path] = []
    for item in items:
        if not isinstance(item, str | os.PathLike):
            raise InvalidParameter("corpus", f"paths are strings, got {checks.shown(item)}")
        text = checks.text("corpus", os.fspath(item))
        paths += [Path(part).expanduser() for part in ([text] if _exists(Path(text)) else text.split(",")) if part.strip()]
    return tuple(paths)


def corpus_files(paths: Iterable[Path]) -> list[CorpusFile]:
    """Every file once, in a fixed order. Of folders: all files, without hidden ones."""
    files: dict[Path, CorpusFile] = {}
    for path in paths:
        if path.is_dir():
            for below in _files_below(path):
                files.setdefault(below.resolve(), CorpusFile(below, False))
        elif path.is_file():
            files[path.resolve()] = CorpusFile(path, True)
        else:
            what = "is neither a file nor a folder" if _exists(path) else "does not exist"
            raise InvalidParameter("corpus", f"{path} {what}; pass text files, folders of them, or .jsonl files")
    return list(files.values())


def _files_below(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        yield from (path for name in sorted(files) if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for one
        return False


def _texts(path: Path) -> Iterator[str]:
    """The text of a file, or those of the lines of a .jsonl file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = f"convert it (iconv -f latin1 -t utf-8 {path.name}) or leave it out"
        raise InvalidParameter("corpus", f"{path} is not UTF-8 (byte {error.start}); {fix}") from None
    except OSError as error:
        raise InvalidParameter("corpus", f"{path} cannot be read: {error.strerror}; mend it or leave it out") from None
    if "\0" in text:
        raise InvalidParameter("corpus", f"{path} is no text: it holds bytes of zero; leave it out")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _line_text(line, f"{path}, line {number}")


def _line_text(line: str, place: str) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("corpus", f"{place}: not JSON ({error}); mend it or leave the file out") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise InvalidParameter("corpus", f'{place}: must be an object with a string "text"; mend it or leave the file out')
    text: str = fields["text"]
    return text
