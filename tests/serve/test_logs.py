"""The log: time, level and request id on every line, as text or JSON, and no way for clients to forge a line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import LLM
from outrider.serve.logs import JsonFormatter, TextFormatter, escaped, request_id
from outrider.serve.trace import Tracer
from tests.support.server import Running, until

Starter = Callable[..., Running]
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR)( \[[\w.\-]+\])? ")


def record(message: str, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("outrider.serve", logging.WARNING, __file__, 1, "%s", (message,), info)
    made.__dict__.update(extra)
    return made


@given(st.text(), st.text())
def test_a_message_cannot_forge_a_line_or_control_a_terminal(message: str, fault: str) -> None:
    text = TextFormatter().format(record(message, ValueError(fault)))
    first, *further = text.split("\n")
    assert LINE.match(first)
    assert all(line.startswith("    ") for line in further)
    assert all(line.isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", line) for line in (first, *further))
    line = JsonFormatter().format(record(message, ValueError(fault)))
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line)["message"] == message


def test_control_characters_are_escaped() -> None:
    assert escaped("a\nb\x1b[31m\u2028\x85\ud800é字") == r"a\nb\x1b[31m\u2028\x85\ud800é字"


def test_records_carry_time_level_and_request() -> None:
    token = request_id.set("abc-1")
    try:
        text, line = TextFormatter().format(record("hello")), json.loads(JsonFormatter().format(record("hello", fields={"a": 1})))
    finally:
        request_id.reset(token)
    assert re.fullmatch(LINE.pattern + "hello", text)
    assert " WARNING [abc-1] " in text
    assert {name: line[name] for name in ("level", "logger", "message", "request_id", "a")} == {
        "level": "WARNING", "logger": "outrider.serve", "message": "hello", "request_id": "abc-1", "a": 1,
    }  # fmt: skip
    assert line["time"].endswith("Z")
    assert "[other]" in TextFormatter().format(record("hello", request_id="other"))


def test_the_access_log_has_client_path_status_and_tokens(server_with: Starter, caplog: pytest.LogCaptureFixture) -> None:
    server = server_with(access_log=True, api_key=("k",))
    with caplog.at_level(logging.INFO, "outrider.access"):
        server.http.post("/v1/completions", json={"prompt": "x = ", "max_tokens": 3}, headers={"X-Request-Id": "mine"})
        server.http.get("/v1/models/%0a%1b[31mforged")
        server.http.get("/stats", headers={"Authorization": "Bearer wrong"})
        server.events("/v1/completions", prompt="x = ", max_tokens=3)
        until(lambda: sum(one.name == "outrider.access" for one in caplog.records) == 4)  # logged after the answer is sent
    records = [one for one in caplog.records if one.name == "outrider.access"]
    fields = [one.__dict__["fields"] for one in records]
    assert [(one["method"], one["path"], one["status"]) for one in fields] == [
        ("POST", "/v1/completions", 200), ("GET", "/v1/models/\n\x1b[31mforged", 404), ("GET", "/stats", 401),
        ("POST", "/v1/completions", 200),
    ]  # fmt: skip
    assert fields[0]["completion_tokens"] == fields[3]["completion_tokens"] == 3
    assert fields[0]["prompt_tokens"] > 0
    assert fields[0]["bytes"] > 100
    assert fields[0]["duration_ms"] > 0
    assert fields[0]["address"] == "127.0.0.1"
    assert fields[0]["client"].startswith("key-")
    assert fields[2]["client"] == "-"
    forged = TextFormatter().format(records[1])
    assert "\\n\\x1b[31mforged" in forged
    assert "\n" not in forged


def test_the_access_log_is_off_by_default(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        server.http.get("/version")
    assert not [one for one in caplog.records if one.name == "outrider.access"]


def test_the_request_id_is_in_answer_log_and_span(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = server_with(access_log=True, log_requests=True)
    server.app.state.tracer = Tracer(provider)
    lines: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda one: one.name in ("outrider.serve", "outrider.access"))  # without the engine's throughput lines
    monkeypatch.setattr(handler, "emit", lambda one: lines.append(TextFormatter().format(one)))
    log = logging.getLogger("outrider")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]
    body = {"prompt": "x = ", "max_tokens": 2}
    for sent, headers, name in (
        (body, {"X-Request-Id": "by-header"}, "by-header"),
        (body | {"request_id": "by-body"}, {"X-Request-Id": "other"}, "by-body"),
    ):
        lines.clear()
        answer = server.http.post("/v1/completions", json=sent, headers=headers)
        assert answer.headers["x-request-id"] == name
        assert answer.json()["id"] == f"cmpl-{sent.get('request_id', name)}"
        until(lambda: len(lines) == 2)  # the request body, and, after the answer, the access record
        assert all(f" [{name}] " in line and "\n" not in line for line in lines), lines
        attributes = exporter.get_finished_spans()[-1].attributes
        assert attributes is not None
        assert attributes["http.request.header.x-request-id"] == (name,)
    forged = server.http.post("/v1/completions", json=body | {"request_id": "two\nlines"}, headers={"X-Request-Id": "kept"})
    assert (forged.status_code, forged.headers["x-request-id"]) == (400, "kept")
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]
    provider.shutdown()


def test_failures_are_logged_with_their_request_id(
    server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    score = llm.engine.runner.score

    def broken(batch: object, *more: object) -> object:
        if any(seq.request.prompt_ids[0] == 77 for seq in batch.sequences):  # type: ignore[attr-defined]
            raise RuntimeError("inside")
        return score(batch, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.runner, "score", broken)
    server.http.post("/v1/completions", json={"prompt": [77, 5]}, headers={"X-Request-Id": "doomed"})
    (failed,) = [one for one in caplog.records if "a sequence failed" in one.getMessage()]
    assert "[doomed]" in TextFormatter().format(failed)
