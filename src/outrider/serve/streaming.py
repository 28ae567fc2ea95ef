"""The way out: a stream of events to a client who may read slowly, or leave; and watching those who wait for a whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.serve.answers import Answer
from outrider.serve.connection import ABORT
from outrider.serve.errors import as_api_error, body_of
from outrider.serve.service import Service, Ticket

__all__ = ["ClientGone", "EventStream", "unless_gone"]

T = TypeVar("T")
_PING = b": keep-alive\n\n"


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class EventStream(Response):
    """Server-sent events from a ticket. Whatever ends the response ends the ticket."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, ticket: Ticket, answer: Answer) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._ticket = ticket
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnect(receive))
        work = asyncio.ensure_future(self._send_all(scope, send))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()
            self._service.abort(self._ticket)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        limit = self._service.settings.limits.write_s

        async def write(data: bytes, more: bool = True) -> None:
            async with asyncio.timeout(limit):  # a full buffer makes this wait, and nobody waits for ever
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for pieces in self._ticket.pieces(self._service.settings.ping_s):
                    await write(self._answer.events(pieces) if pieces else _PING)
                await write(self._answer.closing(), more=False)
            except OutriderError as error:
                event = json.dumps(body_of(as_api_error(error)))
                await write(f"data: {event}\n\ndata: [DONE]\n\n".encode(), more=False)
        except (TimeoutError, OSError):
            scope[ABORT]()  # the reader is gone, or as good as gone


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, or ClientGone as soon as the client has left."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(request.receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([gone, task], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
