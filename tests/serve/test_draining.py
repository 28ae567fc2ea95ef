"""After the drain timeout, requests without output are refused and never get an empty answer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from tests.support import make_engine, make_request, random_decoder, write_family
from tests.support.server import Running, request_bytes, until

LONG = {"prompt": "def read_config(path):\n    ", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
Starter = Callable[..., Running]


def answer_of(connection: socket.socket) -> bytes:
    """All bytes until the answer ends."""
    received = b""
    while not (received.endswith((b"0\r\n\r\n", b"}}")) or b"[DONE]" in received):
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


def begin_stream(server: Running, mark: bytes) -> socket.socket:
    connection = server.raw(request_bytes("/v1/completions", LONG | {"stream": True}))
    received = b""
    while mark not in received:
        received += connection.recv(4096)
    return connection


def drain(server: Running) -> None:
    loop = server.service._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(server.service.drain(), loop).result(30)


def test_waiting_requests_get_503(server_with: Starter) -> None:
    server = server_with(drain_timeout=0.11)
    running = [begin_stream(server, b"data: ") for _ in range(4)]  # as many as run at once
    responses: list[httpx.Response] = []
    whole = threading.Thread(target=lambda: responses.append(server.post("/v1/completions", **LONG)))
    whole.start()
    waiting = server.raw(request_bytes("/v1/completions", LONG | {"stream": True}))
    until(lambda: server.service.in_flight == 6)
    drain(server)
    whole.join(30)
    assert responses[0].status_code == 503
    assert responses[0].json()["error"]["code"] == "draining"
    assert int(responses[0].headers["retry-after"]) > 0
    stream = answer_of(waiting)
    assert stream.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: " in stream.lower()
    assert b'"draining"' in stream
    for connection in running:
        assert b'"finish_reason": "abort"' in answer_of(connection), "text that came is kept"


def test_a_started_stream_ends_with_an_error_event(server_with: Starter) -> None:
    server = server_with(drain_timeout=0.12, ping_interval=0.05)
    for _ in range(4):
        begin_stream(server, b"data: ")
    waiting = begin_stream(server, b": keep-alive")
    drain(server)
    events = [json.loads(line[6:]) for line in answer_of(waiting).splitlines() if line.startswith(b"data: {")]
    assert [event["error"]["code"] for event in events] == ["draining"]


def test_grammars_that_are_being_compiled_end_with_the_server(
    server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their threads would keep the process alive until the compiler's budget is used up."""
    server, grammars, closed = server_with(drain_timeout=0.14), llm.engine.grammars, []
    monkeypatch.setattr(grammars, "close", lambda: closed.append(server.service.thread._thread.is_alive()))  # type: ignore[union-attr]
    server.close()
    assert closed == [False], "after the engine's thread, which uses them"


def test_times_of_a_request_with_some_text_are_not_negative(server_with: Starter, llm: LLM) -> None:
    server = server_with(drain_timeout=0.13)
    outputs: list[Any] = []
    whole = threading.Thread(target=lambda: outputs.append(server.post("/v1/completions", **LONG).json()))
    whole.start()
    until(lambda: any(seq.output_len for seq in list(llm.engine.scheduler.running)))
    drain(server)
    whole.join(30)
    assert outputs[0]["choices"][0]["finish_reason"] == "abort"
    assert min(outputs[0]["metrics"]["timings"].values()) >= 0


def test_times_of_a_request_that_never_ran_are_not_negative(tmp_path: Any) -> None:
    engine = make_engine(random_decoder(write_family(tmp_path, "qwen2"), seed=1))
    processor = engine.submit(make_request([1, 2, 3], SamplingParams()), "none")
    engine.abort(processor)
    timings = processor.output().timings
    assert min(timings.first_token_s, timings.total_s, timings.queued_s, timings.decode_tokens_per_s) >= 0
