"""/v1/messages as Anthropic's client uses it: answers, events in the published order, token counts, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from anthropic.types import Message, RawMessageStreamEvent
from openai import OpenAI
from pydantic import BaseModel, TypeAdapter

from outrider import LLM
from outrider.serve.messages_chat import as_chat
from outrider.serve.messages_schema import MessagesRequest
from tests.support.agents import CITY, SCHEMA, order, think_first
from tests.support.server import Running

Starter = Callable[..., Running]
USER = {"role": "user", "content": "def main("}
TOOL: Any = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}
NONSENSE = {"properties": {"a": {"type": "nonsense"}}}
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
CLOSED = ["message_delta", "message_stop"]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, **body: Any) -> httpx.Response:
    return server.post("/v1/messages", **({"messages": [USER], "max_tokens": 8, "temperature": 0} | body))


def events_of(server: Running, **body: Any) -> list[dict[str, Any]]:
    """A stream, each of whose events fits the client's types."""
    events = server.events("/v1/messages", **({"messages": [USER], "max_tokens": 8, "temperature": 0} | body))
    for event in events:
        EVENT.validate_python(event)
    return events


def deltas(events: list[dict[str, Any]], name: str) -> str:
    return "".join(event["delta"].get(name, "") for event in events if event["type"] == "content_block_delta")


def rendered(server: Running, **body: Any) -> str:
    """The prompt of a chat request, as far as its answer at temperature 0 shows it: the number of tokens and the answer."""
    chat = server.post("/v1/chat/completions", **({"max_tokens": 8, "temperature": 0} | body)).json()
    return f"{chat['usage']['prompt_tokens']} {chat['choices'][0]['message']['content']}"


def test_a_budget_for_thinking_limits_only_models_that_reason(server: Running) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert post(server, thinking=thinking).status_code == 200
    body = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 8, "thinking": thinking})
    assert as_chat(body, reasons=True).thinking_token_budget == 1024
    assert as_chat(body, reasons=False).thinking_token_budget is None


def answered(answer: dict[str, Any]) -> str:
    usage = answer["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return f"{prompt} {''.join(block.get('text', '') for block in answer['content'])}"


def test_an_answer_is_the_chat_answer(server: Running, client: Anthropic) -> None:
    answer = client.messages.create(model="pyrite", max_tokens=12, messages=[USER], extra_body={"temperature": 0})  # type: ignore[list-item]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
        chat = other.chat.completions.create(model="pyrite", messages=[USER], max_tokens=12, temperature=0)  # type: ignore[list-item]
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)
    TypeAdapter(Message).validate_python(post(server).json())


