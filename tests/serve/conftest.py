"""A real server with the bundled model on a free port. Only one runs at a time."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from outrider import LLM
from outrider.serve.address import listen
from outrider.serve.app import create_app
from outrider.serve.health import stacks
from outrider.serve.server import Server
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings
from outrider.serve.trace import Tracer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page
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


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(speculation="eagle:4", max_num_seqs=4, max_batch_rows=128)


@pytest.fixture(scope="session")
def _current(llm: LLM) -> Iterator[dict[ServerSettings, Running]]:
    current: dict[ServerSettings, Running] = {}
    yield current
    for running in current.values():
        running.close()


@pytest.fixture
def server_with(llm: LLM, _current: dict[ServerSettings, Running]) -> Iterator[Callable[..., Running]]:
    """Starts servers with given settings. They share one engine, so the previous server is stopped."""

    def start(**changes: Any) -> Running:
        settings = ServerSettings(**changes)
        if settings not in _current:
            for other in list(_current):
                _current.pop(other).close()
            _current[settings] = Running(settings, lambda: llm).wait()
        return _current[settings]

    yield start
    for running in _current.values():
        for connection in running.connections:
            connection.close()
        running.connections.clear()


@pytest.fixture
def server(server_with: Callable[..., Running]) -> Running:
    return server_with()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'outrider[dev]'")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        launched = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a server. The page must send no request elsewhere and raise no error."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def show(server: Running, script: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 1000}, "reduced_motion": "reduce"} | options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith((server.url, "data:")) or faults.append(request.url))
        page.goto(server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def keep(pytestconfig: pytest.Config) -> Callable[[Page, str], None]:
    """Saves a screenshot of the full page."""
    folder = Path(os.environ.get("OUTRIDER_SCREENSHOTS") or pytestconfig.rootpath / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True) and None


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


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stderr is not None
        process.popen.stderr.close()
