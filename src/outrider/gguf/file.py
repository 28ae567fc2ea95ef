"""The GGUF container: metadata and the places of tensors, from one file or the parts of a split one.

The file is mapped, never read as a whole. Every length, count, offset and type is checked before it is used, so a truncated
or hostile file ends in a ModelError that names the file and the place.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.gguf.kinds import KINDS, Kind

__all__ = ["Gguf", "GgufTensor", "Strings", "find_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_STRING, _LONGEST_NAME, _LONGEST_ARRAY = 2**24, 2**10, 2**24
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMS, _MOST_PARTS = 2**16, 2**20, 4, 1000
_LARGEST_ALIGNMENT = 2**20
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class GgufTensor(NamedTuple):
    """A stored tensor. The shape is in the order of torch: rows of values that lie together come last."""

    shape: tuple[int, ...]
    kind: Kind
    part: int  # of a split file
    offset: int  # from the start of the part
    nbytes: int


class Strings(NamedTuple):
    """A list of strings in the file, read when it is asked for."""

    view: memoryview
    start: int
    length: int

    def read(self) -> list[str]:
        return [str(self.view[at : at + size], "utf-8", "replace") for at, size in _strings(self.view, self.start, self.length)]


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, the only one in a folder without safetensors, or the first part of a split one."""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf" and not file.name.startswith("mmproj"))
    firsts = [file for file in files if (part := _PART.fullmatch(file.name)) is None or int(part[2]) == 1] or files[:1]
    if len(firsts) > 1:
        raise ModelError(f"{path} holds several GGUF models; pass one of them: {', '.join(file.name for file in firsts[:8])}")
    return firsts[0] if firsts else None


class Gguf:
    """An open model file, with all of its parts."""

    def __init__(self, path: Path) -> None:
        first = _Part(path)
        parts = [first, *map(_Part, _other_parts(first))] if first.split else [first]
        self.path = parts[0].path
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._parts = parts
        for number, part in enumerate(parts):
            if first.split and part.split != (number, len(parts)):
                raise ModelError(f"{part.path} does not say that it is part {number + 1} of {len(parts)}")
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{part.path} holds {name!r}, and so does {parts[self.tensors[name].part].path.name}")
                self.tensors[name] = tensor._replace(part=number)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._parts[self.tensors[name].part].path.name

    def read(self, name: str, start: int, count: int) -> bytearray:
        """`count` bytes of a tensor, from byte `start`."""
        tensor = self.tensors[name]
        assert 0 <= start <= start + count <= tensor.nbytes
        at = tensor.offset + start
        return bytearray(self._parts[tensor.part].view[at : at + count])

    def view(self, name: str) -> memoryview:
        """A tensor's bytes in the mapped file."""
        tensor = self.tensors[name]
        return self._parts[tensor.part].view[tensor.offset : tensor.offset + tensor.nbytes]

    def strings(self, key: str) -> list[str]:
        """The strings of a list; empty where the file has none."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, Strings):
            raise ModelError(f"{self.path}: {key} must be a list of strings, got {shown(value)}")
        return [] if value is None else value.read()

    def numbers(self, key: str) -> list[Any]:
        """The numbers of a list; empty where the file has none."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise ModelError(f"{self.path}: {key} must be a list of numbers, got {shown(value)}")
        return [] if value is None else value.tolist()

    def word(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} must be a string, got {shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} must be true or false, got {shown(value)}")
        return value

    def index(self, key: str, below: int) -> int | None:
        """A whole number below a limit; None where the file has none, or one that is beyond (many files say 2**32 - 1)."""
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(f"{self.path}: {key} must be a whole number, got {shown(value)}")
        return value if value is not None and 0 <= value < below else None


class _Part:
    """One file, mapped and parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = _mapped(path)
        cursor = _Cursor(self.view, str(path))
        _check_version(cursor)
        tensor_count = cursor.count("tensors", _MOST_TENSORS, 24)
        self.metadata = _metadata(cursor, cursor.count("metadata", _MOST_KEYS, 13))
        self.tensors = _tensors(cursor, tensor_count, self._alignment())
        self.split = self._split()

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_ALIGNMENT or value & (value - 1):
            raise ModelError(f"{self.path}: general.alignment must be a power of two, got {shown(value)}")
        return value

    def _split(self) -> tuple[int, int] | None:
        """The number of this part, from 0, and how many there are; None for a file that is whole."""
        number, count = (self.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if not all(isinstance(value, int) for value in (number, count)) or not 0 <= number < max(count, 1) <= _MOST_PARTS:
            raise ModelError(
                f"{self.path}: split.no and split.count must be a part and how many there are, got {number}, {count}"
            )
        return (number, count) if count > 1 else None


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # no permission, a device, an empty file
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _other_parts(first: _Part) -> list[Path]:
    """The files of the second and following parts, given any part. The given path must be the first of them."""
    name = _PART.fullmatch(first.path.name)
    assert first.split is not None
    number, count = first.split
    if name is None or int(name[2]) != number + 1 or int(name[3]) != count:
        raise ModelError(f"{first.path} says that it is part {number + 1} of {count}; name it ...-00001-of-{count:05d}.gguf")
    if number:
        raise ModelError(f"{first.path} is part {number + 1} of {count}; pass the first: {name[1]}-00001-of-{name[3]}.gguf")
    return [first.path.with_name(f"{name[1]}-{part:05d}-of-{name[3]}.gguf") for part in range(2, count + 1)]


class _Cursor:
    """A place in a file. Nothing is read beyond its end."""

    def __init__(self, view: memoryview, where: str) -> None:
        self.view, self.where, self.at = view, where, 0

    def skip(self, size: int, what: str) -> int:
        """Advance over bytes that must be there; where they begin."""
        at = self.at
        if size > len(self.view) - at:
            raise self.error(f"is truncated or corrupt: {what} at byte {at} needs {size} bytes, {len(self.view) - at} are left")
        self.at = at + size
        return at

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.view, self.skip(size, what))[0]

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A number of things, each of at least so many bytes."""
        count: int = self.scalar("Q", f"the number of {what}")
        if count > most or count * least_bytes > len(self.view) - self.at:
            raise self.error(f"is truncated or corrupt: it says that it has {count} {what}")
        return count

    def string(self, what: str, longest: int) -> str:
        size = self.scalar("Q", what)
        if size > longest:
            raise self.error(f"is corrupt: {what} says that it has {size} bytes")
        at = self.skip(size, what)
        return str(self.view[at : at + size], "utf-8", "replace")

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.where} {message}")