def test_blocks_become_messages(server: Running) -> None:
    """System text, results before text, errors, thinking and calls are rendered as the same chat messages."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "def"}, {"type": "text", "text": "f("}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"city": "Oslo"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    calls = [
        {"id": f"toolu_{number}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
        for number, city in ((1, "Rome"), (2, "Oslo"))
    ]
    messages = [
        {"role": "system", "content": "Be brief.\nUse tabs."},
        {"role": "user", "content": "def\nf("},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such city"},
        {"role": "user", "content": "go on"},
    ]
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Use tabs."},
    ]
    answer = post(server, messages=turns, system=system, tools=[TOOL]).json()
    function = {"name": "get_weather", "description": "Weather.", "parameters": CITY}
    assert answered(answer) == rendered(server, messages=messages, tools=[{"type": "function", "function": function}])


def test_a_system_message_may_stand_anywhere(server: Running) -> None:
    turns = [USER, {"role": "assistant", "content": "pass"}, {"role": "system", "content": "Be brief."}, USER]
    assert answered(post(server, messages=turns).json()) == rendered(server, messages=turns)


def test_what_claude_code_counts_its_requests_with_is_not_part_of_the_prompt(server: Running) -> None:
    """It differs with every request, so nothing after it would be found in the prefix cache."""
    text = {"type": "text", "text": "import os\n" * 40, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    counted = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.1; cch={i};"} for i in range(2)]
    first, second, alone = (post(server, system=[*head, text]).json() for head in (counted[:1], counted[1:], []))
    assert answered(first) == answered(second) == answered(alone)
    assert second["usage"]["cache_read_input_tokens"] > 0
    assert answered(post(server, system=counted).json()) == answered(post(server).json())


def test_a_limit_beyond_the_context_is_its_end(server: Running, llm: LLM) -> None:
    """As in Anthropic's API: clients ask for more tokens than a small context holds."""
    long = {"messages": [{"role": "user", "content": "x " * (llm.max_model_len - 40)}], "ignore_eos": True}
    full = post(server, **long, max_tokens=32_000).json()
    assert full["stop_reason"] == "model_context_window_exceeded"
    usage = full["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == llm.max_model_len
    assert events_of(server, **long, max_tokens=32_000)[-2]["delta"]["stop_reason"] == full["stop_reason"]
    exact = post(server, **long, max_tokens=usage["output_tokens"]).json()
    assert (exact["stop_reason"], exact["content"]) == ("max_tokens", full["content"])


def test_an_answer_that_was_begun_is_continued(server: Running) -> None:
    begun = [USER, {"role": "assistant", "content": "import"}]
    assert answered(post(server, messages=begun).json()) == rendered(server, messages=begun, continue_final_message=True)


# streams


def test_events_of_text_come_in_the_published_order(server: Running) -> None:
    events = events_of(server)
    assert order(event["type"] for event in events) == ["message_start", *BLOCK, *CLOSED]
    whole = post(server).json()
    assert deltas(events, "text") == whole["content"][0]["text"]
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[0]["message"]["content"] == []


def test_events_of_calls_come_in_the_published_order(server: Running) -> None:
    body = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 60}
    events = events_of(server, **body)
    assert order(event["type"] for event in events) == ["message_start", *BLOCK, *CLOSED]
    assert events[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "get_weather", "input": {}}
    whole = post(server, **body).json()
    assert json.loads(deltas(events, "partial_json")) == whole["content"][0]["input"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


def test_events_of_thinking_come_before_those_of_text(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = post(server).json()["content"][0]["text"]
    think_first(monkeypatch)
    events = events_of(server)
    assert order(event["type"] for event in events) == ["message_start", *BLOCK, *BLOCK, *CLOSED]
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert order(kinds) == ["thinking_delta", "signature_delta", "text_delta"]
    assert (deltas(events, "thinking"), deltas(events, "text")) == (plain[:2], plain[2:])
    thought, said = post(server).json()["content"]
    assert (thought["type"], thought["thinking"], said["text"]) == ("thinking", plain[:2], plain[2:])


def test_the_client_s_stream_helper_reads_it(client: Anthropic) -> None:
    with client.messages.stream(
        model="pyrite", max_tokens=60, messages=[USER], tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}  # type: ignore[list-item]
    ) as stream:  # fmt: skip
        assert order(event.type for event in stream)[-1] == "message_stop"
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use"
    assert set(block.input) == {"city"}
    assert final.usage.output_tokens > 0


class Choice(BaseModel):
    kind: Literal["a", "b"]
    on: bool


def test_the_client_parses_structured_output(client: Anthropic) -> None:
    body: dict[str, Any] = {"model": "pyrite", "max_tokens": 60, "messages": [USER], "output_format": Choice}
    assert isinstance(client.messages.parse(**body).parsed_output, Choice)
    with client.messages.stream(**body) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Choice)


def test_the_client_s_tool_runner_runs_a_tool_and_goes_on(client: Anthropic) -> None:
    switched: list[bool] = []

    @beta_tool
    def switch(on: bool) -> str:
        """Switch the light on or off."""
        switched.append(on)
        return "done"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    asked: Any = [USER]
    runner = client.beta.messages.tool_runner(
        model="pyrite", max_tokens=60, messages=asked, tools=[switch], tool_choice=choice, max_iterations=2
    )
    first, second = runner
    assert first.stop_reason == second.stop_reason == "tool_use"
    assert len(switched) >= 1
    sizes = [turn.usage.input_tokens + (turn.usage.cache_read_input_tokens or 0) for turn in (first, second)]
    assert sizes[1] > sizes[0], "the conversation is sent whole"


def test_threads_are_refused_as_clients_expect_it(server: Running) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        refused = post(server, thread=thread)
        assert refused.status_code == 400
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_the_asynchronous_client_reads_a_stream(server: Running) -> None:
    async def read() -> list[str]:
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = await client.messages.create(model="pyrite", max_tokens=3, messages=[USER], stream=True)  # type: ignore[list-item]
            return [event.type async for event in stream]

    assert order(asyncio.run(read())) == ["message_start", *BLOCK, *CLOSED]


