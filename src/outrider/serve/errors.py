"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as BaseHTTPException

from outrider.errors import EngineDead, InvalidParameter, OutriderError, QueueFull

__all__ = ["ApiError", "as_api_error", "body_of", "install_handlers"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error with a status; FastAPI lets HTTPExceptions through wherever they are raised."""

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

    def response(self) -> JSONResponse:
        return JSONResponse(body_of(self), self.status_code, self.headers)


def body_of(error: ApiError) -> dict[str, Any]:
    """The error's JSON."""
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def as_api_error(error: OutriderError) -> ApiError:
    """What the engine refused, as the client hears it."""
    if isinstance(error, InvalidParameter):
        message = str(error)
        too_long = error.param == "prompt" and "the context holds" in message
        return ApiError(400, message, error.param, "context_length_exceeded" if too_long else None)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped", code="engine_dead")
    return ApiError(500, "the engine failed; the server's log says how", code="engine_error")


def install_handlers(app: FastAPI) -> None:
    """Every error of the app in the one shape. What nobody foresaw is the guard's to tell."""

    async def refused(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
        if isinstance(error, ApiError):
            return error.response()
        assert isinstance(error, BaseHTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors()).response()

    async def engine(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
        assert isinstance(error, OutriderError)
        return as_api_error(error).response()

    app.add_exception_handler(BaseHTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(OutriderError, engine)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first thing the schema objects to."""
    first = errors[0]
    where = [
        part for part in first["loc"] if part != "body" and not (isinstance(part, str) and ("[" in part or part[:1].isupper()))
    ]
    param = ""
    for part in where:
        if isinstance(part, str) and part in ("str", "int", "float", "bool", "list", "dict"):
            continue  # the branch of a union
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason}" if param else reason, param or None)
