"""Request bodies: read within size and time, parsed as strict JSON, before any schema looks at them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from outrider.serve.errors import ApiError
from outrider.serve.settings import Limits

__all__ = ["StrictRoute", "parse"]


class StrictRequest(Request):
    """A request whose body is bounded in bytes and seconds and whose JSON is JSON."""

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
        return self._body

    async def _read(self, limits: Limits) -> bytes:
        chunks, size = [], 0
        async for chunk in self.stream():
            size += len(chunk)
            if size > limits.body_bytes:
                raise _too_large(limits)
            chunks.append(chunk)
        return b"".join(chunks)

    async def json(self) -> Any:
        return parse(await self.body(), self.app.state.service.settings.limits.json_depth)


class StrictRoute(APIRoute):
    """Routes that read their bodies so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "send the body as application/json")
                if request.headers.get("content-encoding", "identity") != "identity":
                    raise ApiError(415, "send the body uncompressed")
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


_CLOSE = {"Connection": "close"}


def parse(body: bytes, depth: int) -> Any:
    """JSON with every number finite, every text whole, no key twice, and no deeper than allowed."""
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep(depth) from None
    except ValueError as error:  # among them integers of thousands of digits
        raise ApiError(400, f"the body is not JSON that can be used: {error}") from None
    _check(value, depth, surrogates=b"\\u" in body)
    return value


def _check(value: Any, depth: int, surrogates: bool) -> None:
    level = [value]
    for _ in range(depth + 1):
        below: list[Any] = []
        for own in level:
            if isinstance(own, dict):
                below += own.values()
                if surrogates:
                    below += own
            elif isinstance(own, list):
                below += own
            elif isinstance(own, float):
                if not math.isfinite(own):
                    raise ApiError(400, "the body holds NaN or a number beyond the range of floats")
            elif surrogates and isinstance(own, str):
                _check_text(own)
        if not below:
            return
        level = below
    raise _too_deep(depth)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a key twice")
    return found


def _too_deep(depth: int) -> ApiError:
    return ApiError(400, f"the body is nested deeper than {depth} levels")


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large", headers=_CLOSE)
