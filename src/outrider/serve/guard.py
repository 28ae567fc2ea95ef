"""Access control: API keys, host names, origins and limits on headers. Deny by default.

Keys come from flags, the environment and a file that can be reloaded. Only their digests are kept.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import InvalidParameter
from outrider.serve.errors import ApiError
from outrider.serve.settings import ServerSettings, is_loopback

__all__ = ["OPEN_PATHS", "AccessGuard", "Keys"]

_log = logging.getLogger("outrider.serve")
_NAMED = re.compile(r"([\w.@\-]{1,64}):(.+)")  # a line of a key file with a name: NAME:KEY
OPEN_PATHS = ("/health", "/livez", "/readyz")


class AccessGuard:
    """ASGI middleware that checks every request before it is routed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: Keys) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        names = {settings.host, *settings.allowed_host}
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
            await refusal.response(scope["path"])(scope, receive, send)
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
                error = ApiError(503, "the server has stopped", code="stopped")
                await error.response(scope["path"])(scope, receive, send)
        except Exception:
            _log.exception("the request failed")
            if not started:
                error = ApiError(500, "something failed inside the server; its log says what")
                await error.response(scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        limits = self._settings.limits
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > limits.headers or size > limits.header_bytes:
            return ApiError(431, f"more than {limits.headers} headers or {limits.header_bytes} bytes of them")
        name = self._client_of(headers)
        scope["outrider.client"] = name or ""
        if scope["path"] in OPEN_PATHS:
            return None
        if name is None:
            # a browser that opens the page asks its user for the key, and programs send it as a bearer token
            scheme = "Bearer" if scope["path"].startswith("/v1") else 'Basic realm="outrider", charset="UTF-8"'
            return ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
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
        if {origin, "*"} & set(self._settings.allow_origin):
            return True
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:  # the origin is not a valid URL
            return False

    def _client_of(self, headers: dict[bytes, bytes]) -> str | None:
        """The client of the key: empty if no key is needed, None if it is wrong. The time does not depend on the key.

        The key is in Authorization or, if there is no such header, in x-api-key, as Anthropic's clients send it.
        """
        if not self._keys.needed:
            return ""
        if b"authorization" not in headers:
            return self._keys.client_of(headers.get(b"x-api-key", b""))
        scheme, _, value = headers[b"authorization"].partition(b" ")
        if scheme.lower() == b"basic":
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        return self._keys.client_of(value)


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


class Keys:
    """The valid keys, each with the name of its client."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        self._flags = [_key("--api-key", key) for key in keys]
        self._file = file
        self._clients: dict[bytes, str] = {}  # by the digest of the key
        self.reload()

    @property
    def needed(self) -> bool:
        return bool(self._clients)

    @property
    def names(self) -> list[str]:
        """The names of the clients, without duplicates."""
        return list(dict.fromkeys(self._clients.values()))

    def reload(self) -> None:
        """Read the file again. If it is invalid, raise and keep the present keys."""
        clients: dict[bytes, str] = {}
        for digest, client in [*self._flags, *(() if self._file is None else _read_key_file(self._file))]:
            if clients.setdefault(digest, client) != client:
                raise InvalidParameter("--api-key-file", f"{clients[digest]} and {client} have the same key")
        self._clients = clients

    def client_of(self, key: bytes) -> str | None:
        """The client of a key, or None. Every key is compared, so that the time does not depend on the key."""
        digest, client = hashlib.sha256(key.strip()).digest(), None
        for known, name in self._clients.items():
            if hmac.compare_digest(digest, known):
                client = name
        return client


def _read_key_file(path: Path) -> list[tuple[bytes, str]]:
    """The keys of a file. A line is KEY or NAME:KEY, and lines that begin with # are comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter("--api-key-file", f"{path} cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            named = _NAMED.fullmatch(line)
            where = f"{path}, line {number}"
            keys.append(_key(where, line) if named is None else _key(where, named[2], named[1]))
    if not keys:
        raise InvalidParameter("--api-key-file", f"{path} holds no key; write one a line, as KEY or NAME:KEY")
    return keys


def _key(where: str, key: str, client: str | None = None) -> tuple[bytes, str]:
    """The digest of a checked key, and its client. White space around the key, such as the newline of a file, is removed."""
    key = key.strip()
    if not key:
        raise InvalidParameter(where, "must not be empty")
    if not key.isprintable():
        raise InvalidParameter(where, "the key holds a control character, which no header can carry")
    digest = hashlib.sha256(key.encode()).digest()
    return digest, client or f"key-{digest.hex()[:8]}"
