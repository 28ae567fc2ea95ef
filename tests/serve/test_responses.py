"""/v1/responses as OpenAI's client uses it: answers, events in the published order, stored conversations, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response as ResponseType
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from outrider.serve.responses_schema import ResponsesRequest
from outrider.serve.responses_tools import ToolBook
from tests.support.agents import CITY, SCHEMA, joined, order, think_first
from tests.support.server import Running

Starter = Callable[..., Running]
TOOL: Any = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": CITY, "strict": True}
OPENED = ["response.created", "response.in_progress"]
TEXT = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.done",
    "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
CALL = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", **({"input": "def main(", "max_output_tokens": 8, "temperature": 0} | body))


def events_of(server: Running, **body: Any) -> list[dict[str, Any]]:
    """A stream, each of whose events fits the client's types and is numbered."""
    events = server.events("/v1/responses", **({"input": "def main(", "max_output_tokens": 8, "temperature": 0} | body))
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    return events


def test_an_answer_is_the_chat_answer(server: Running, client: OpenAI) -> None:
    answer = client.responses.create(model="pyrite", input="def main(", max_output_tokens=12, temperature=0)
    chat = client.chat.completions.create(
        model="pyrite", messages=[{"role": "user", "content": "def main("}], max_tokens=12, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    TypeAdapter(ResponseType).validate_python(post(server).json())


def test_instructions_and_items_become_messages(client: OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "Use tabs."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in ("def ", "f(")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        {"role": "system", "content": "Be brief.\n\nUse tabs."},
        {"role": "user", "content": "def f("},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "go on"},
    ]
    answer = client.responses.create(
        model="pyrite", input=items, instructions="Be brief.", max_output_tokens=8, temperature=0, tools=[TOOL]
    )
    chat_tool: Any = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
    chat = client.chat.completions.create(model="pyrite", messages=messages, max_tokens=8, temperature=0, tools=[chat_tool])
    assert answer.output_text == (chat.choices[0].message.content or "")
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_instructions_and_what_developers_say_at_the_start_are_one_message(server: Running) -> None:
    """And later on it is the system's, where the template does not know developers."""
    items = [
        {"role": "developer", "content": "Use tabs."}, {"role": "user", "content": "def f("},
        {"role": "developer", "content": "Now spaces."}, {"role": "user", "content": "go on"},
    ]  # fmt: skip
    answer = post(server, instructions="Be brief.", input=items).json()
    joint = {"role": "system", "content": "Be brief.\n\nUse tabs."}
    messages = [joint, items[1], {"role": "system", "content": "Now spaces."}, items[3]]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=8, temperature=0).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    spelled = [{"role": "system", "content": "Be brief."}, *items]
    again = server.post("/v1/chat/completions", messages=spelled, max_tokens=8, temperature=0).json()
    assert again["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert again["choices"][0]["message"] == chat["choices"][0]["message"]


# streams


def test_events_of_text_come_in_the_published_order(server: Running) -> None:
    events = events_of(server)
    assert order(event["type"] for event in events) == [*OPENED, *TEXT, "response.incomplete"]
    whole = post(server).json()
    assert joined(events, "response.output_text.delta", "delta") == whole["output"][0]["content"][0]["text"]
    last = events[-1]["response"]
    for name in ("output", "usage", "status", "incomplete_details"):
        assert without_ids(last[name]) == without_ids(whole[name])
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}


def without_ids(value: Any) -> Any:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in value] if isinstance(value, list) else value


def test_events_of_a_call_come_in_the_published_order(server: Running) -> None:
    body = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 60}
    events = events_of(server, **body)
    assert order(event["type"] for event in events) == [*OPENED, *CALL, "response.completed"]
    (item,) = events[-1]["response"]["output"]
    assert item["arguments"] == joined(events, "response.function_call_arguments.delta", "delta")
    assert set(json.loads(item["arguments"])) == {"city"}
    assert (item["name"], item["status"]) == ("get_weather", "completed")
    (whole,) = post(server, **body).json()["output"]
    assert without_ids([whole]) == without_ids([item])


