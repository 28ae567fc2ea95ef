"""Incremental JSON: large answers are written while they are sent, without holding the interpreter lock for long."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

__all__ = ["Rows", "dumps", "json_parts", "next_block", "rows"]

_BATCH = 64  # rows written at a time
_BLOCK = 128 * 2**10  # characters sent at a time


class Rows:
    """A list whose items are created while they are written. It can be written once."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items


def rows(items: Iterable[Any], count: int) -> list[Any] | Rows:
    """Items as a list, or as Rows if there are many."""
    return list(items) if count <= _BATCH else Rows(items)


def dumps(value: Any) -> str:
    """The JSON of a small value, as one string."""
    return json.dumps(value, default=list)


def json_parts(value: Any) -> Iterator[str]:
    """The JSON of plain data and Rows, in parts that each take little time to write."""
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{json.dumps(key)}:"
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, Rows) or (isinstance(value, list) and not _nested(value)):
        yield "["
        items, first = iter(value), True
        while batch := list(islice(items, _BATCH)):
            yield f"{'' if first else ','}{dumps(batch)[1:-1]}"
            first = False
        yield "]"
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield "," if number else ""
            yield from json_parts(item)
        yield "]"
    else:
        yield dumps(value)


def _nested(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], dict | list)


def next_block(parts: Iterator[str]) -> bytes:
    """Join the next parts to a block of about 128 KiB. Returns an empty block after the last part."""
    taken, size = [], 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= _BLOCK:
            break
    return "".join(taken).encode()
