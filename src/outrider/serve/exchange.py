"""The outermost middleware: HTTP rules, request id, security headers, request counts and access log of every answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from time import perf_counter
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.connection import CYCLE
from outrider.serve.logs import adopt, request_id
from outrider.serve.settings import ServerSettings

__all__ = ["SAFE_HEADERS", "TOKENS", "Exchange"]

TOKENS = "outrider.tokens"  # key in a request's scope: prompt and completion tokens, set when all sequences have ended
_CLIENT_GONE = 499  # the client left before it was answered
_PATIENCE_S = 1.0  # to discard a small unread body: a client that is still sending may miss the answer
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)
_log = logging.getLogger("outrider.access")


class AnswerCounts(Protocol):
    """What counts HTTP answers."""

    def answered(self, route: str, status: int) -> None: ...


class Exchange:
    """ASGI middleware around everything that can answer a request.

    HEAD is GET without a body. The body of a refused request is not read. An answer to HTTP/1.0 without a length is sent
    unchunked and ends with the connection. Every answer, also a refusal or a preflight, has the request id and security
    headers, is counted by route and status, and is logged with `--access-log`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: AnswerCounts, paths: Collection[str]) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = frozenset(paths)  # known paths without parameters, for requests that reach no route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_headers = dict(scope["headers"])
        request_id.set(secrets.token_hex(12))
        adopt(request_headers.get(b"x-request-id", b"").decode("latin-1"))
        body = _Body(request_headers, receive, self._settings.limits.body_bytes)
        cycle: Any = scope.get(CYCLE)
        is_head, is_endless = scope["method"] == "HEAD", False
        started_s, status, size = perf_counter(), _CLIENT_GONE, 0

        async def answer(message: Message) -> None:
            nonlocal status, size, is_endless
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.get().encode()), *SAFE_HEADERS]
                if (b"connection", b"close") not in headers and not await body.discarded():
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
                is_endless = cycle is not None and all(name.lower() != b"content-length" for name, _ in headers)
                if is_endless:
                    cycle.chunked_encoding = False
            else:
                size += len(message.get("body", b""))
                if is_head:
                    message["body"] = b""
                if is_endless:
                    cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts the sent bytes against this
            await send(message)

        if is_head:
            scope = dict(scope, method="GET")
        try:
            await self._app(scope, body.receive, answer)
        finally:
            self._metrics.answered(self._route(scope), status)
            if self._settings.access_log:
                _note(scope, status, size, perf_counter() - started_s)

    def _route(self, scope: Scope) -> str:
        """The path template of the route. Unknown paths are counted together as `other`."""
        path = getattr(scope.get("route"), "path", None) or scope["path"]
        return path if path in self._paths else "other"


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


def _note(scope: Scope, status: int, size: int, seconds: float) -> None:
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round(1000 * seconds, 3),
        "bytes": size,
        "address": (scope.get("client") or ("-",))[0],
        "client": scope.get("outrider.client") or "-",
    }
    line = '%(address)s %(client)s "%(method)s %(path)s" %(status)d, %(duration_ms).1f ms, %(bytes)d bytes'
    if (tokens := scope.get(TOKENS)) is not None:
        fields |= {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        line += ", %(prompt_tokens)d prompt and %(completion_tokens)d completion tokens"
    _log.info(line, fields, extra={"fields": fields})
