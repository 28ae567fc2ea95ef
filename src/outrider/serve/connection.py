"""The HTTP connection: limits on headers, and errors in the API's format.

uvicorn alone waits for headers without a limit, and refuses invalid HTTP in plain text.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.serve.errors import ApiError, body_of
from outrider.serve.settings import Limits

__all__ = ["ABORT", "CYCLE", "protocol"]

ABORT = "outrider.abort"  # key in a request's scope: a function that closes the connection without writing what is pending
CYCLE = "outrider.cycle"  # key in the scope of an HTTP/1.0 request: uvicorn's request state


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """A connection class that enforces these limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(HttpToolsProtocol):
    """A connection that enforces the limits of its class."""

    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    _head = 0  # bytes of headers received, while they are incomplete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:  # headers are incomplete
            self._head += len(data)
            if self._head > self.limits.header_bytes and not self.transport.is_closing():
                self._refuse(431, f"the headers are larger than {self.limits.header_bytes} bytes")

    def on_message_begin(self) -> None:
        self._wait()
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._stop()
        self._head = 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.scope[CYCLE] = self.cycle  # type: ignore[literal-required]

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _wait(self) -> None:
        self._timer = self._timer or self.loop.call_later(self.limits.header_s, self._late)

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # the previous request is still being answered
        elif not self.transport.is_closing():
            self._refuse(408, f"the headers did not arrive within {self.limits.header_s:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        self._stop()
        self.transport.write(_refusal(status, message))
        self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(status: int, message: str) -> bytes:
    body = json.dumps(body_of(ApiError(status, message)))
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {secrets.token_hex(12)}",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", body]).encode()
