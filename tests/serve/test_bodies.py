"""Request bodies: the cost of invalid ones, the process that checks large ones, and the fields that errors name."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.process import PythonProcess
from outrider.serve import body as bodies
from outrider.serve import schemas
from outrider.serve.errors import ApiError
from outrider.serve.messages_schema import MessagesRequest
from outrider.serve.responses_schema import ResponsesRequest
from outrider.serve.settings import Limits
from outrider.serve.validation import SCHEMAS, Refusal, check, restore
from tests.support.examples import examples
from tests.support.server import Running, request_bytes, until

Starter = Callable[..., Running]
MANY = 20_000
USER = {"role": "user", "content": "x"}
COMPLETION, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


def hostile(many: int) -> dict[str, tuple[str, Any]]:
    """Lists of things that are all wrong."""
    return {
        "empty prompts": (COMPLETION, {"prompt": [""] * many}),
        "negative ids": (COMPLETION, {"prompt": [-1] * many}),
        "empty prompts of ids": (COMPLETION, {"prompt": [[]] * many}),
        "prompts of negative ids": (COMPLETION, {"prompt": [[-1] * many] * 2}),
        "mixed prompts": (COMPLETION, {"prompt": [1, *[""] * many]}),
        "stop": (COMPLETION, {"prompt": "x", "stop": [1] * many}),
        "stop_token_ids": (COMPLETION, {"prompt": "x", "stop_token_ids": [""] * many}),
        "bad_words": (COMPLETION, {"prompt": "x", "bad_words": [0] * many}),
        "logit_bias": (COMPLETION, {"prompt": "x", "logit_bias": {str(i): "" for i in range(many)}}),
        "guided_choice": (COMPLETION, {"prompt": "x", "guided_choice": [0] * many}),
        "choice": (COMPLETION, {"prompt": "x", "structured_outputs": {"choice": [0] * many}}),
        "messages": (CHAT, {"messages": [{}] * many}),
        "tool_calls": (CHAT, {"messages": [USER | {"tool_calls": [{}] * many}]}),
        "content": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * many}]}),
        "tools": (CHAT, {"messages": [USER], "tools": [{}] * many}),
        "tokens": (DETOKENIZE, {"tokens": [-1] * many}),
        "items": (RESPONSES, {"input": [{}] * many}),
        "items of text": (RESPONSES, {"input": [""] * many}),
        "parts of an item": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}] * many}]}),
        "tools of a response": (RESPONSES, {"input": "x", "tools": [{}] * many}),
        "included": (RESPONSES, {"input": "x", "include": [0] * many}),
        "metadata": (RESPONSES, {"input": "x", "metadata": {str(i): 0 for i in range(many)}}),
        "turns": (MESSAGES, {"max_tokens": 1, "messages": [{}] * many}),
        "blocks": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}] * many}]}),
        "blocks of nothing": (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * many}]}),
        "system": (MESSAGES, {"max_tokens": 1, "messages": [USER], "system": [{"type": "text"}] * many}),
        "stop_sequences": (MESSAGES, {"max_tokens": 1, "messages": [USER], "stop_sequences": [0] * many}),
        "tools to count": (COUNT, {"messages": [USER], "tools": [{}] * many}),
        "messages to tokenize": (TOKENIZE, {"messages": [{}] * many}),
    }


def calls(*inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """A turn of the assistant with calls of a tool."""
    blocks = [{"type": "tool_use", "id": "1", "name": "f", "input": value} for value in inputs]
    return [{"role": "assistant", "content": blocks}]


FEW = 100  # shorter than the limits on most lists, so that items are checked and not only counted


@pytest.mark.parametrize("name", hostile(0))
def test_a_long_wrong_list_reports_few_errors(name: str) -> None:
    for many in (FEW, MANY):
        path, value = hostile(many)[name]
        with pytest.raises(ValidationError) as caught:
            SCHEMAS[path].validate_python(value)
        assert caught.value.error_count() <= (FEW if name == "logit_bias" else 2), "an object has at most 300 entries"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (COMPLETION, {"prompt": ["x"] * MANY}),
        (COMPLETION, {"prompt": "x", "stop": ["x"] * MANY}),
        (COMPLETION, {"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(MANY)}}),
        (CHAT, {"messages": [USER] * MANY}),
        (CHAT, {"messages": [USER | {"content": [{"type": "text", "text": "x"}] * MANY}]}),
        (CHAT, {"messages": [USER | {"tool_calls": [{"function": {"name": "f"}}] * MANY}]}),
        (CHAT, {"messages": [USER | {"tool_calls": [{"function": {"name": "f"}}] * 100}] * 100}),
        (RESPONSES, {"input": [USER] * MANY}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * MANY}]}),
        (MESSAGES, {"max_tokens": 1, "messages": [USER] * MANY}),
        (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]}),
        (MESSAGES, {"max_tokens": 1, "messages": calls({str(i): i for i in range(4 * MANY)})}),
        (COUNT, {"messages": calls(*[{"a": [{"b": [1] * 100}] * 100}] * 10)}),
    ],
    ids=lambda value: str(value)[:80],
)
def test_every_list_has_a_length_that_is_refused(path: str, value: Any) -> None:
    refusal = check(path, json.dumps(value).encode(), 64)
    assert isinstance(refusal, Refusal)
    assert re.search(r"at most \d+", refusal.message)


def test_every_route_with_a_body_has_its_schema(server: Running) -> None:
    posted = {route.path: route for route in server.app.routes if isinstance(route, APIRoute) and "POST" in route.methods}
    assert set(posted) == set(SCHEMAS)
    for path, route in posted.items():
        assert route.body_field is not None
        assert route.body_field._type_adapter.json_schema() == SCHEMAS[path].json_schema(), "what is documented is checked"


def test_tools_as_large_as_those_of_coding_agents_are_accepted() -> None:
    for size, accepted in ((100_000, True), (300_000, False)):
        function = {"name": "f", "description": "x" * size}
        for path, body in (
            (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": function}]}),
            (RESPONSES, {"input": "x", "tools": [{"type": "function"} | function]}),
            (MESSAGES, {"messages": [USER], "max_tokens": 1, "tools": [function | {"input_schema": {}}]}),
        ):
            result = check(path, json.dumps(body).encode(), 64)
            assert isinstance(result, Refusal) is not accepted
            assert accepted or result.param == "tools"


def test_unknown_fields_are_dropped() -> None:
    request = check(COMPLETION, json.dumps({"prompt": "x", "unknown": [[]] * MANY}).encode(), 64)
    assert "unknown" not in request.model_dump()
    tool = {"type": "function", "function": {"name": "f", "more": 1}}
    chat = check(CHAT, json.dumps({"messages": [USER], "tools": [tool]}).encode(), 64)
    assert chat.tools[0].model_dump(exclude_none=True) == tool, "templates see tools whole"


@pytest.fixture(scope="module")
def checker_process() -> Iterator[PythonProcess]:
    process = PythonProcess("outrider.serve.validation:check_in_worker")
    yield process
    process.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**33) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {
        *schemas.CompletionRequest.model_fields,
        *schemas.ChatRequest.model_fields,
        *ResponsesRequest.model_fields,
        *MessagesRequest.model_fields,
        "best_of",
        "functions",
        "role",
        "type",
        "function",
        "json",
    }
)
CLOSE = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=3) | JSON,
        "messages": st.lists(st.just(USER) | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON)),
        "tokens": st.lists(st.integers(-1, 9)) | JSON,
        "input": st.text(max_size=4) | st.lists(st.just(USER) | JSON, max_size=3),
        "system": st.text(max_size=4) | st.lists(st.just({"type": "text", "text": "x"}) | JSON, max_size=3),
        "max_tokens": st.integers(-1, 9) | JSON,
        "stop": st.lists(st.text(max_size=2) | JSON, max_size=6),
        "speculation": st.booleans() | st.dictionaries(st.sampled_from(["enabled", "method", "max_tokens"]), JSON),
        "tool_choice": st.sampled_from(["none", "any"]) | st.dictionaries(st.sampled_from(["type", "function"]), JSON),
    },
)
BODIES = st.builds(lambda some, more: more | some, CLOSE, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2)) | JSON
PATHS = st.sampled_from(sorted(SCHEMAS))


@examples(200)
@given(path=PATHS, value=BODIES)
def test_the_checker_process_gives_the_same_result(checker_process: PythonProcess, path: str, value: Any) -> None:
    data = json.dumps(value).encode()
    assert restore(path, *checker_process(path, data, 16)) == check(path, data, 16)


@pytest.mark.parametrize("field", ["context_management", "thread"])
def test_values_without_effect_are_not_handed_on(checker_process: PythonProcess, field: str) -> None:
    body = {"max_tokens": 1, "messages": [USER], field: {"edits": [{"keep": "all"}] * MANY}}
    valid, value, _ = checker_process(MESSAGES, json.dumps(body).encode(), 64)
    assert valid
    assert len(json.dumps(value)) < 500


INTERNAL = re.compile(
    r"constrained|function-|list\[|dict\[|nullable|tagged-union|literal\[|_Request|Message\b|PastCall|TextPart|Tool\b"
)


@examples(400)
@given(path=PATHS, value=BODIES)
def test_errors_name_fields_that_the_client_wrote(path: str, value: Any) -> None:
    result = check(path, json.dumps(value, allow_nan=True).encode(), 16)
    if isinstance(result, Refusal):
        written = json.dumps(value)
        assert not INTERNAL.search(result.message) or INTERNAL.search(written)
        if result.param is not None:
            assert resolves(result.param, value), (result, value)


def resolves(path: str, value: Any) -> bool:
    """Whether a path leads to a value in the body, or to a missing field of one of its objects."""
    if not path:
        return True
    if isinstance(value, list) and (match := re.match(r"\[(\d+)\]\.?", path)):
        return int(match[1]) < len(value) and resolves(path[match.end() :], value[int(match[1])])
    if not isinstance(value, dict):
        return False
    heads = [key for key in value if path == key or path.startswith((f"{key}.", f"{key}["))]
    return any(resolves(path[len(key) :].removeprefix("."), value[key]) for key in heads) or path.isidentifier()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 1}, "stop"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"speculation": {"max_tokens": -1}}, "speculation.max_tokens"),
        ({"speculation": 1}, "speculation"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"response_format": {}}, "response_format.type"),
        ({"request_id": "a\nFATAL: forged"}, "request_id"),
        ({"request_id": "\x1b[31m"}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"request_id": ""}, "request_id"),
    ],
    ids=str,
)
def test_params_are_paths(server: Running, changes: dict[str, Any], param: str) -> None:
    error = server.post("/v1/completions", **({"prompt": "x", "max_tokens": 1} | changes)).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_large_bodies_are_checked_in_another_process(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []

    def watched(path: str, data: bytes, depth: int) -> Any:
        here.append(len(data))
        return check(path, data, depth)

    monkeypatch.setattr(bodies, "check", watched)
    limit = Limits().small_body_bytes
    small = server.post("/v1/completions", prompt="x", max_tokens=1, padding="y" * (limit // 2))
    large = server.post("/v1/completions", prompt="x", max_tokens=1, padding="y" * limit, request_id="same", temperature=0)
    wrong = server.post("/v1/completions", prompt="x", max_tokens=-1, padding="y" * limit)
    unsound = server.http.post("/tokenize", content=b"[" * 2 * limit, headers={"Content-Type": "application/json"})
    assert small.status_code == large.status_code == 200
    assert large.json()["id"] == "cmpl-same"
    assert wrong.json()["error"]["param"] == "max_tokens"
    assert (unsound.status_code, "nested deeper" in unsound.text) == (400, True)
    assert len(here) == 1, "only the small one"
    assert here[0] <= limit


@pytest.mark.parametrize("prompt", [list(range(MANY)), [[5] * MANY, [2**31 - 1]], ["a", "b"]], ids=["ids", "lists", "texts"])
def test_long_prompts_cross_processes_as_bytes(checker_process: PythonProcess, prompt: Any) -> None:
    """Unpickling a list of a million ids holds the interpreter lock. Unpickling bytes does not."""
    sound, value, _ = checker_process(COMPLETION, json.dumps({"prompt": prompt}).encode(), 64)
    assert not isinstance(prompt[0], int) or isinstance(value["prompt"], bytes)
    assert not isinstance(prompt[0], list) or all(isinstance(ids, bytes) for ids in value["prompt"])
    assert restore(COMPLETION, sound, value).prompt == prompt


def test_waiting_large_bodies_are_bounded(server_with: Starter) -> None:
    server = server_with(limits=Limits(large_bodies=0))
    answer = server.post("/v1/completions", prompt="x" * 70_000)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_clients_take_turns_with_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client fills every place. Another client's body is still admitted, and does not wait for all of them."""
    checker, started, free, order = bodies.BodyChecker(Limits(large_bodies=4)), threading.Event(), threading.Event(), []

    def slow(path: str, body: bytes) -> bytes:
        order.append(body[:1])
        started.set()
        assert free.wait(60)
        return body[:1]

    async def send(body: bytes, client: str) -> bytes:
        answer: bytes = await checker.request_from("/v1/completions", body * 70_000, client)
        return answer

    async def main() -> None:
        flood = [asyncio.create_task(send(b"a", "greedy")) for _ in range(4)]
        assert await asyncio.to_thread(started.wait, 60)
        with pytest.raises(ApiError) as refused:
            await send(b"x", "greedy")
        assert refused.value.status_code == 429
        other = asyncio.create_task(send(b"b", "other"))
        await asyncio.sleep(0)
        free.set()
        assert await other == b"b"
        assert await asyncio.gather(*flood) == [b"a"] * 4

    monkeypatch.setattr(checker, "_in_process", slow)
    try:
        asyncio.run(main())
    finally:
        checker.close()
    assert order.index(b"b") <= 2, "one that was under way and one turn of the other client"


