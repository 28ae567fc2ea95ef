"""Expensive requests of one client do not delay other clients: preparation, admission, large answers, priority."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from outrider.sampling import Structured
from outrider.sampling.grammar import Grammars
from outrider.serve.settings import Limits
from tests.support.server import Running, promised, request_bytes, until

Starter = Callable[..., Running]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, when: Callable[..., bool]) -> Iterator[list[int]]:
    """Patch a method so that calls with some arguments block until the context ends. Yields the blocked calls."""
    real, free, waiting = getattr(where, name), threading.Event(), [0]

    def slow(*args: Any, **settings: Any) -> Any:
        if when(*args):
            waiting[0] += 1
            assert free.wait(60)
        return real(*args, **settings)

    monkeypatch.setattr(where, name, slow)
    try:
        yield waiting
    finally:
        free.set()
        monkeypatch.undo()


@contextmanager
def uncompiled(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> Iterator[list[tuple[Future[Any], Structured]]]:
    """Grammars whose compilation ends when the context does."""
    real = grammars.compiled
    waiting: list[tuple[Future[Any], Structured]] = []

    def hold(structured: Structured) -> Future[Any]:
        waiting.append((Future(), structured))
        return waiting[-1][0]

    monkeypatch.setattr(grammars, "compiled", hold)
    yield waiting
    monkeypatch.setattr(grammars, "compiled", real)
    for future, structured in waiting:
        future.set_result(real(structured).result())


def from_address(server: Running, address: str) -> httpx.Client:
    """Another client of the server."""
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=server.url, transport=transport, timeout=60, trust_env=False)


def test_requests_in_preparation_take_places(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(max_queue=1)
    with ThreadPoolExecutor(5) as clients, held(monkeypatch, llm.tokenizer, "encode", lambda text: text == "slow"):
        pending = [clients.submit(server.post, "/v1/completions", prompt="slow", max_tokens=1) for _ in range(5)]
        until(lambda: server.service.places.total == 5)
        refused = server.post("/v1/completions", prompt=[5], max_tokens=1)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with from_address(server, "127.0.0.2") as other:  # this client's fair share is free
            assert other.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).status_code == 200
        assert not any(future.done() for future in pending)
    assert [future.result().status_code for future in pending] == [200] * 5
    until(lambda: server.is_idle() and server.service.places.total == 0)


def test_a_plain_request_does_not_wait_for_grammars(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(6) as clients, uncompiled(monkeypatch, llm.engine.grammars) as waiting:
        body = {"prompt": "x", "max_tokens": 4, "guided_json": SCHEMA}
        pending = [clients.submit(server.post, "/v1/completions", **body) for _ in range(6)]
        until(lambda: len(waiting) == 6)
        assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
        assert not any(future.done() for future in pending)
    assert [future.result().status_code for future in pending] == [200] * 6


def test_waiting_grammars_are_limited(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(limits=Limits(grammars=2), max_queue=50)
    body = {"prompt": "x", "max_tokens": 4, "guided_json": SCHEMA}
    with ThreadPoolExecutor(2) as clients, uncompiled(monkeypatch, llm.engine.grammars):
        pending = [clients.submit(server.post, "/v1/completions", **body) for _ in range(2)]
        until(lambda: server.service.places.total == 2)
        refused = server.post("/v1/completions", **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert [future.result().status_code for future in pending] == [200] * 2
    until(lambda: server.service.places.total == 0)


def test_a_small_request_does_not_wait_for_large_ones(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    large = "def f():\n" * 3000
    with ThreadPoolExecutor(4) as clients, held(monkeypatch, llm.tokenizer, "encode", lambda text: text == large):
        pending = [clients.submit(server.post, "/v1/completions", prompt=large, max_tokens=1) for _ in range(4)]
        until(lambda: server.service.places.total == 4)
        assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    assert [future.result().status_code for future in pending] == [400] * 4, "they are longer than the context"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_long_chats_are_refused_before_they_are_tokenised(
    server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    assert llm.tokenizer is not None
    encoded: list[int] = []
    real = llm.tokenizer.encode_bare
    monkeypatch.setattr(llm.tokenizer, "encode_bare", lambda text: encoded.append(len(text)) or real(text))
    text = "x = 1\n" * (llm.tokenizer.longest * llm.max_model_len // 6 + 10)
    answer = server.post("/v1/chat/completions", messages=[{"role": role, "content": text}], max_tokens=1)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert not encoded


def test_long_texts_are_refused_before_they_are_counted(server: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "x = 1\n" * (llm.tokenizer.longest * llm.max_model_len // 6 + 10)
    for body, param in (({"prompt": text}, "prompt"), ({"messages": [{"role": "user", "content": text}]}, "messages")):
        answer = server.post("/tokenize", **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.json()["error"]["param"] == param


def test_long_prompts_of_ids_are_refused_before_each_id_is_checked(server: Running, llm: LLM) -> None:
    answer = server.post("/v1/completions", prompt=[2**31 - 1] * llm.max_model_len, max_tokens=1)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


def test_white_space_that_a_template_may_drop_is_not_counted(server: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    space = " " * (llm.tokenizer.longest * llm.max_model_len + 10)
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": space + "hello"}], max_tokens=1)
    assert answer.json()["error"]["message"].startswith("messages: make "), "the template keeps it here, and then it counts"


def test_a_disconnect_during_preparation_releases_its_places(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch, llm.tokenizer, "encode", lambda text: text == "slow"):
        connection = server.raw(request_bytes("/v1/completions", {"prompt": "slow", "max_tokens": 5}))
        until(lambda: server.service.places.total == 1)
        connection.close()
        until(lambda: server.service.places.total == 0)
    until(server.is_idle)


def test_log_probabilities_of_prompts_are_capped(server_with: Starter) -> None:
    server = server_with(limits=Limits(logprob_entries=1000))
    ids = list(range(5, 105))
    assert server.post("/v1/completions", prompt=ids, max_tokens=1, prompt_logprobs=9).status_code == 200
    for body, param in (
        ({"prompt_logprobs": 10}, "prompt_logprobs"),
        ({"prompt_logprobs": 4, "n": 3}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "prompt": [ids] * 11}, "prompt_logprobs"),
        ({"logprobs": 10, "echo": True}, "logprobs"),
    ):
        answer = server.post("/v1/completions", **({"prompt": ids, "max_tokens": 1} | body))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "at most 1000 fit in one answer" in answer.json()["error"]["message"]
    until(lambda: server.is_idle() and server.service._logprobs.total == 0)


def test_log_probabilities_in_memory_at_once_are_limited(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(limits=Limits(logprob_entries=100), max_queue=50)
    body = {"prompt": list(range(5, 105)), "max_tokens": 1, "prompt_logprobs": 0}
    with ThreadPoolExecutor(4) as clients, held(monkeypatch, llm.engine.runner, "score", lambda *_: True):
        pending = [clients.submit(server.post, "/v1/completions", **body) for _ in range(4)]
        until(lambda: server.service._logprobs.total == 400)
        assert server.post("/v1/completions", **body).status_code == 429
    assert [future.result().status_code for future in pending] == [200] * 4
    until(lambda: server.is_idle() and server.service._logprobs.total == 0 and server.service.places.total == 0)


def test_large_answers_are_written_off_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large answers hold the same values as the outputs of `LLM`."""
    from outrider.serve import answers

    where: set[str] = set()
    real = answers._by_id
    monkeypatch.setattr(answers, "_by_id", lambda logprobs: where.add(threading.current_thread().name) or real(logprobs))
    ids = [30 + i % 2000 for i in range(400)]
    answer = server.post("/v1/completions", prompt=ids, max_tokens=2, temperature=0, prompt_logprobs=5)
    assert answer.status_code == 200
    assert "content-length" not in answer.headers
    logprobs = answer.json()["choices"][0]["prompt_logprobs"]
    expected = (
        LLM(max_num_seqs=1).generate([ids], SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=5))[0].prompt_logprobs
    )
    assert expected is not None
    assert logprobs[0] is None
    for row, entry in zip(logprobs[1:], expected[1:], strict=True):
        assert entry is not None
        assert {int(i): value["logprob"] for i, value in row.items()} == {i: value.logprob for i, value in entry.items()}
    assert where
    assert all(name.startswith("outrider-text") for name in where)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [30 + i for i in range(1500)], "return_token_ids": True},
        {"prompt": "import collections\n" * 250, "echo": True},
    ],
    ids=["ids", "echo"],
)
def test_large_prompts_in_answers_are_written_off_the_loop(server: Running, body: dict[str, Any]) -> None:
    """Ids or text of a long prompt, sixteen times, make an answer large even if few tokens are generated."""
    answer = server.post("/v1/completions", **body, max_tokens=1, temperature=0, n=16)
    assert answer.status_code == 200
    assert "content-length" not in answer.headers, "written on the event loop"
    prompt = body["prompt"]
    for choice in answer.json()["choices"]:
        assert choice["prompt_token_ids"] == prompt if "return_token_ids" in body else choice["text"].startswith(prompt)
    alone = server.post("/v1/completions", **body, max_tokens=1, temperature=0)
    assert "content-length" in alone.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_large_and_small_answers_have_the_same_form(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    from outrider.serve import answers

    chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": "def f(x):"}]} if chat else {"prompt": "def f(x):\n", "echo": True}
    more = {"logprobs": True, "top_logprobs": 5} if chat else {"logprobs": 5, "prompt_logprobs": 5}
    body = prompt | more | {"max_tokens": 90, "temperature": 0, "ignore_eos": True, "return_token_details": True, "n": 2}

    def plain() -> tuple[Any, Any]:
        whole = server.post(path, **body).json()
        events = server.events(path, **body)
        for answer in (whole, *events[:-1]):
            for name in ("id", "created", "metrics"):
                answer.pop(name, None)
        for choice in whole["choices"]:
            choice["token_details"] = promised(choice["token_details"])
        return whole, [json.dumps(answer) for answer in events]

    monkeypatch.setattr(answers, "_LARGE", 10**9)
    small = plain()
    monkeypatch.setattr(answers, "_LARGE", -1)
    large = plain()
    assert large[0] == small[0]
    assert _joined(large[1]) == _joined(small[1])


def _joined(events: list[str]) -> dict[int, list[Any]]:
    """The token details of each choice, joined over all chunks."""
    out: dict[int, list[Any]] = {}
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            details = choice.get("token_details", [])
            out.setdefault(choice["index"], []).extend(
                (detail["id"], detail["text"], detail["logprob"], detail["top"]) for detail in details
            )
    return out


def test_priority_is_refused_unless_the_server_allows_it(server_with: Starter) -> None:
    refused = server_with().post("/v1/completions", prompt="x", max_tokens=1, priority=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert "--allow-priority" in refused.json()["error"]["message"]
    assert server_with().post("/v1/completions", prompt="x", max_tokens=1, priority=0).status_code == 200
    allowed = server_with(allow_priority=True)
    assert allowed.post("/v1/completions", prompt="x", max_tokens=1, priority=-1).status_code == 200


def test_requests_carry_their_client_to_the_scheduler(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    submit = llm.engine.scheduler.submit
    monkeypatch.setattr(llm.engine.scheduler, "submit", lambda seq: seen.append(seq.request.client) or submit(seq))
    server.post("/v1/completions", prompt="x", max_tokens=1)
    with from_address(server, "127.0.0.2") as other:
        other.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert seen == ["address 127.0.0.1", "address 127.0.0.2"]
