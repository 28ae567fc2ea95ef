"""A real server with the bundled model on a free port. Only one runs at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider import LLM
from outrider.serve.settings import ServerSettings
from tests.support.server import Process, Running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(speculation="eagle:4:adaptive=false", max_num_seqs=4, max_batch_rows=128)


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


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stderr is not None
        process.popen.stderr.close()
