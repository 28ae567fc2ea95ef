"""Running the app: the server, its signals (drain, reload, inspect) and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from outrider.errors import OutriderError
from outrider.serve.address import has_terminal
from outrider.serve.connection import protocol
from outrider.serve.guard import Keys
from outrider.serve.settings import ServerSettings

__all__ = ["Reread", "Server", "run_server", "serve"]

_log = logging.getLogger("outrider.serve")
_SAME_S = 0.5  # signals this close count as one: timeout(1) signals its child and then the process group
Reread = Callable[[], ServerSettings]


class Served(Protocol):
    """What a server drains, and whose failure ends it."""

    settings: ServerSettings
    failure: BaseException | None

    async def drain(self) -> None: ...
    def stop_draining(self) -> None: ...
    def read_rules(self, settings: ServerSettings) -> Any: ...
    def configure(self, settings: ServerSettings, rules: Any) -> None: ...


class Server(uvicorn.Server):
    """uvicorn with different signal handlers.

    The first SIGTERM or SIGINT drains the server, a second one aborts running requests, and a third one ends it at once.
    The exit code is then 0. SIGHUP reloads keys, rules and limits, or drains if the terminal of the server was closed.
    """

    def __init__(self, app: Any, settings: ServerSettings, reread: Reread | None = None) -> None:
        self.service: Served = app.state.service
        self._keys: Keys = app.state.keys
        self._reread = reread
        self._draining: asyncio.Task[None] | None = None
        self._aborted = False  # a second signal has aborted running requests
        self._stopped_s = 0.0  # time of the last signal
        config = uvicorn.Config(
            app,
            http=protocol(settings.limits),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # `Exchange` logs the request id, client and tokens
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            forwarded_allow_ips=None if settings.uds is None else "*",  # the front door says whose request it is
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            leaves = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()  # nohup ignores SIGHUP
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            loop.add_signal_handler(signal.SIGHUP, self._hang_up, leaves)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # a client that does not read would delay the end without limit
            connection.transport.abort()

    def stop(self) -> None:
        """Drain and end. A second call aborts running requests, and a third one ends the server at once."""
        if self._draining is None:
            _log.warning("stopping: what runs may finish within %g s", self.service.settings.drain_timeout)
            self._draining, self._stopped_s = asyncio.ensure_future(self._drain()), time.monotonic()
        elif time.monotonic() - self._stopped_s < _SAME_S:
            return
        elif not self._aborted:
            self._aborted, self._stopped_s = True, time.monotonic()
            self.service.stop_draining()
        else:
            self.should_exit = self.force_exit = True

    def reload(self) -> None:
        """Reload the key file, the rules, and the limits in the file of --config. If one is invalid, nothing changes."""
        try:
            settings = self.service.settings if self._reread is None else self._reread()
            rules = self.service.read_rules(settings)
            self._keys.reload()
        except OutriderError as error:
            _log.error("nothing was reloaded: %s", error)
            return
        self.service.configure(settings, rules)
        _log.warning("reloaded; keys of: %s", ", ".join(self._keys.names) or "nobody, none is needed")

    def _hang_up(self, leaves: bool) -> None:
        if leaves and not has_terminal():
            self.stop()
        else:
            self.reload()

    async def _drain(self) -> None:
        await self.service.drain()
        self.should_exit = True


def serve(app: FastAPI, settings: ServerSettings, listener: socket.socket, reread: Reread | None = None) -> None:
    """Serve until a signal. Returns after a drain. Raises if the model cannot be loaded or the engine has died."""
    run_server(Server(app, settings, reread), listener)
    if app.state.service.thread is None:  # the model is still loading, in a thread that cannot be stopped
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_server(server: Server, listener: socket.socket) -> None:
    """Run a server on a socket until it ends."""

    async def run() -> None:
        failure_watcher = asyncio.ensure_future(_stop_on_failure(server))
        await server.serve(sockets=[listener])
        failure_watcher.cancel()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    if server.service.failure is not None:
        raise _as_error(server.service.failure)


async def _stop_on_failure(server: Server) -> None:
    while server.service.failure is None:
        await asyncio.sleep(0.1)
    server.should_exit = True


def _as_error(failure: BaseException) -> OutriderError:
    if isinstance(failure, OutriderError):
        return failure
    return OutriderError(f"the model could not be loaded: {type(failure).__name__}: {failure}")
