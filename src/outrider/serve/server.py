"""Running the app: the socket first, then the server, signals that drain it, and an exit code that says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from outrider.errors import OutriderError
from outrider.serve.connection import protocol
from outrider.serve.service import Service
from outrider.serve.settings import Settings

__all__ = ["Server", "serve"]

_log = logging.getLogger("outrider.serve")


class Server(uvicorn.Server):
    """uvicorn, with signals of our own: the first drains, the second ends it now. It then exits 0."""

    def __init__(self, app: FastAPI, settings: Settings, access_log: bool = False) -> None:
        self.service: Service = app.state.service
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            http=protocol(settings.limits),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Drain and end; asked again, end at once."""
        if self._draining is None:
            _log.warning("stopping: what runs may finish within %g s", self.service.settings.drain_s)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self.service.drain()
        self.should_exit = True


def serve(app: FastAPI, settings: Settings, own: socket.socket, access_log: bool = False) -> None:
    """Serve until told to stop. Exits 0 after a drain, 1 where the model could not be loaded."""
    server = Server(app, settings, access_log)
    service = server.service

    async def run() -> None:
        watch = asyncio.ensure_future(_stop_on_failure(server))
        await server.serve(sockets=[own])
        watch.cancel()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    if service.failure is not None:
        if isinstance(service.failure, OutriderError):
            raise service.failure
        raise OutriderError(f"the model could not be loaded: {type(service.failure).__name__}: {service.failure}")
    if service.thread is None:  # loading goes on in a thread that cannot be stopped
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _stop_on_failure(server: Server) -> None:
    while server.service.failure is None:
        await asyncio.sleep(0.1)
    server.should_exit = True
