"""A real server with the bundled model, on a port of its own; one at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from outrider import LLM
from outrider.serve.address import listen
from outrider.serve.app import create_app
from outrider.serve.server import Server
from outrider.serve.service import Service
from outrider.serve.settings import Settings
from outrider.serve.trace import Tracer


class Running:
    """A server in a thread."""

    def __init__(self, settings: Settings, load: Callable[[], LLM], tracer: Tracer | None = None) -> None:
        self.app = create_app(settings, load, tracer)
        self.service: Service = self.app.state.service
        self._socket = listen(settings.host, 0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.app, settings)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self._socket])))
        self._thread.start()
        self.connections: list[socket.socket] = []
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)
        until(lambda: self.server.started)

    def wait(self) -> Running:
        until(lambda: self.service.status == "ok")
        return self

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of every event of a stream."""
        out = []
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    out.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        return out

    def raw(self, data: bytes = b"") -> socket.socket:
        """A connection of one's own."""
        own = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.connections.append(own)
        own.sendall(data)
        return own

    def is_idle(self) -> bool:
        """Nothing is admitted, nothing runs, and every page is back."""
        engine = self.service.thread.engine  # type: ignore[union-attr]
        return self.service.in_flight == 0 and not engine.has_work and engine.pages.used == 0 and not self.service._tickets

    def close(self) -> None:
        for own in (self.http, *self.connections):
            own.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something to come true, and fail where it does not."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def request_bytes(path: str, body: Any, *headers: str) -> bytes:
    """A POST as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(speculation="eagle:4", max_num_seqs=4, max_batch_rows=128)


@pytest.fixture(scope="session")
def _current(llm: LLM) -> Iterator[dict[Settings, Running]]:
    current: dict[Settings, Running] = {}
    yield current
    for running in current.values():
        running.close()


@pytest.fixture
def server_with(llm: LLM, _current: dict[Settings, Running]) -> Iterator[Callable[..., Running]]:
    """A server with some settings. They share one engine, so the one before is stopped."""

    def start(**changes: Any) -> Running:
        settings = Settings(**changes)
        if settings not in _current:
            for own in list(_current):
                _current.pop(own).close()
            _current[settings] = Running(settings, lambda: llm).wait()
        return _current[settings]

    yield start
    for running in _current.values():
        for own in running.connections:
            own.close()
        running.connections.clear()


@pytest.fixture
def server(server_with: Callable[..., Running]) -> Running:
    return server_with()
