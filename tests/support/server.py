"""A real server in a thread or in a process, the bytes of a request, and what of an answer is promised."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from outrider import LLM
from outrider.serve.address import listen
from outrider.serve.app import create_app
from outrider.serve.health import stacks
from outrider.serve.server import Server
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings
from outrider.serve.trace import Tracer

MAIN = [sys.executable, "-c", "from outrider.cli import main; main()", "serve"]


class Running:
    """A server in a thread."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM], tracer: Tracer | None = None) -> None:
        self.app = create_app(settings, load, tracer)
        self.service: Service = self.app.state.service
        self._socket = listen(settings.host, 0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.app, settings)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self._socket])))
        self._thread.start()
        self.connections: list[socket.socket] = []
        headers = {"Authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {}
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
        """A new connection on which `data` was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.connections.append(connection)
        connection.sendall(data)
        return connection

    def is_idle(self) -> bool:
        """Whether no request is admitted or running, and every page is free."""
        engine = self.service.thread.engine  # type: ignore[union-attr]
        return self.service.in_flight == 0 and not engine.has_work and engine.pages.used == 0 and not self.service._handles

    def close(self) -> None:
        for client in (self.http, *self.connections):
            client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), f"the server did not end:\n{stacks()}\n{self._tasks()}"

    def _tasks(self) -> str:
        """The tasks of the server's event loop."""
        return "" if self.service._loop is None else "\n".join(map(repr, asyncio.all_tasks(self.service._loop)))


class Process:
    """`outrider serve` as users start it."""

    def __init__(self, *arguments: str, main: str = MAIN[2], **environment: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.popen = subprocess.Popen(
            [sys.executable, "-c", main, "serve", "--port", "0", *arguments], stderr=subprocess.PIPE, text=True, env=env
        )
        self.stderr = ""
        self.url = ""

    def hear(self, mark: str) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.stderr += line
            self.url = self.url or (re.findall(r"http://[\d.:]+", line) or [""])[0]
            if mark in line:
                return
        raise AssertionError(self.stderr)

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code of a process that should end. It is killed after a timeout."""
        assert self.popen.stderr is not None
        timer = threading.Timer(60, self.popen.kill)
        timer.start()
        self.stderr += self.popen.stderr.read()
        timer.cancel()
        return self.popen.wait(60)


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds, and fail if it does not in time."""
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


def promised(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Token details without what was drafted: this is the same in every run of a request, and drafts may differ."""
    of_drafts = ("source", "accepted", "position", "drafter", "rejected")
    return [{name: value for name, value in detail.items() if name not in of_drafts} for detail in details]
