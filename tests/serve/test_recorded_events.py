"""Streams of /v1/responses and /v1/messages beside recorded ones of OpenAI and Anthropic: order of events, and their fields.

`recorded_events.json` has the recordings without their values: for each kind of item or block the types of its events in
order, each with the paths of its fields. Repeated deltas count once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import CITY, SCHEMA, think_first
from tests.support.server import Running

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_events.json").read_text())
Shape = tuple[str, frozenset[str]]
RESPONSE = {"input": "x", "temperature": 0, "max_output_tokens": 90}
MESSAGE = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 90}
TOOL = {"name": "get_weather", "description": "Weather."}


def paths(value: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, inner in value.items():
        yield above + key
        if isinstance(inner, dict):
            yield from paths(inner, f"{above}{key}.")


def shapes(events: list[dict[str, Any]]) -> list[Shape]:
    """Types and fields. Neighbours of one type and with the same fields count once."""
    found = [(event["type"], frozenset(paths(event))) for event in events]
    return [shape for shape, _ in groupby(found)]


def assert_like(events: list[dict[str, Any]], recorded: list[list[str]]) -> None:
    """The events come in the recorded order, and none lacks a field that the recorded one has."""
    found = shapes(events)
    assert [kind for kind, _ in found] == [kind for kind, _ in recorded]
    for (kind, fields), (_, expected) in zip(found, recorded, strict=True):
        assert set(expected.split()) - fields == set(), kind


def split(events: list[dict[str, Any]], head: int, tail: int, first: str) -> list[list[dict[str, Any]]]:
    """Head, items or blocks, and tail of a stream."""
    starts = [place for place, event in enumerate(events) if event["type"] == first]
    assert starts[0] == head
    borders = [0, *starts, len(events) - tail, len(events)]
    return [events[start:end] for start, end in pairwise(borders)]


@pytest.mark.parametrize("kinds", [["message"], ["function_call"], ["reasoning", "message"]], ids=lambda kinds: " ".join(kinds))
def test_a_response_streams_as_recorded(server: Running, monkeypatch: pytest.MonkeyPatch, kinds: list[str]) -> None:
    recorded = RECORDED["responses"]
    body = {"text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}}
    if kinds == ["function_call"]:
        body = {"tools": [TOOL | {"type": "function", "parameters": CITY}], "tool_choice": "required"}
        body |= {"parallel_tool_calls": False}  # type: ignore[dict-item]
    if "reasoning" in kinds:
        think_first(monkeypatch)
    head, *items, tail = split(server.events("/v1/responses", **RESPONSE, **body), 2, 1, "response.output_item.added")
    assert_like(head, recorded["head"])
    assert_like(tail, recorded["tail"])
    assert [item[0]["item"]["type"] for item in items] == kinds
    for item, kind in zip(items, kinds, strict=True):
        if kind in recorded:  # OpenAI's models show no reasoning
            assert_like(item, recorded[kind])


@pytest.mark.parametrize("kinds", [["text"], ["tool_use"], ["thinking", "text"]], ids=lambda kinds: " ".join(kinds))
def test_a_message_streams_as_recorded(server: Running, monkeypatch: pytest.MonkeyPatch, kinds: list[str]) -> None:
    recorded = RECORDED["messages"]
    body: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    if kinds == ["tool_use"]:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body = {"tools": [TOOL | {"input_schema": CITY}], "tool_choice": choice}
    if "thinking" in kinds:
        think_first(monkeypatch)
    head, *blocks, tail = split(server.events("/v1/messages", **MESSAGE, **body), 1, 2, "content_block_start")
    assert_like(head, recorded["head"])
    assert_like(tail, recorded["tail"])
    assert [block[0]["content_block"]["type"] for block in blocks] == kinds
    for block, kind in zip(blocks, kinds, strict=True):
        assert_like(block, recorded[kind])
