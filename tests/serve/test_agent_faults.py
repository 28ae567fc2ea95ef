"""What the events of /v1/responses and /v1/messages say of silence, failures, a stopping server and clients that leave."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM
from outrider.serve.trace import Tracer
from tests.serve.test_draining import drain
from tests.support.server import Running, request_bytes, until

Starter = Callable[..., Running]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "def main(", "max_output_tokens": 600, "ignore_eos": True, "temperature": 0},
    MESSAGES: {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 600, "ignore_eos": True, "temperature": 0},
}
LENGTHS = {RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
LAST = {RESPONSES: b"event: response.incomplete", MESSAGES: b"event: message_stop"}


def begun(server: Running, path: str, mark: bytes, **changes: Any) -> tuple[Any, bytes]:
    """A stream that has sent a mark, and what it has sent so far."""
    connection = server.raw(request_bytes(path, BODIES[path] | {"stream": True} | changes))
    return connection, read_until(connection, mark)


def read_until(connection: Any, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


def data_of(received: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {") and line.endswith(b"}")]


@pytest.mark.parametrize(("path", "first", "ping"), [
    (RESPONSES, b"event: response.created", b": keep-alive\n\n"),
    (MESSAGES, b"event: message_start", b'event: ping\ndata: {"type": "ping"}\n\n'),
])  # fmt: skip
def test_a_silent_stream_begins_and_gets_pings(
    server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, first: bytes, ping: bytes
) -> None:
    server = server_with(ping_interval=0.05)
    score = llm.engine.runner.score
    monkeypatch.setattr(llm.engine.runner, "score", lambda *args: time.sleep(0.2) or score(*args))
    _, received = begun(server, path, LAST[path], **{LENGTHS[path]: 2})
    assert received.index(first) < received.index(ping) < received.index(b"delta")
    assert received.count(first) == 1


def test_a_failed_round_is_an_error_or_the_last_event(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(llm.engine.runner, "score", broken)
    for path, body in BODIES.items():
        answer = server.post(path, **body)
        assert answer.status_code == 500
        assert "secret" not in answer.text
    failed = server.events(RESPONSES, **BODIES[RESPONSES])
    assert [event["type"] for event in failed] == ["response.created", "response.in_progress", "response.failed"]
    assert failed[-1]["response"]["status"] == "failed"
    assert failed[-1]["response"]["error"]["code"] == "server_error"
    assert server.http.get(f"{RESPONSES}/{failed[-1]['response']['id']}").status_code == 404, "it is not stored"
    failed = server.events(MESSAGES, **BODIES[MESSAGES])
    assert [event["type"] for event in failed] == ["message_start", "error"]
    assert failed[-1]["error"]["type"] == "api_error"
    monkeypatch.undo()
    until(server.is_idle)
    for path, body in BODIES.items():
        assert server.post(path, **body | {LENGTHS[path]: 2}).status_code == 200


def test_a_stopping_server_ends_streams_with_a_failure(server_with: Starter) -> None:
    server = server_with(drain_timeout=0.14)
    streams = {path: begun(server, path, b"delta", **{LENGTHS[path]: 1500}) for path in BODIES}
    drain(server)
    last = {path: data_of(stream[1] + read_until(stream[0], b"0\r\n\r\n"))[-1] for path, stream in streams.items()}
    assert last[RESPONSES]["type"] == "response.failed"
    assert last[RESPONSES]["response"]["output"][0]["status"] == "incomplete"
    assert last[MESSAGES]["error"]["type"] == "overloaded_error"


def test_the_access_log_and_spans_cover_the_routes(server_with: Starter, caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = server_with(access_log=True)
    server.app.state.tracer = Tracer(provider)
    for path, body in BODIES.items():
        with caplog.at_level(logging.INFO, "outrider.access"):
            answer = server.post(path, **body | {LENGTHS[path]: 3}).json()
            until(lambda path=path: any(f"POST {path}" in one.getMessage() for one in caplog.records))  # type: ignore[misc]
        (line,) = (one for one in caplog.records if f"POST {path}" in one.getMessage())
        assert line.fields["completion_tokens"] == 3  # type: ignore[attr-defined]
        attributes = exporter.get_finished_spans()[-1].attributes
        assert attributes is not None
        assert attributes["gen_ai.response.id"] == answer["id"]
        assert attributes["gen_ai.operation.name"] == "chat"
    provider.shutdown()


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_ends_its_request(server: Running, path: str) -> None:
    count = server.app.state.responses.count
    connection, _ = begun(server, path, b"delta", **{LENGTHS[path]: 1500})
    connection.close()
    until(server.is_idle)
    assert server.app.state.responses.count == count, "only complete answers are stored"
