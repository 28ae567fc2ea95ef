"""What tests of the agents' APIs share: a tool, a schema, and streams reduced to the order of their events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest

from outrider.serve.answers import ChatAnswer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


def order(kinds: Iterable[str]) -> list[str]:
    """The kinds of events, where a run of equal ones counts once."""
    return [kind for kind, _ in groupby(kinds)]


def think_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first letters of each chat answer reasoning, as the answer of a reasoning model has it."""
    plain = ChatAnswer.chunk_choices
    seen: set[int] = set()

    def choices(self: ChatAnswer, index: int, chunk: Any) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for choice in plain(self, index, chunk):
            text = choice["delta"].get("content")
            if text and id(self) not in seen:
                seen.add(id(self))
                out.append(choice | {"delta": {"reasoning_content": text[:2]}})
                choice = choice | {"delta": {"content": text[2:]}}
            out.append(choice)
        return out

    monkeypatch.setattr(ChatAnswer, "chunk_choices", choices)


def joined(events: Sequence[Any], kind: str, field: str) -> str:
    """A field of all events of a kind, joined."""
    return "".join(event[field] for event in events if event["type"] == kind)
