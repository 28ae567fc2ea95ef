"""Access log and request counts: every answer is counted by route and status, and logged with `--access-log`."""

from __future__ import annotations

import logging
from collections.abc import Collection
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.metrics import Metrics

__all__ = ["TOKENS", "Access"]

TOKENS = "outrider.tokens"  # key in a request's scope: prompt and completion tokens, set when all sequences have ended
_CLIENT_GONE = 499  # the client left before it was answered
_log = logging.getLogger("outrider.access")


class Access:
    """The outermost ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str], log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)  # known paths without parameters, for requests that reach no route
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, size = perf_counter(), _CLIENT_GONE, 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._metrics.answered(self._route(scope), status)
            if self._log:
                _note(scope, status, size, perf_counter() - started_s)

    def _route(self, scope: Scope) -> str:
        """The path template of the route. Unknown paths are counted together as `other`."""
        path = getattr(scope.get("route"), "path", None) or scope["path"]
        return path if path in self._paths else "other"


def _note(scope: Scope, status: int, size: int, seconds: float) -> None:
    address = (scope.get("client") or ("-",))[0]
    client, tokens = scope.get("outrider.client") or "-", scope.get(TOKENS)
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round(1000 * seconds, 3),
        "bytes": size,
        "address": address,
        "client": client,
    }
    if tokens is not None:
        fields |= {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    token_counts = "" if tokens is None else f", {tokens[0]} prompt and {tokens[1]} completion tokens"
    line = '%s %s "%s %s" %d, %.1f ms, %d bytes%s'
    _log.info(
        line,
        address,
        client,
        scope["method"],
        scope["path"],
        status,
        1000 * seconds,
        size,
        token_counts,
        extra={"fields": fields},
    )
