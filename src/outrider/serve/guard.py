"""The door of the server: who is asking, by which name and origin, with how many headers. Deny by default."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from outrider.serve.errors import ApiError, body_of
from outrider.serve.settings import Settings, is_loopback

__all__ = ["OPEN_PATHS", "Guard"]

_log = logging.getLogger("outrider.serve")
OPEN_PATHS = ("/health",)
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_NAME = re.compile(rb"[\w.\-]{1,128}")


class Guard:
    """ASGI middleware before every route, known or not."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())
        own = {settings.host, *settings.allowed_hosts}
        # where only this machine can ask, names of elsewhere mean a page that was made to point here
        self._hosts = own | {"localhost", "127.0.0.1", "::1"} if is_loopback(settings.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        name = name if _NAME.fullmatch(name) else secrets.token_hex(12).encode()

        begun = False

        async def named(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name), *_SAFE]
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(refusal, named)
            return
        try:
            await self._app(scope, receive, named)
        except Exception:
            _log.exception("request %s failed", name.decode())
            if not begun:
                await _answer(ApiError(500, "something failed inside the server; its log says what"), named)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        limits = self._settings.limits
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > limits.headers or size > limits.header_bytes:
            return ApiError(431, f"more than {limits.headers} headers or {limits.header_bytes} bytes of them")
        if scope["path"] in OPEN_PATHS:
            return None
        if not self._knows(headers.get(b"authorization", b"")):
            # a browser that opens the page asks its user for the key; programs send it as a bearer token
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
        if origin and urlsplit(origin).netloc.lower() != host.lower():
            return ApiError(403, "requests from other sites are not answered", code="foreign_origin")
        return None

    def _knows(self, given: bytes) -> bool:
        """Whether the key is right; takes as long whatever is wrong with it."""
        if self._key is None:
            return True
        scheme, _, value = given.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        return hmac.compare_digest(_digest(value.strip()), self._key)


_SAFE = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
