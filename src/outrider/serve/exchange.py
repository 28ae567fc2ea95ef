"""HTTP rules for one exchange: HEAD is GET without a body, and the body of a refused request is not read."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.settings import Limits

__all__ = ["Exchange"]

_PATIENCE_S = 1.0  # to discard a small unread body: a client that is still sending may miss the answer


class Exchange:
    """ASGI middleware around everything that can answer a request."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(dict(scope["headers"]), receive, self._limits.body_bytes)
        is_head = scope["method"] == "HEAD"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if (b"connection", b"close") not in headers and not await body.discarded():
                    message["headers"] = [*headers, (b"connection", b"close")]
            elif is_head:
                message["body"] = b""
            await send(message)

        await self._app(dict(scope, method="GET") if is_head else scope, body.receive, answer)


class _Body:
    """How much of a request's body has been received."""

    def __init__(self, headers: dict[bytes, bytes], receive: Receive, limit: int) -> None:
        length = headers.get(b"content-length", b"0")
        self._receive = receive
        self._bytes_left = limit
        self._pending = length != b"0" or b"transfer-encoding" in headers
        self._refused = b"expect" in headers or not length.isdigit() or int(length) > limit

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes_left -= len(message.get("body", b""))
        self._pending = self._pending and bool(message.get("more_body"))
        return message

    async def discarded(self) -> bool:
        """Discard what is left of the body. Returns False if it did not end in time, so that the connection must close."""
        if self._pending and not self._refused:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    while self._pending and self._bytes_left >= 0:
                        await self.receive()
            except TimeoutError:
                pass
        return not self._pending
