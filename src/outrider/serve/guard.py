"""Access control: API keys, host names, origins and limits on headers. Deny by default."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from outrider.serve.context import adopt, client, request_id
from outrider.serve.errors import ApiError, body_of
from outrider.serve.keys import Keys
from outrider.serve.settings import Settings, is_loopback

__all__ = ["OPEN_PATHS", "Guard", "Named"]

_log = logging.getLogger("outrider.serve")
OPEN_PATHS = ("/health", "/livez", "/readyz")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Named:
    """ASGI middleware that adds the request id and security headers to every answer, including refusals and preflights."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id.set(secrets.token_hex(12))
        adopt(dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1"))

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.get().encode()), *_SAFE]
            await send(message)

        await self._app(scope, receive, named)


class Guard:
    """ASGI middleware that checks every request before it is routed."""

    def __init__(self, app: App, settings: Settings, keys: Keys) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        names = {settings.host, *settings.allowed_hosts}
        # on loopback, an unknown host name means DNS rebinding: a foreign page whose name resolves to this machine
        self._hosts = names | {"localhost", "127.0.0.1", "::1"} if is_loopback(settings.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope, dict(scope["headers"]))
        if refusal is not None:
            await _answer(refusal, send)
            return
        started = False

        async def forward(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, forward)
        except asyncio.CancelledError:  # the server is shutting down
            if not started:
                await _answer(ApiError(503, "the server has stopped", code="stopped"), send)
        except Exception:
            _log.exception("the request failed")
            if not started:
                await _answer(ApiError(500, "something failed inside the server; its log says what"), send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        limits = self._settings.limits
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > limits.headers or size > limits.header_bytes:
            return ApiError(431, f"more than {limits.headers} headers or {limits.header_bytes} bytes of them")
        name = self._client_of(headers.get(b"authorization", b""))
        scope["outrider.client"] = name or ""
        client.set(name or "")
        if scope["path"] in OPEN_PATHS:
            return None
        if name is None:
            # a browser that opens the page asks its user for the key, and programs send it as a bearer token
            scheme = "Bearer" if scope["path"].startswith("/v1") else 'Basic realm="outrider", charset="UTF-8"'
            return ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _hostname(host) not in self._hosts:
            return ApiError(403, "this server is not known by that name; --allowed-host adds one", code="unknown_host")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._allows_origin(origin, host):
            return ApiError(403, "requests from other sites are not answered; --allow-origin adds one", code="foreign_origin")
        return None

    def _allows_origin(self, origin: str, host: str) -> bool:
        """Whether pages of this origin may send requests: the server's pages, and those of --allow-origin."""
        if {origin, "*"} & set(self._settings.allowed_origins):
            return True
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:  # the origin is not a valid URL
            return False

    def _client_of(self, header: bytes) -> str | None:
        """The client of this key: empty if no key is needed, None if it is wrong. The time does not depend on the key."""
        if not self._keys.needed:
            return ""
        scheme, _, value = header.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        return self._keys.client_of(value)


_SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(body_of(error)).encode()
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
