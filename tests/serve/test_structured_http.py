"""Structured output and tools through HTTP: what comes back parses, and the tokens are those of plain decoding."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.conftest import Running

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_json_schema_through_the_client(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="pyrite", messages=MESSAGES, response_format=form, max_tokens=80, temperature=1, seed=3
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"name", "size"}
    assert 0 <= found["size"] <= 99


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_object"}, "max_tokens": 200},
    ],
)
def test_every_way_to_ask_for_json_and_the_same_tokens_without_speculation(server: Running, asked: dict[str, Any]) -> None:
    given = {"prompt": "{", "max_tokens": 80, "temperature": 1, "seed": 5, "return_token_ids": True} | asked
    on = server.post("/v1/completions", **given).json()["choices"][0]
    off = server.post("/v1/completions", **given, speculation=False).json()["choices"][0]
    assert on["token_ids"] == off["token_ids"]
    if on["finish_reason"] == "stop":
        assert isinstance(json.loads(on["text"]), dict)


def test_a_regex_a_choice_and_a_grammar(server: Running) -> None:
    def text(**asked: Any) -> str:
        answer = server.post("/v1/completions", prompt="version ", max_tokens=40, temperature=1, seed=1, **asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]  # type: ignore[no-any-return]

    assert re.fullmatch(r"\d{1,2}\.\d{1,2}", text(guided_regex=r"\d{1,2}\.\d{1,2}"))
    assert text(guided_choice=["red", "green"]) in ("red", "green")
    assert text(structured_outputs={"choice": ["one", "two"]}) in ("one", "two")
    assert text(guided_grammar='root ::= "a" "b"') == "ab"


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": "(unclosed"},
        {"guided_json": {"type": "nonsense"}},
        {"guided_json": "{not json"},
        {"guided_choice": []},
        {"guided_grammar": "root ::= undefined"},
        {"response_format": {"type": "json_schema"}},
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"guided_json": {"$ref": "http://127.0.0.1/schema.json"}},
    ],
    ids=str,
)
def test_what_is_no_grammar_gets_400(server: Running, asked: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=4, **asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]
    assert server.http.get("/health").status_code == 200


def test_a_tool_that_must_be_called(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pyrite",
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    stream = client.chat.completions.create(
        model="pyrite", messages=MESSAGES, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False, max_tokens=120, temperature=0, stream=True,
    )  # fmt: skip
    chunks = list(stream)
    deltas = [own for chunk in chunks for own in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(own.function.arguments or "" for own in deltas if own.function) == call.function.arguments
    assert [own.function.name for own in deltas if own.function and own.function.name] == ["get_weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_that_may_be_left_alone(server: Running) -> None:
    given = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    plain = server.post("/v1/chat/completions", **given).json()["choices"][0]["message"]["content"]
    none = server.post("/v1/chat/completions", **given, tools=[TOOL], tool_choice="none").json()["choices"][0]["message"][
        "content"
    ]
    assert none == plain
    auto = server.post("/v1/chat/completions", **given, tools=[TOOL]).json()["choices"][0]
    assert auto["message"]["content"] is not None or auto["message"]["tool_calls"]
    called = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    past = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    assert server.post("/v1/chat/completions", messages=past, tools=[TOOL], max_tokens=4).status_code == 200


def test_tools_that_are_not_sound_get_400(server: Running) -> None:
    for tools, choice in (
        ([{"type": "function", "function": {"name": "a b"}}], None),
        ([TOOL, TOOL], None),
        ([TOOL], {"type": "function", "function": {"name": "other"}}),
    ):
        answer = server.post("/v1/chat/completions", messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=2)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("tools", "tool_choice")