def _check_version(cursor: _Cursor) -> None:
    if bytes(cursor.view[:4]) != b"GGUF":
        raise cursor.error("is not a GGUF file: it does not begin with 'GGUF'")
    cursor.skip(4, "the magic")
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        why = "it is big-endian" if version and version & 0xFFFF == 0 else f"its version is {version}; known: 2 and 3"
        raise cursor.error(f"cannot be read: {why}; convert it again with a present llama.cpp")


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a key", _LONGEST_NAME)
        if key in found:
            raise cursor.error(f"is corrupt: it has the key {shown(key)} twice")
        found[key] = _value(cursor, cursor.scalar("I", shown(key)), key)
    return found


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string(shown(key), _LONGEST_STRING)
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error(f"is corrupt: {shown(key)} has a value of unknown type {kind}")
    return cursor.scalar(_SCALARS[kind], shown(key))


def _array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("I", shown(key))
    if kind == _STRING:
        count = cursor.count(f"strings in {shown(key)}", _LONGEST_ARRAY, 8)
        strings = Strings(cursor.view, cursor.at, count)
        for at, size in _strings(cursor.view, cursor.at, count, cursor):
            cursor.at = at + size
        return strings
    if kind not in _SCALARS:
        raise cursor.error(f"is corrupt: {shown(key)} is a list of values of unknown type {kind}")
    dtype = np.dtype("?" if kind == 7 else "<" + _SCALARS[kind])
    count = cursor.count(f"values in {shown(key)}", _LONGEST_ARRAY, dtype.itemsize)
    at = cursor.skip(count * dtype.itemsize, shown(key))
    return np.frombuffer(cursor.view, np.uint8 if kind == 7 else dtype, count, at)


def _strings(view: memoryview, at: int, count: int, cursor: _Cursor | None = None) -> Iterator[tuple[int, int]]:
    """Start and size of strings that lie one after another; with a cursor they are checked."""
    read, end = struct.Struct("<Q").unpack_from, len(view)
    for i in range(count):
        if at > end - 8 or (size := read(view, at)[0]) > end - at - 8:
            assert cursor is not None
            raise cursor.error(f"is truncated or corrupt: string {i} of {count} at byte {at} reaches beyond its end")
        yield at + 8, size
        at += 8 + size


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Every tensor by its name, with its place checked: aligned, inside the file, and overlapping no other."""
    listed: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = cursor.string("the name of a tensor", _LONGEST_NAME)
        if name in listed:
            raise cursor.error(f"is corrupt: it holds {shown(name)} twice")
        listed[name] = _tensor(cursor, shown(name))
    data = -(-cursor.at // alignment) * alignment
    end, previous = data, "the header"
    for name, tensor in sorted(listed.items(), key=lambda item: item[1].offset):
        start = data + tensor.offset
        if tensor.offset % alignment:
            raise cursor.error(f"is corrupt: {shown(name)} begins at {tensor.offset}, which is no multiple of {alignment}")
        if start < end:
            raise cursor.error(f"is corrupt: {shown(name)} overlaps {previous}")
        end, previous = start + tensor.nbytes, shown(name)
        if end > len(cursor.view):
            missing = end - len(cursor.view)
            raise cursor.error(f"is truncated or corrupt: {shown(name)} reaches {missing} bytes beyond its end")
        listed[name] = tensor._replace(offset=start)
    return listed


def _tensor(cursor: _Cursor, name: str) -> GgufTensor:
    dims = cursor.scalar("I", name)
    if not 1 <= dims <= _MOST_DIMS:
        raise cursor.error(f"is corrupt: {name} has {dims} dimensions")
    shape = [cursor.scalar("Q", name) for _ in range(dims)][::-1]
    number, offset = cursor.scalar("I", name), cursor.scalar("Q", name)
    kind = KINDS.get(number)
    if kind is None:
        raise cursor.error(f"cannot be read: {name} has the unknown type {number}")
    values = int(np.prod(np.array(shape, dtype=object)))
    if not 0 < values < 2**48 or max(shape) >= 2**40:
        raise cursor.error(f"is corrupt: {name} has the shape {shown(tuple(shape))}")
    if shape[-1] % kind.values:
        raise cursor.error(f"is corrupt: rows of {name} have {shape[-1]} values, no multiple of the {kind.values} of {kind.name}")
    return GgufTensor(tuple(shape), kind, 0, offset, values // kind.values * kind.nbytes)
