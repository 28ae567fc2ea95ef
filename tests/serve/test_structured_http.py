"""Structured output and tools over HTTP: answers parse, and their tokens equal those of plain decoding."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from outrider.sampling import grammar as grammar_module
from outrider.sampling import guide as guide_module
from outrider.sampling.sandbox import Sandbox
from tests.support.server import Running, until

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
    return OpenAI(base_url=f"{server.url}/v1", api_key=("none",), max_retries=0)


def test_a_json_schema_through_the_client(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="pyrite", messages=MESSAGES, response_format=form, max_tokens=80, temperature=1, seed=3
    )
    parsed = json.loads(answer.choices[0].message.content or "")
    assert set(parsed) == {"name", "size"}
    assert 0 <= parsed["size"] <= 99


@pytest.mark.parametrize(
    "grammar_fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_object"}, "max_tokens": 200},
    ],
)
def test_every_json_field_constrains_and_speculation_keeps_the_tokens(server: Running, grammar_fields: dict[str, Any]) -> None:
    body = {"prompt": "{", "max_tokens": 80, "temperature": 1, "seed": 5, "return_token_ids": True} | grammar_fields
    on = server.post("/v1/completions", **body).json()["choices"][0]
    off = server.post("/v1/completions", **body, speculation=False).json()["choices"][0]
    assert on["token_ids"] == off["token_ids"]
    if on["finish_reason"] == "stop":
        assert isinstance(json.loads(on["text"]), dict)


def test_a_regex_a_choice_and_a_grammar(server: Running) -> None:
    def text(**grammar_fields: Any) -> str:
        answer = server.post("/v1/completions", prompt="version ", max_tokens=40, temperature=1, seed=1, **grammar_fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]  # type: ignore[no-any-return]

    assert re.fullmatch(r"\d{1,2}\.\d{1,2}", text(guided_regex=r"\d{1,2}\.\d{1,2}"))
    assert text(guided_choice=["red", "green"]) in ("red", "green")
    assert text(structured_outputs={"choice": ["one", "two"]}) in ("one", "two")
    assert text(guided_grammar='root ::= "a" "b"') == "ab"


@pytest.mark.parametrize(
    "grammar_fields",
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
def test_invalid_grammars_get_400(server: Running, grammar_fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", prompt="x", max_tokens=4, **grammar_fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]
    assert server.http.get("/health").status_code == 200


def test_a_required_tool_is_called(client: OpenAI) -> None:
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
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["get_weather"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_optional_tools_may_stay_uncalled(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    plain = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    none = server.post("/v1/chat/completions", **body, tools=[TOOL], tool_choice="none").json()["choices"][0]["message"][
        "content"
    ]
    assert none == plain
    auto = server.post("/v1/chat/completions", **body, tools=[TOOL]).json()["choices"][0]
    assert auto["message"]["content"] is not None or auto["message"]["tool_calls"]
    called = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    past = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    assert server.post("/v1/chat/completions", messages=past, tools=[TOOL], max_tokens=4).status_code == 200


def test_malformed_tools_get_400(server: Running) -> None:
    for tools, choice in (
        ([{"type": "function", "function": {"name": "a b"}}], None),
        ([TOOL, TOOL], None),
        ([TOOL], {"type": "function", "function": {"name": "other"}}),
    ):
        answer = server.post("/v1/chat/completions", messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=2)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("tools", "tool_choice")


def test_a_response_format_beside_required_tools_is_refused(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = server.post(
            "/v1/chat/completions", messages=MESSAGES, tools=[TOOL], tool_choice=choice, response_format=form, max_tokens=4
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "response_format"
        assert "tool_choice" in answer.json()["error"]["message"]
    text = {"type": "text"}
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 4}
    assert server.post("/v1/chat/completions", **body, response_format=text).status_code == 200
    answer = server.post("/v1/chat/completions", messages=MESSAGES, tools=[TOOL], guided_regex="a+", max_tokens=4)
    assert answer.status_code == 400, answer.text


def test_a_response_format_beside_uncalled_tools_is_followed(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    for seed in range(4):
        body = {"messages": MESSAGES, "tools": [TOOL], "response_format": form, "max_tokens": 120, "seed": seed}
        message = server.post("/v1/chat/completions", **body, parallel_tool_calls=False).json()["choices"][0]["message"]
        if message.get("tool_calls"):
            assert set(json.loads(message["tool_calls"][0]["function"]["arguments"])) == {"city"}
        else:
            assert set(json.loads(message["content"])) == {"name", "size"}
    none = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none", "response_format": form, "max_tokens": 120}
    assert set(json.loads(server.post("/v1/chat/completions", **none).json()["choices"][0]["message"]["content"])) == {
        "name",
        "size",
    }


def test_json_white_space_follows_the_request_s_pattern(server: Running) -> None:
    body = {"prompt": "{", "max_tokens": 60, "temperature": 1, "seed": 5, "logit_bias": {"204": 100}, "guided_json": SCHEMA}
    tight = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    assert "\n" not in tight
    assert set(json.loads(tight)) == {"name", "size"}
    lines = server.post("/v1/completions", **body, guided_whitespace_pattern=r"\x0A").json()["choices"][0]["text"]
    assert lines.startswith("{\n")
    nested = body | {"guided_json": None, "structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\x0A"}}
    assert server.post("/v1/completions", **nested).json()["choices"][0]["text"] == lines
    bad = server.post("/v1/completions", **body, guided_whitespace_pattern="(")
    assert bad.status_code == 400, bad.text


@pytest.mark.parametrize(
    "extra",
    [{"functions": []}, {"tools": []}, {"functions": [], "function_call": "none"}, {"tools": [], "tool_choice": "none"}],
    ids=str,
)
def test_empty_lists_of_functions_are_ignored(server: Running, extra: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, **extra)
    assert answer.status_code == 200, answer.text
    some = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, functions=[TOOL["function"]])
    assert some.status_code == 400


def test_a_call_cut_by_length_leaves_no_marker_in_the_content(server: Running) -> None:
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    for tokens in range(1, 16):
        whole = server.post("/v1/chat/completions", **body, max_tokens=tokens).json()["choices"][0]
        assert not whole["message"]["content"], whole
        chunks = [event["choices"][0] for event in server.events("/v1/chat/completions", **body, max_tokens=tokens)[:-1]]
        assert not "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        if whole["finish_reason"] != "length":
            break


def test_hanging_grammar_compilers_block_no_plain_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain request is answered while more schemas than workers are being compiled."""
    go_on, real = threading.Event(), Sandbox.ask

    def slow(sandbox: Sandbox, question: Any, budget: float) -> Any:
        go_on.wait(60)
        return real(sandbox, question, budget)

    monkeypatch.setattr(Sandbox, "ask", slow)
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 4)
    with ThreadPoolExecutor(6) as pool:
        hard = [
            pool.submit(
                server.post, "/v1/completions", prompt="1", max_tokens=2, guided_json={"type": "integer", "multipleOf": 7 + i}
            )
            for i in range(4)
        ]
        until(lambda: len(server.service.thread.engine.grammars._compiling) == 4)  # type: ignore[union-attr]
        try:
            assert server.post("/v1/completions", prompt="x = ", max_tokens=2).status_code == 200
            more = server.post("/v1/completions", prompt="x = ", max_tokens=2, guided_regex="never compiled before")
            assert more.status_code == 429, more.text
            assert more.headers["retry-after"]
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in hard} == {200}


def test_a_slow_grammar_fails_only_its_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_module, "REQUEST_S", 0.3)
    grammar = 'start: a\na: a a | "x" | "x" a "x" | b\nb: b b | "x" | a b | b a'
    body = {"prompt": "x", "max_tokens": 400, "min_tokens": 300, "guided_grammar": grammar}
    with ThreadPoolExecutor(2) as pool:
        heavy = pool.submit(server.post, "/v1/completions", **body)
        plain = [server.post("/v1/completions", prompt="x = ", max_tokens=4, temperature=0).json() for _ in range(3)]
        answer = heavy.result()
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "grammar_too_slow"
    assert answer.json()["error"]["param"] == "response_format"
    assert len({completion["choices"][0]["text"] for completion in plain}) == 1
    (*_, last) = server.events("/v1/completions", **body)[:-1]
    assert last["error"]["code"] == "grammar_too_slow"
    until(server.is_idle)
