"""Sending answers: event streams and large answers, to clients that may read slowly or disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from outrider.engine.outputs import CompletionOutput
from outrider.errors import OutriderError
from outrider.serve.answers import Answer
from outrider.serve.connection import ABORT
from outrider.serve.errors import ApiError, as_api_error, body_of
from outrider.serve.pools import LARGE_BYTES
from outrider.serve.rendering import json_parts, next_block
from outrider.serve.service import RequestHandle, Service

__all__ = ["ClientGone", "EventStream", "WholeAnswer", "unless_gone"]

T = TypeVar("T")
_PING = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client has disconnected."""


class _Live(Response):
    """An answer that is written while its client reads. When the response ends, unfinished sequences are aborted."""

    def __init__(self, service: Service, handle: RequestHandle, answer: Answer) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._handle = handle
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
            self._service.abort(self._handle)
            self._handle.admission.answered()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    async def _blocks(self, parts: Iterator[str]) -> AsyncIterator[bytes]:
        """Write parts off the event loop. A block is made when the previous one has been sent."""
        work = partial(next_block, parts)
        while block := await self._service.off_loop(work, self._handle.admission.client, LARGE_BYTES):
            yield block


class WholeAnswer(_Live):
    """One large JSON document."""

    media_type = "application/json"

    async def _send_all(self, scope: Scope, send: Send) -> None:
        outputs, limit = await self._handle.whole(), self._service.settings.limits.write_s
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for block in self._blocks(self._parts(outputs)):
                async with asyncio.timeout(limit):
                    await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            scope[ABORT]()  # the client has disconnected or stopped reading

    def _parts(self, outputs: Sequence[CompletionOutput]) -> Iterator[str]:
        yield from json_parts(self._answer.whole(outputs))  # a generator, so that nothing is written on the event loop


class EventStream(_Live):
    """Server-sent events."""

    media_type = "text/event-stream"

    async def _send_all(self, scope: Scope, send: Send) -> None:
        """Send the headers with the first event, so that an earlier error is answered with its status."""
        limit, started = self._service.settings.limits.write_s, False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout(limit):  # this waits while the client's buffer is full
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            try:
                async for chunks in self._handle.chunks(self._service.settings.ping_s):
                    if chunks and self._answer.is_large(sum(len(chunk.token_ids) for _, chunk in chunks)):
                        async for block in self._blocks(self._answer.event_parts(chunks)):
                            await write(block)
                    else:
                        await write(self._answer.events(chunks) if chunks else _PING)
                await write(self._answer.closing(), more=False)
            except (OutriderError, ApiError) as error:
                refusal = error if isinstance(error, ApiError) else as_api_error(error)
                if not started:
                    await refusal.response()(scope, _nothing, send)
                    return
                await write(f"data: {json.dumps(body_of(refusal))}\n\ndata: [DONE]\n\n".encode(), more=False)
        except (TimeoutError, OSError):
            scope[ABORT]()  # the client has disconnected or stopped reading


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work. Raises ClientGone as soon as the client disconnects."""
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


async def _nothing() -> Message:
    """A `receive` function for a response that reads nothing from its client."""
    return {"type": "http.disconnect"}
