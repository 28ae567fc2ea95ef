"""Errors as clients expect them: {"error": {"message", "type", "param", "code"}}, as OpenAI writes them.

Routes under /v1/messages answer as Anthropic does: {"type": "error", "error": {"type", "message"}, "request_id"}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as BaseHTTPException
from starlette.routing import Route

from outrider.errors import EngineDead, InvalidParameter, OutriderError, QueueFull
from outrider.serve.logs import request_id

__all__ = ["ApiError", "as_api_error", "body_of", "install_handlers"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGE_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error"}  # under /v1/messages
_NOT_SERVED = {"/v1/embeddings": "this server generates text and has no model that makes embeddings"}


class ApiError(HTTPException):
    """An error with an HTTP status. FastAPI passes HTTPExceptions on wherever they are raised."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    def response(self, path: str = "") -> JSONResponse:
        """The answer to a request of this path."""
        return JSONResponse(body_of(self, path), self.status_code, self.headers)


def body_of(error: ApiError, path: str = "") -> dict[str, Any]:
    """The error as JSON, in the format of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        kind = _MESSAGE_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
        too_long = error.code == "context_length_exceeded" and error.param == "messages"
        message = f"prompt is too long: {error.detail}" if too_long else error.detail  # Claude Code looks for these words
        fields: dict[str, Any] = {"type": kind, "message": message}
        if error.code is not None:
            fields["details"] = {"error_code": error.code}
        return {"type": "error", "error": fields, "request_id": request_id.get()}
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def as_api_error(error: OutriderError) -> ApiError:
    """The API error for an error of the engine."""
    if isinstance(error, InvalidParameter):
        return ApiError(400, str(error), error.param, error.code)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped", code="engine_dead")
    return ApiError(500, "the engine failed; the server's log says how", code="engine_error")


def install_handlers(app: FastAPI) -> None:
    """Install a handler that gives every error the same format. `AccessGuard` answers unexpected exceptions."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        path = request.url.path
        if isinstance(error, OutriderError):
            return as_api_error(error).response(path)
        if isinstance(error, RequestValidationError):
            return ApiError(400, str(error.errors()[0]["msg"])).response(path)
        assert isinstance(error, BaseHTTPException)
        return (error if isinstance(error, ApiError) else _unrouted(request, error)).response(path)

    for kind in (BaseHTTPException, RequestValidationError, OutriderError):
        app.add_exception_handler(kind, refused)


def _unrouted(request: Request, error: BaseHTTPException) -> ApiError:
    """The API error for an unknown route or method, with the valid ones."""
    path = request.url.path[:128]
    routes: dict[str, set[str]] = {}
    for route in request.app.routes:
        if isinstance(route, Route):
            routes.setdefault(_plain(route.path), set()).update(route.methods or ())
    if error.status_code == 405:
        allowed = ", ".join(_with_head((error.headers or {}).get("Allow", "").split(", ")))
        return ApiError(405, f"{path} takes {allowed}, not {request.method}", headers={"Allow": allowed})
    if error.status_code == 404:
        nearest = get_close_matches(path, routes, 1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        served = ", ".join(f"{' '.join(sorted(methods - {'HEAD'}))} {name}" for name, methods in sorted(routes.items()))
        if path in _NOT_SERVED:
            reason, code = f"{path} is not served: {_NOT_SERVED[path]}; ", "unsupported_route"
        else:
            reason, code = f"{path} is not served here; {hint}", "unknown_route"
        return ApiError(404, f"{reason}served are: {served}", code=code)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _plain(path: str) -> str:
    """A route's path without the types of its parameters."""
    return re.sub(r":\w+}", "}", path)


def _with_head(methods: list[str]) -> list[str]:
    return sorted({*methods, "HEAD"} if "GET" in methods else methods)