def test_bodies_in_memory_are_bounded_for_each_client(server_with: Starter) -> None:
    """Requests whose bodies never end fill one client's share of the memory, but not that of other clients."""
    server = server_with(limits=Limits(bodies_bytes=100_000))
    room = server.app.state.checker.room
    half = request_bytes("/v1/completions", b" " * 200_000)[:90_000]
    unfinished = server.raw(half)
    until(lambda: room.total > 80_000)
    body = {"prompt": "x", "max_tokens": 1, "padding": "y" * 40_000}
    refused = server.post("/v1/completions", **body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    with httpx.Client(base_url=server.url, transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=60) as other:
        assert other.post("/v1/completions", json=body).status_code == 200
    unfinished.close()
    until(lambda: room.total == 0)
    assert server.post("/v1/completions", **body).status_code == 200
    assert room.total == 0


def test_a_dead_checker_process_fails_one_request(server: Running) -> None:
    padded = {"prompt": "x", "max_tokens": 1, "padding": "y" * 70_000}
    assert server.post("/v1/completions", **padded).status_code == 200
    child = server.app.state.checker._process._process
    child.kill()
    child.wait()
    assert server.post("/v1/completions", **padded).status_code == 503
    assert server.post("/v1/completions", **padded).status_code == 200


def test_an_empty_body_gets_400(server: Running) -> None:
    answer = server.http.post("/v1/completions", content=b"", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "empty" in answer.json()["error"]["message"]


def test_the_garbage_collector_skips_the_loaded_model(server: Running) -> None:
    assert gc.get_freeze_count() > 10_000, "a collection over the loaded modules and the model would block all threads"
