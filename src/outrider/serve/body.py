"""Request bodies: read within limits of size and time, then parsed and checked.

Small bodies are checked on the event loop. Checking holds the interpreter lock, in a thread too, so large bodies are
checked in another process, and other requests do not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from outrider.process import ProcessDied, PythonProcess
from outrider.serve.errors import ApiError
from outrider.serve.fairness import Completions, FairPool, Places, client_of
from outrider.serve.schemas import GenerationRequest
from outrider.serve.settings import Limits
from outrider.serve.validation import Refusal, check, restore

__all__ = ["BodyChecker", "StrictRoute"]

_log = logging.getLogger("outrider.serve")
_LOGGED_FIELDS, _LOGGED_CHARS = 256, 64  # unknown fields that are logged, and letters of each


class BodyChecker:
    """Turns bodies into requests. One process checks the large ones, and clients take turns with it."""

    def __init__(self, limits: Limits) -> None:
        self.room = Places(limits.bodies_bytes)  # bytes of request bodies in memory
        self._limits = limits
        self._process = PythonProcess("outrider.serve.validation:check_in_worker")
        self._pool = FairPool("outrider-body", threads=1, reserved=0)  # its thread waits for the process
        self._waiting = Places(limits.large_bodies)
        self._checked = Completions()
        self._logged: set[str] = set()  # unknown fields

    async def request_from(self, path: str, body: bytes, client: str = "") -> Any:
        """The checked request to a route. Raises ApiError if the body is invalid."""
        if len(body) <= self._limits.small_body_bytes:
            result = check(path, body, self._limits.json_depth)
        else:
            result = await self._check_in_worker(path, body, client)
        if isinstance(result, Refusal):
            raise ApiError(400, result.message, result.param)
        if isinstance(result, GenerationRequest) and result.ignored:
            self._log_ignored(result.ignored)
        return result

    def _log_ignored(self, fields: tuple[str, ...]) -> None:
        """Log each unknown field once."""
        for name in (field[:_LOGGED_CHARS] for field in fields):
            if name not in self._logged and len(self._logged) < _LOGGED_FIELDS:
                self._logged.add(name)
                _log.warning("the field %r of a request is unknown and was ignored (logged once)", name)

    async def _check_in_worker(self, path: str, body: bytes, client: str) -> Any:
        if not self._waiting.take(client):
            raise self.refusal(f"{self._waiting.total} large bodies wait to be read")
        try:
            return await self._pool.run(partial(self._in_process, path, body), client, len(body))
        except ProcessDied:
            raise ApiError(503, "the process that reads large bodies ended; try again, or send less") from None
        finally:
            self._waiting.release(client)
            self._checked.add()

    def refusal(self, reason: str) -> ApiError:
        """The 429 error for a body that cannot be held in memory now, with the estimated wait as Retry-After."""
        seconds = self._checked.retry_after(max(self._waiting.total, 1))
        headers = {"Retry-After": str(seconds)} | _CLOSE
        return ApiError(429, f"{reason}; try again later", code="queue_full", headers=headers)

    def _in_process(self, path: str, body: bytes) -> Any:
        return restore(path, *self._process(path, body, self._limits.json_depth))

    def close(self) -> None:
        self._pool.close()
        self._process.close()


class StrictRequest(Request):
    """A request with limits on the size and time of its body. Its `json` is the checked request."""

    route_path = ""
    _held = 0  # bytes counted in `BodyChecker.room`

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limits: Limits = self.app.state.service.settings.limits
            if int(self.headers.get("content-length") or 0) > limits.body_bytes:
                raise _too_large(limits)
            try:
                async with asyncio.timeout(limits.body_s):
                    self._body = await self._read(limits)
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {limits.body_s:g} seconds", headers=_CLOSE) from None
            if not self._body:
                raise ApiError(400, "the body is empty; send a JSON object")
        return self._body

    async def _read(self, limits: Limits) -> bytes:
        chunks, client = [], client_of(self.scope)
        checker: BodyChecker = self.app.state.checker
        async for chunk in self.stream():
            if self._held + len(chunk) > limits.body_bytes:
                raise _too_large(limits)
            if not checker.room.take(client, len(chunk)):
                raise checker.refusal(f"requests under way hold {checker.room.total} bytes of bodies")
            self._held += len(chunk)
            chunks.append(chunk)
        return b"".join(chunks)

    def release(self) -> None:
        """Release the body's bytes after its request has been handled."""
        self.app.state.checker.room.release(client_of(self.scope), self._held)
        self._held = 0

    async def json(self) -> Any:
        """The checked request. FastAPI validates it again, which takes no time for an instance of the schema."""
        checker: BodyChecker = self.app.state.checker
        return await checker.request_from(self.route_path, await self.body(), client_of(self.scope))


class StrictRoute(APIRoute):
    """Routes that read their bodies as a `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "send the body as application/json")
                if request.headers.get("content-encoding", "identity") != "identity":
                    raise ApiError(415, "send the body uncompressed")
            checked = StrictRequest(request.scope, request.receive)
            checked.route_path = self.path
            try:
                return await handler(checked)
            finally:
                checked.release()

        return strict


_CLOSE = {"Connection": "close"}


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large", headers=_CLOSE)
