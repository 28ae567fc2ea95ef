"""API keys from flags, the environment and a file that can be reloaded. Only their digests are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidParameter

__all__ = ["Keys", "read_key_file"]

_NAMED = re.compile(r"([\w.@\-]{1,64}):(.+)")  # a line of a key file with a name: NAME:KEY


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    client: str


class Keys:
    """The valid keys, each with the name of its client."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        self._flags = [_key("--api-key", key) for key in keys]
        self._file = file
        self._keys: list[_Key] = []
        self.reload()

    @property
    def needed(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of the clients, without duplicates."""
        return list(dict.fromkeys(key.client for key in self._keys))

    def reload(self) -> None:
        """Read the file again. If it is invalid, raise and keep the present keys."""
        keys = [*self._flags, *(() if self._file is None else read_key_file(self._file))]
        names: dict[bytes, str] = {}
        for key in keys:
            if names.setdefault(key.digest, key.client) != key.client:
                raise InvalidParameter("--api-key-file", f"{names[key.digest]} and {key.client} have the same key")
        self._keys = keys

    def client_of(self, key: bytes) -> str | None:
        """The client of a key, or None. Every key is compared, so that the time does not depend on the key."""
        digest, client = _digest(key.strip()), None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                client = known.client
        return client


def read_key_file(path: Path) -> list[_Key]:
    """The keys of a file. A line is KEY or NAME:KEY, and lines that begin with # are comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("--api-key-file", f"{path} cannot be read: {error}") from None
    keys = list(_lines(path, text))
    if not keys:
        raise InvalidParameter("--api-key-file", f"{path} holds no key; write one a line, as KEY or NAME:KEY")
    return keys


def _lines(path: Path, text: str) -> Iterator[_Key]:
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        where = f"{path}, line {number}"
        yield _key(where, line) if named is None else _key(where, named[2], named[1])


def _key(where: str, key: str, client: str | None = None) -> _Key:
    """A checked key. White space around it, such as the newline at the end of a file, is removed."""
    key = key.strip()
    if not key:
        raise InvalidParameter(where, "must not be empty")
    if not key.isprintable():
        raise InvalidParameter(where, "the key holds a control character, which no header can carry")
    digest = _digest(key.encode())
    return _Key(digest, client or f"key-{digest.hex()[:8]}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
