"""The HTTP connection: headers must come in time and in bounds; uvicorn itself waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.serve.settings import Limits

__all__ = ["ABORT", "protocol"]

ABORT = "outrider.abort"  # in a request's scope: ends its connection at once, whatever is still to be written

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """A connection class with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _head = 0  # bytes of a head that has not ended

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._timer is not None:  # a head is open
                self._head += len(data)
                if self._head > limits.header_bytes and not self.transport.is_closing():
                    self._refuse(_TOO_LARGE)

        def on_message_begin(self) -> None:
            self._wait()
            super().on_message_begin()
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

        def on_headers_complete(self) -> None:
            self._stop()
            self._head = 0
            super().on_headers_complete()

        def _wait(self) -> None:
            self._timer = self._timer or self.loop.call_later(limits.header_s, self._late)

        def _late(self) -> None:
            self._timer = None
            if self.cycle is not None and not self.cycle.response_complete:
                self._wait()  # the request before is still being answered
            elif not self.transport.is_closing():
                self._refuse(_TOO_SLOW)

        def _refuse(self, answer: bytes) -> None:
            self._stop()
            self.transport.write(answer)
            self.transport.close()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return BoundedProtocol