def test_events_of_reasoning_come_before_those_of_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = post(server).json()["output"][0]["content"][0]["text"]
    think_first(monkeypatch)
    events = events_of(server)
    assert order(event["type"] for event in events) == [*OPENED, *REASONING, *TEXT, "response.incomplete"]
    thought, said = events[-1]["response"]["output"]
    assert (thought["type"], thought["content"][0]["text"], thought["status"]) == ("reasoning", plain[:2], "completed")
    assert (said["type"], said["content"][0]["text"], said["status"]) == ("message", plain[2:], "incomplete")
    assert without_ids(post(server).json()["output"]) == without_ids([thought, said])


CUSTOM: Any = {"type": "custom", "name": "patch", "description": "Apply a patch."}
SPACE: Any = {"type": "namespace", "name": "mcp__home__", "description": "A house.", "tools": [TOOL, CUSTOM | {"name": "say"}]}


def test_a_custom_tool_is_called_with_text(server: Running) -> None:
    """Its input is the text inside the call's arguments, and comes whole."""
    limits: Any = {"temperature": 0, "max_output_tokens": 200, "bad_words": ["\\"], "parallel_tool_calls": False}
    body = {"tools": [TOOL, CUSTOM], "tool_choice": {"type": "custom", "name": "patch"}} | limits
    events = events_of(server, **body)
    kinds = [kind.replace("function_call_arguments", "custom_tool_call_input") for kind in CALL]
    assert order(event["type"] for event in events) in (
        [*OPENED, *kinds, f"response.{end}"] for end in ("completed", "incomplete")
    )
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert item["input"] == joined(events, "response.custom_tool_call_input.delta", "delta")
    assert events[2]["item"] == item | {"input": "", "status": "in_progress"}
    (whole,) = post(server, **body).json()["output"]
    assert without_ids([whole]) == without_ids([item])