def test_stop_sequences_are_named(server: Running) -> None:
    free = post(server, max_tokens=24).json()["content"][0]["text"]
    stop = free[8:11]
    cut = post(server, max_tokens=24, stop_sequences=["never to be seen", stop]).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == free[: free.index(stop)] if free.index(stop) else cut["content"] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_gives_the_same_text_without_speculation(server: Running, seed: int) -> None:
    body = {
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "temperature": 1,
        "seed": seed,
        "max_tokens": 80,
    }
    on, off = (post(server, **body, speculation=speculation).json() for speculation in (True, False))
    assert on["content"] == off["content"]
    assert set(json.loads(on["content"][0]["text"])) == {"name", "size"}
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_arguments_that_were_cut_off_become_an_empty_input(server: Running) -> None:
    body = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    answers = [post(server, **body, max_tokens=limit).json() for limit in range(14, 24, 2)]
    cut = [answer["content"][0]["input"] for answer in answers if answer["stop_reason"] == "max_tokens" and answer["content"]]
    assert {} in cut
    assert all(value == {} or set(value) == {"city"} for value in cut)


# counting


def test_tokens_are_counted_as_they_are_used(server: Running, client: Anthropic) -> None:
    for body in ({}, {"system": "Be brief."}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}):
        count = client.messages.count_tokens(model="pyrite", messages=[USER], **body)  # type: ignore[arg-type, list-item]
        usage = post(server, **body).json()["usage"]
        assert count.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_repeated_prompt_is_read_from_the_cache(server: Running) -> None:
    long = {"messages": [{"role": "user", "content": "import os\n" * 60}]}
    first, second = (post(server, **long).json()["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    assert sum(second[key] for key in ("input_tokens", "cache_read_input_tokens")) == sum(
        first[key] for key in ("input_tokens", "cache_read_input_tokens")
    )


# keys and errors


def test_a_key_is_taken_from_x_api_key(server_with: Starter) -> None:
    server = server_with(api_key=("key",))
    with Anthropic(base_url=server.url, api_key="key", max_retries=0) as client:
        assert client.messages.count_tokens(model="pyrite", messages=[USER]).input_tokens > 0  # type: ignore[list-item]
    with Anthropic(base_url=server.url, auth_token="key", max_retries=0) as client:
        assert client.messages.count_tokens(model="pyrite", messages=[USER]).input_tokens > 0  # type: ignore[list-item]
    with (
        Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as no,
    ):
        client.messages.count_tokens(model="pyrite", messages=[USER])  # type: ignore[list-item]
    assert no.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for headers in ({"x-api-key": ""}, {"Authorization": "Bearer wrong", "x-api-key": "key"}, {}):
        assert httpx.get(f"{server.url}/v1/models", headers=headers, trust_env=False).status_code == 401, headers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content: blocks of type 'image'"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "prompt is too long: messages: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: only tools with an input_schema"),
        ({"tools": [{"name": "f", "input_schema": [1]}]}, "tools[0].input_schema: must be an object"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools: a function's name"),
        ({"tools": [TOOL | {"input_schema": NONSENSE}], "tool_choice": {"type": "any"}}, "nonsense"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice: names 'rm'"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: "),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: edits"),
        ({"stop_sequences": ["x"] * 5}, "stop_sequences: "),
        ({"top_p": 0}, "top_p: "),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server: Running, changes: dict[str, Any], reason: str) -> None:
    refused = post(server, **changes)
    assert refused.status_code == 400, refused.text
    body = refused.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in body["error"]["message"]
    assert body["request_id"] == refused.headers["x-request-id"]
    assert server.is_idle()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_every_error_has_anthropic_s_format(server: Running, path: str) -> None:
    answers = [
        server.http.get(path),
        server.http.post(path, content=b"{"),
        server.http.post(path, content=b"{", headers={"content-type": "application/json"}),
        server.http.post(path, json={"model": "other", "max_tokens": 1, "messages": [USER]}),
        server.http.get(path, headers={"Host": "elsewhere"}),
    ]
    statuses = {answer.status_code for answer in answers}
    assert statuses == ({404, 403} if path.endswith("batches") else {405, 415, 400, 404, 403})
    for answer in answers:
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"}
        assert body["error"]["type"] in ("not_found_error", "permission_error", "invalid_request_error")
    assert "error" in server.http.get("/v1/responses/x").json()
    assert "type" not in server.http.get("/v1/responses/x").json()


def test_harmless_fields_are_accepted(server: Running) -> None:
    fields = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "top_k": 5,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "betas": ["x"],
        "output_config": {"effort": "low"}, "tools": [TOOL], "tool_choice": {"type": "auto"},
    }  # fmt: skip
    assert post(server, **fields).status_code == 200
    sent = server.http.post("/v1/messages?beta=true", json={"messages": [USER], "max_tokens": 2, "system": "x" * 3000})
    assert sent.status_code == 200
