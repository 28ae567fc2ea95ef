"""Clients that disconnect, are slow or send invalid requests; full queues; dead engines. Other clients are not affected."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM
from outrider.serve.settings import Limits
from tests.support.server import Running, request_bytes, until

PROMPT = "def read_config(path):\n    "
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
Starter = Callable[..., Running]


def aborted(server: Running) -> int:
    return server.service.metrics.finish_reasons["abort"]


def running(server: Running) -> int:
    return len(server.service.thread.engine.scheduler.running)  # type: ignore[union-attr]


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        data = connection.recv(4096)
        assert data, received
        received += data
    return received


def test_disconnecting_from_a_stream_frees_its_pages(server: Running) -> None:
    before = aborted(server)
    connection = server.raw(request_bytes("/v1/completions", LONG | {"stream": True}))
    read_until(connection, b"data: ")
    connection.close()
    until(server.is_idle)
    assert aborted(server) == before + 1


def test_disconnecting_while_queued(server: Running) -> None:
    before = aborted(server)
    busy = [server.raw(request_bytes("/v1/completions", LONG | {"stream": True})) for _ in range(4)]
    for connection in busy:
        read_until(connection, b"data: ")
    waiting = server.raw(request_bytes("/v1/completions", LONG | {"stream": True}))
    until(lambda: server.service.in_flight == 5)
    waiting.close()
    until(lambda: aborted(server) == before + 1)
    assert running(server) == 4
    for connection in busy:
        connection.close()
    until(server.is_idle)
    assert aborted(server) == before + 5


def test_disconnecting_during_prefill(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, score = aborted(server), llm.engine.runner.score
    read: list[int] = []

    def slow(batch: Any, drafts: Any, taps: Any) -> Any:
        read.append(batch.sequences[0].cached)
        time.sleep(0.05)
        return score(batch, drafts, taps)

    monkeypatch.setattr(llm.engine.runner, "score", slow)
    ids = [30 + i % 2000 for i in range(1900)]  # fifteen rounds of prefill
    connection = server.raw(
        request_bytes("/v1/completions", {"prompt": ids, "max_tokens": 2, "stream": True, "cache_salt": "prefill"})
    )
    until(lambda: len(read) > 2)
    connection.close()
    until(server.is_idle)
    assert max(read) < 1800, "it was left in the middle of its prompt"
    assert aborted(server) == before + 1


def test_disconnecting_from_a_request_without_a_stream(server: Running) -> None:
    before = aborted(server)
    connection = server.raw(
        request_bytes("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True})
    )
    until(lambda: running(server) == 1)
    connection.close()
    until(server.is_idle)
    assert aborted(server) == before + 1


def test_a_slow_reader_blocks_no_other_and_is_disconnected(server_with: Starter) -> None:
    server = server_with(limits=Limits(write_s=1.0, backlog=4))
    before = aborted(server)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a small buffer is soon full
    connection = socket.socket()
    server.connections.append(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", server.port))
    wide = LONG | {"stream": True, "logprobs": 20, "return_token_details": True}  # several kilobytes a token
    connection.sendall(request_bytes("/v1/completions", wide))
    (handle,) = iter_until(lambda: list(server.service._handles))
    until(lambda: len(handle._chunks) >= 4)
    tokens = len(handle.jobs[0].processors[0].from_draft)
    assert server.post("/v1/completions", prompt="x = ", max_tokens=8).status_code == 200
    assert len(handle._chunks) <= 4 + 1, "chunks that wait for the reader are bounded; the last chunk is always delivered"
    until(lambda: handle.open == 0 or len(handle.jobs[0].processors[0].from_draft) > tokens + 8)  # the engine continues
    until(server.is_idle)
    assert aborted(server) == before + 1


def iter_until(look: Callable[[], list[Any]]) -> list[Any]:
    until(lambda: bool(look()))
    return look()


def test_a_slow_reader_gets_every_token(server_with: Starter) -> None:
    server = server_with(limits=Limits(backlog=1))
    whole = server.post("/v1/completions", prompt=PROMPT, max_tokens=80, temperature=0).json()["choices"][0]["text"]
    events = server.events("/v1/completions", prompt=PROMPT, max_tokens=80, temperature=0)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: local", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /v1/comp"],
    ids=["nothing", "half a head", "half of a second head"],
)
def test_slow_headers_are_cut_off(server_with: Starter, sent: bytes) -> None:
    server = server_with(limits=Limits(header_s=0.3, body_s=0.3))
    connection = server.raw(sent)
    received = b""
    while data := connection.recv(4096):  # ends when the server closes the connection
        received += data
    assert b" 408 " in received
    assert server.http.get("/health").status_code == 200


def test_many_idle_connections_do_not_block(server_with: Starter) -> None:
    server = server_with(limits=Limits(header_s=0.3, body_s=0.3))
    idle = [server.raw(b"GET / HT") for _ in range(200)]
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    for connection in idle:
        assert b" 408 " in connection.recv(4096)
        connection.close()


def test_slow_bodies_are_cut_off(server_with: Starter) -> None:
    server = server_with(limits=Limits(header_s=0.3, body_s=0.3))
    connection = server.raw(request_bytes("/v1/completions", {"prompt": "x"})[:-5])
    answer = read_until(connection, b"}}")
    assert b" 408 " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x"',
        b"",
        b"[]",
        b'"text"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "extra": -1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\udfff": 1}',
        b'{"prompt": "\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"prompt": "x", "prompt": "y"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "x", "response_format": ' + b'{"a":' * 70 + b"1" + b"}" * 71,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_invalid_json_gets_400(server: Running, body: bytes) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.http.get("/health").status_code == 200


def test_a_nul_character_is_text(server: Running) -> None:
    answer = server.http.post(
        "/v1/completions", content=b'{"prompt": "a\\u0000b", "max_tokens": 1}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200


def test_bodies_beyond_the_limit_get_413(server_with: Starter) -> None:
    server = server_with(limits=Limits(body_bytes=10_000))
    assert server.post("/v1/completions", prompt="x" * 20_000).status_code == 413
    chunks = (b"x" * 1000 for _ in range(50))
    answer = server.http.post("/v1/completions", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413, "without a length too"
    assert answer.json()["error"]["code"] == "body_too_large"
    early = server.raw(
        request_bytes("/v1/completions", b"")[:-4].replace(b"Content-Length: 0", b"Content-Length: 1000000000") + b"\r\n\r\n"
    )
    assert b" 413 " in read_until(early, b"}}"), "refused before it is sent"


def test_headers_beyond_the_limit_get_431(server: Running) -> None:
    assert server.http.get("/version", headers={f"x-{i}": "1" for i in range(150)}).status_code == 431
    assert server.http.get("/version", headers={"x-long": "a" * 70_000}).status_code == 431
    connection = server.raw(b"GET /version HTTP/1.1\r\nx-endless: " + b"a" * 200_000)
    assert b" 431 " in connection.recv(4096)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 10**6}, "n"),
        ({"n": 16, "prompt": ["x"] * 64}, "n"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {str(i): 1.0 for i in range(301)}}, "logit_bias"),
        ({"guided_json": {"description": "x" * 70_000}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70_000}}}},
            "response_format",
        ),
        ({"bad_words": ["a"] * 2000}, "bad_words"),
        ({"cache_salt": "a" * 300}, "cache_salt"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_parameters_beyond_their_limits_get_400(server: Running, changes: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", **({"prompt": "x", "max_tokens": 1} | changes))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == param


def test_a_full_queue_answers_429_without_asking_the_engine(
    server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_with(max_queue=1)
    score = llm.engine.runner.score

    held = threading.Event()

    def stuck(*args: Any) -> Any:
        held.wait(60)  # a request that needs the engine gets no answer
        return score(*args)

    monkeypatch.setattr(llm.engine.runner, "score", stuck)
    streams = [server.raw(request_bytes("/v1/completions", LONG | {"stream": True})) for _ in range(5)]
    until(lambda: server.service.in_flight == 5)
    for _ in range(3):
        answer = server.post("/v1/completions", prompt="x", max_tokens=1)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    assert not held.is_set()
    held.set()
    for stream in streams:
        stream.close()
    monkeypatch.undo()
    until(server.is_idle)
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_keep_alive_comments_without_output(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(ping_interval=0.05)
    score = llm.engine.runner.score
    monkeypatch.setattr(llm.engine.runner, "score", lambda *args: time.sleep(0.2) or score(*args))
    connection = server.raw(request_bytes("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "stream": True}))
    received = read_until(connection, b"[DONE]")
    assert b": keep-alive\n\n" in received
    assert received.index(b": keep-alive") < received.index(b"data: ")
    connection.close()


def test_stream_interval_gathers_tokens(server_with: Starter) -> None:
    server = server_with(stream_interval=16)
    events = server.events("/v1/completions", prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True, return_token_ids=True)
    counts = [len(event["choices"][0]["token_ids"]) for event in events[:-1]]
    assert sum(counts) == 40
    assert all(count >= 16 for count in counts[:-1])


def test_a_failed_forward_fails_only_its_request(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    score = llm.engine.runner.score

    def broken(batch: Any, *args: Any) -> Any:
        if any(seq.request.prompt_ids[0] == 77 for seq in batch.sequences):
            raise RuntimeError("secret detail")
        return score(batch, *args)

    monkeypatch.setattr(llm.engine.runner, "score", broken)
    answer = server.post("/v1/completions", prompt=[77, 5], max_tokens=4)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    events = server.events("/v1/completions", prompt=[77, 5], max_tokens=4)
    assert events[0]["error"]["code"] == "corrupted"
    assert events[-1] == "[DONE]"
    assert server.post("/v1/completions", prompt="x", max_tokens=4).status_code == 200
    until(server.is_idle)


def test_a_dead_engine_fails_all_requests(llm: LLM, server_with: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(drain_timeout=0.1)
    stream = server.raw(request_bytes("/v1/completions", LONG | {"stream": True}))
    read_until(stream, b"data: ")

    def broken() -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(llm.engine.scheduler, "next", broken)
    received = read_until(stream, b"[DONE]")
    assert b'"engine_dead"' in received
    until(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/health").json() == {"status": "dead"}
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 503
    assert server.http.get("/metrics").status_code == 200
    monkeypatch.undo()
    assert server_with().post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