def test_a_tool_of_a_namespace_is_called_by_both_names(server: Running) -> None:
    body = {"tools": [SPACE], "tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False}
    events = events_of(server, **body, max_output_tokens=60)
    assert order(event["type"] for event in events) == [*OPENED, *CALL, "response.completed"]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__home__", "get_weather")
    assert events[-1]["response"]["tools"][0]["tools"][0]["name"] == "get_weather"


def test_calls_of_all_tools_go_back_under_the_offered_names(server: Running) -> None:
    items: list[Any] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "namespace": "mcp__home__", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": 'a "b"\n'},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ]
    book = ToolBook(ResponsesRequest.model_validate({"input": items, "tools": [SPACE, CUSTOM]}).tools)
    assert [tool["function"]["name"] for tool in book.functions] == ["mcp__home__get_weather", "mcp__home__say", "patch"]
    assert book.functions[0]["function"]["description"] == "A house.\n\nWeather."
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("1", "mcp__home__get_weather", "{}"), ("2", "patch", '{"input": "a \\"b\\"\\n"}'))
    ]
    messages: list[Any] = [items[0]]
    for call, result in zip(calls, ("sunny", "done"), strict=True):
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": result}]
    answer = post(server, input=items, tools=[SPACE, CUSTOM]).json()
    chat = server.post("/v1/chat/completions", messages=messages, tools=book.functions, max_tokens=8, temperature=0).json()
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_tools_of_a_service_are_left_out_beside_others(server: Running) -> None:
    """As agents send them: they always list what OpenAI's service would run."""
    services = [
        {"type": "web_search", "external_web_access": False},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    ]
    mixed, alone = (post(server, tools=tools, store=False).json() for tools in ([*services, TOOL], [TOOL]))
    assert without_ids(mixed["output"]) == without_ids(alone["output"])
    assert mixed["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert [tool["name"] for tool in mixed["tools"]] == ["get_weather"], "the answer tells what the model was offered"


def test_a_long_echo_is_written_like_a_short_one(server: Running) -> None:
    """Large tools come back with the first and the last event, which are then not written on the event loop."""
    short, long = ({"tools": [TOOL | {"description": "x" * size}], "tool_choice": "none"} for size in (1, 40_000))
    whole = post(server, **long).json()
    assert whole["tools"][0]["description"] == long["tools"][0]["description"]
    assert server.http.get(f"/v1/responses/{whole['id']}").json() == whole
    kinds = [order(event["type"] for event in events_of(server, **body)) for body in (short, long)]
    assert kinds[0] == kinds[1]


def test_the_client_s_stream_helper_reads_it(client: OpenAI) -> None:
    with client.responses.stream(model="pyrite", input="x = ", temperature=0, tools=[TOOL], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert all(item.type == "function_call" and item.parsed_arguments for item in final.output)


# structured output


class Thing(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    kind: Literal["a", "b"]


def test_the_client_parses_structured_output(client: OpenAI) -> None:
    answer = client.responses.parse(model="pyrite", input="a thing", text_format=Thing, temperature=0)
    assert isinstance(answer.output_parsed, Thing)


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_gives_the_same_text_without_speculation(server: Running, seed: int) -> None:
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"text": form, "temperature": 1, "seed": seed, "max_output_tokens": 80}
    on, off = (post(server, **body, speculation=speculation).json() for speculation in (True, False))
    assert without_ids(on["output"]) == without_ids(off["output"])
    assert set(json.loads(on["output"][0]["content"][0]["text"])) == {"name", "size"}
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    short = post(server, **body, speculation={"max_tokens": 3}).json()
    assert without_ids(short["output"]) == without_ids(off["output"])


def test_a_forced_call_takes_precedence_over_a_format(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    choice: Any = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(model="pyrite", input="x", tools=[TOOL], tool_choice=choice, text=form, temperature=0)
    assert [item.type for item in answer.output] == ["function_call"]


# stored answers


def test_a_conversation_goes_on_from_a_stored_answer(server: Running, client: OpenAI) -> None:
    first = client.responses.create(
        model="pyrite", input="def main(", max_output_tokens=8, temperature=0, instructions="Be brief."
    )
    second = client.responses.create(
        model="pyrite", input="go on", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    third = client.responses.create(
        model="pyrite", input="and on", previous_response_id=second.id, max_output_tokens=8, temperature=0
    )
    spelled: list[Any] = [{"role": "user", "content": "def main("}, *(item.model_dump() for item in first.output)]
    spelled += [{"role": "user", "content": "go on"}, *(item.model_dump() for item in second.output)]
    spelled += [{"role": "user", "content": "and on"}]
    alone = client.responses.create(model="pyrite", input=spelled, max_output_tokens=8, temperature=0, store=False)
    assert third.output_text == alone.output_text
    assert third.usage is not None
    assert alone.usage is not None
    assert third.usage.input_tokens == alone.usage.input_tokens, "instructions are not carried over"
    assert third.previous_response_id == second.id


def test_a_call_is_answered_in_the_next_turn(client: OpenAI) -> None:
    first = client.responses.create(model="pyrite", input="Rome?", tools=[TOOL], tool_choice="required", temperature=0)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    body: dict[str, Any] = {"model": "pyrite", "max_output_tokens": 8, "temperature": 0, "tools": [TOOL], "tool_choice": "none"}
    stored = client.responses.create(input=results, previous_response_id=first.id, **body)
    history: Any = [{"role": "user", "content": "Rome?"}, *(item.model_dump() for item in first.output), *results]
    alone = client.responses.create(input=history, **body)
    assert stored.output_text == alone.output_text


def test_a_stored_answer_is_read_and_deleted(client: OpenAI) -> None:
    answer = client.responses.create(model="pyrite", input="x", max_output_tokens=4, metadata={"a": "b"})
    streamed = list(client.responses.create(model="pyrite", input="x", max_output_tokens=4, stream=True))[-1]
    assert streamed.type == "response.incomplete"
    for known in (answer, streamed.response):
        assert client.responses.retrieve(known.id) == known
        client.responses.delete(known.id)
        for use in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no answer with this id"):
                use(known.id)


def test_store_false_keeps_nothing(server: Running) -> None:
    store = server.app.state.responses
    before = (store.count, store.bytes)
    answer = post(server, store=False).json()
    assert answer["store"] is False
    assert (store.count, store.bytes) == before
    assert server.http.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_unknown_ids_get_404(server: Running) -> None:
    refused = post(server, previous_response_id="resp_unknown")
    assert refused.status_code == 404
    assert refused.json()["error"] | {"message": ""} == {
        "message": "", "type": "not_found_error", "param": "previous_response_id", "code": "response_not_found",
    }  # fmt: skip
    assert server.http.get("/v1/responses/resp_unknown").status_code == 404
    assert server.http.get("/v1/responses/%00%2e%2e").status_code == 404
    assert server.http.get(f"/v1/responses/{post(server).json()['id']}?stream=true").json()["error"]["param"] == "stream"
    assert server.is_idle()


def test_nobody_sees_the_answers_of_others(server_with: Starter, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\nalice:two\nbob:three\n")
    server = server_with(api_key_file=file)
    body = {"input": "x", "max_output_tokens": 2}
    alice, again, bob = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "three"))
    plain = server.http.post("/v1/responses", json=body, headers=alice).json()["id"]
    salted = server.http.post("/v1/responses", json=body | {"cache_salt": "s"}, headers=alice).json()["id"]

    def seen(name: str, headers: dict[str, str], salt: str) -> set[int]:
        """The status of reading an answer and of continuing it."""
        read = server.http.get(f"/v1/responses/{name}", headers=headers, params={"cache_salt": salt} if salt else {})
        more = body | {"previous_response_id": name} | ({"cache_salt": salt} if salt else {})
        return {read.status_code, server.http.post("/v1/responses", json=more, headers=headers).status_code}

    assert seen(plain, alice, "") == seen(plain, again, "") == seen(salted, alice, "s") == {200}
    for name, headers, salt in (
        (plain, bob, ""),
        (plain, alice, "s"),
        (salted, alice, ""),
        (salted, alice, "t"),
        (salted, bob, "s"),
    ):
        assert seen(name, headers, salt) == {404}
    assert server.http.delete(f"/v1/responses/{plain}", headers=bob).status_code == 404
    assert server.http.delete(f"/v1/responses/{plain}", headers=alice).json()["deleted"] is True


def test_ids_cannot_be_chosen(server: Running) -> None:
    sent = server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}, headers={"X-Request-Id": "mine"})
    assert sent.headers["x-request-id"] == "mine"
    assert "mine" not in sent.json()["id"]
    assert len(sent.json()["id"]) > 40


# refusals


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"background": True}, None),
        ({"conversation": "conv_1"}, None),
        ({"prompt": {"id": "p"}}, None),
        ({"context_management": [{"type": "compaction"}]}, None),
        ({"max_tokens": 3}, None),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": [1]}]}, "tools[0].parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL, {"type": "fucntion", "name": "f"}]}, "tools[1]"),
        ({"tools": [SPACE | {"tools": [{"type": "web_search"}]}]}, "tools[0].tools[0]"),
        ({"tools": [SPACE, SPACE | {"name": "x"}], "tool_choice": {"type": "function", "name": "get_weather"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rm"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ({"tools": [TOOL | {"parameters": {"properties": {"a": {"type": "nonsense"}}}}], "tool_choice": "required"}, None),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, None),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": "word " * 20_000}, "input"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server: Running, changes: dict[str, Any], param: str | None) -> None:
    refused = post(server, **changes)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
    else:
        assert any(name in error["message"] for name in changes) or error["param"], error
    assert server.is_idle()


def test_a_history_that_is_too_long_is_refused(server: Running) -> None:
    first = post(server, input=[{"role": "user", "content": "x"}] * 1500, max_output_tokens=1)
    assert first.status_code == 400, "the template has rendered it, and the context is too short"
    long = [{"role": "user", "content": ""}] * 2049
    assert post(server, input=long).json()["error"]["param"] == "input"


def test_embeddings_are_refused_with_what_is_served(client: OpenAI) -> None:
    reason = "no model that makes embeddings.*POST /v1/responses"
    with pytest.raises(openai.NotFoundError, match=reason) as caught:
        client.embeddings.create(model="pyrite", input="x")
    assert caught.value.code == "unsupported_route"


def test_harmless_fields_are_accepted(server: Running) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled",
        "prompt_cache_key": "k", "service_tier": "auto", "safety_identifier": "s", "background": False, "user": "u",
        "stream_options": {"include_obfuscation": False}, "parallel_tool_calls": True, "text": {"verbosity": "medium"},
    }  # fmt: skip
    assert post(server, **fields).status_code == 200
    large = [{"role": "user", "content": "x"}, {"type": "reasoning", "id": "r", "summary": [{"text": "y" * 100_000}]}]
    assert post(server, input=large).status_code == 200, "large bodies are checked in another process"


def test_metrics_name_the_routes(server: Running) -> None:
    name = post(server).json()["id"]
    server.http.get(f"/v1/responses/{name}")
    text = server.http.get("/metrics").text
    for route in ("/v1/responses", "/v1/responses/{name}"):
        assert f'route="{route}",status="200"' in text
