"""Health checks: a forward before the server is ready, and a watchdog over the engine's rounds."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from outrider import LLM
from outrider.errors import EngineDead, ModelError
from outrider.model.bundled import bundled_model
from outrider.serve.settings import ServerSettings
from tests.support.server import Running, request_bytes, until

Starter = Callable[..., Running]
PATHS = ("/livez", "/readyz", "/health")
SHORT = {"prompt": "x = ", "max_tokens": 2}


def health_of(server: Running) -> dict[str, tuple[int, str]]:
    answers = {path: server.http.get(path) for path in PATHS}
    return {path: (answer.status_code, answer.json()["status"]) for path, answer in answers.items()}


def test_a_ready_server_is_ok_on_every_health_route(server: Running) -> None:
    assert health_of(server) == dict.fromkeys(PATHS, (200, "ok"))


def test_loading_and_draining_servers_are_alive_but_not_ready() -> None:
    held = threading.Event()

    def load() -> LLM:
        held.wait(60)
        raise ModelError("never")

    server = Running(ServerSettings(), load)
    try:
        assert health_of(server) == {"/livez": (200, "loading"), "/readyz": (503, "loading"), "/health": (503, "loading")}
        server.service.draining = True
        assert health_of(server) == {"/livez": (200, "draining"), "/readyz": (503, "draining"), "/health": (503, "draining")}
    finally:
        held.set()
        server.close()


def test_a_client_that_reads_nothing_does_not_delay_the_end() -> None:
    """The second request on its connection waits for its body when the server stops, behind an answer that fills all buffers."""
    held = threading.Event()
    server = Running(ServerSettings(), lambda: LLM(held.wait(60) and "/nowhere"))
    state = server.server.server_state
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    server.connections.append(connection)
    server.http.close()
    until(lambda: len(state.connections) == 1)
    (protocol,) = state.connections

    def is_answered(before: int) -> bool:
        return state.total_requests > before and (protocol.cycle.response_complete or protocol.flow.write_paused)

    while not protocol.flow.write_paused:
        before = state.total_requests
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(partial(is_answered, before))
    connection.sendall(request_bytes("/v1/completions", SHORT)[:-1])
    until(lambda: not protocol.cycle.response_complete and bool(state.tasks))
    server.connections.clear()  # it stays open
    held.set()
    server.close()
    connection.close()


def test_nan_weights_fail_the_load_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_model() / "draft", folder)
    file = next(iter(folder.glob("*.safetensors")))
    tensors = load_file(file)
    name = next(one for one in sorted(tensors) if "layernorm" in one)
    tensors[name][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    announced: list[LLM] = []
    server = Running(ServerSettings(), lambda: LLM(folder, speculation="none"))
    server.service._announce = announced.append
    try:
        until(lambda: server.service.failure is not None or bool(announced))
        assert isinstance(server.service.failure, ModelError)
        assert "not finite" in str(server.service.failure)
        assert name in str(server.service.failure)
        assert health_of(server) == dict.fromkeys(PATHS, (503, "dead"))
    finally:
        server.close()


def test_the_test_token_is_not_counted(server_with: Starter) -> None:
    server = server_with(drain_timeout=0.31)
    stats = server.http.get("/stats").json()
    assert (stats["generated_tokens"], stats["running"]) == (0, 0)
    assert server.is_idle()


def test_a_stuck_engine_fails_its_requests_and_logs_all_stacks(
    server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_with(watchdog_timeout=0.3)
    held, score = threading.Event(), llm.engine.runner.score

    def stuck_forward(*arguments: Any) -> Any:
        held.wait(60)
        return score(*arguments)

    monkeypatch.setattr(llm.engine.runner, "score", stuck_forward)
    responses: list[httpx.Response] = []
    asker = threading.Thread(target=lambda: responses.append(server.post("/v1/completions", **SHORT)))
    asker.start()
    try:
        until(lambda: server.service.failure is not None)
        asker.join(30)
        assert responses[0].status_code == 503
        assert isinstance(server.service.failure, EngineDead)
        assert health_of(server) == dict.fromkeys(PATHS, (503, "dead"))
        assert "stuck_forward" in caplog.text, "where it hangs"
        assert server.service.in_flight == 0
    finally:
        held.set()
        monkeypatch.undo()
        until(lambda: not llm.engine.has_work)


def test_every_round_resets_the_watchdog(server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, score = server.service.thread, llm.engine.runner.score
    assert thread is not None
    entries: list[tuple[float, float]] = []  # start of a forward, and the engine's stalled_s at that time

    def slow(*arguments: Any) -> Any:
        entries.append((monotonic(), thread.stalled_s))
        sleep(0.05)
        return score(*arguments)

    monkeypatch.setattr(llm.engine.runner, "score", slow)
    assert server.post("/v1/completions", prompt="x = ", max_tokens=8, ignore_eos=True, speculation=False).status_code == 200
    assert len(entries) == 8
    for (before, _), (now, stalled) in pairwise(entries):
        assert 0 < stalled < now - before, "the round before has ended"
    until(lambda: thread.stalled_s == 0.0)  # idle


def test_an_engine_that_fails_every_request_ends_the_server(
    server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_with(drain_timeout=0.32)

    def broken(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.engine.runner, "score", broken)
    for _ in range(3):
        assert server.post("/v1/completions", **SHORT).status_code == 500
    until(lambda: server.service.failure is not None)
    assert "device lost" in str(server.service.failure)
    assert server.http.get("/livez").status_code == 503


def test_single_failed_requests_do_not_end_the_server(server_with: Starter, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_with(drain_timeout=0.33)
    score = llm.engine.runner.score
    checks: list[int] = []

    def broken(batch: Any, *more: Any) -> Any:
        if any(seq.request.prompt_ids[0] == 77 for seq in batch.sequences):
            raise RuntimeError("only these")
        checks.extend(seq.request.prompt_ids[0] for seq in batch.sequences)
        return score(batch, *more)

    monkeypatch.setattr(llm.engine.runner, "score", broken)
    for _ in range(4):
        assert server.post("/v1/completions", prompt=[77, 5], max_tokens=2).status_code == 500
    until(lambda: 0 in checks)  # the watchdog has requested a test token
    assert server.post("/v1/completions", **SHORT).status_code == 200
    assert health_of(server) == dict.fromkeys(PATHS, (200, "ok"))
