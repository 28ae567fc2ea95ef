"""Sending answers to clients that may read slowly or disconnect.

Large answers are written while they are sent, in parts that each hold the interpreter lock only for a short time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.serve.connection import ABORT
from outrider.serve.errors import ApiError, as_api_error
from outrider.serve.fairness import LARGE_BYTES

if TYPE_CHECKING:
    from outrider.serve.answers import Answer
    from outrider.serve.service import RequestHandle, Service

__all__ = ["ClientGone", "LazyRows", "LiveAnswer", "dumps", "json_parts", "next_block", "rows", "unless_gone"]

T = TypeVar("T")
_BATCH = 64  # rows written at a time
_BLOCK = 128 * 2**10  # characters sent at a time


class ClientGone(Exception):
    """The client has disconnected."""


class LiveAnswer(Response):
    """An answer that is written while its client reads: a stream of events, or one large JSON document.

    When the response ends, unfinished sequences are aborted.
    """

    def __init__(self, service: Service, handle: RequestHandle, answer: Answer, streams: bool) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream" if streams else "application/json")
        del self.headers["content-length"]
        self._service = service
        self._handle = handle
        self._answer = answer
        self._blocks = self._events() if streams else self._written(self._document())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send_all(scope, receive, send))
        except (TimeoutError, OSError):
            scope[ABORT]()  # the client has disconnected or stopped reading
        finally:
            self._service.abort(self._handle)
            self._handle.admission.answered()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers with the first block, so that an earlier error is answered with its status."""
        started = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout(self._service.settings.limits.write_s):  # this waits while the client's buffer is full
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for block in self._blocks:
                await write(block)
        except (OutriderError, ApiError) as error:
            refusal = error if isinstance(error, ApiError) else as_api_error(error)
            if not started:
                await refusal.response(scope["path"])(scope, receive, send)
                return
            await write(self._answer.failure(refusal))
        await write(b"", more=False)

    async def _events(self) -> AsyncIterator[bytes]:
        """Server-sent events, and comments while there is no output."""
        async for chunks in self._handle.chunks(self._service.settings.ping_interval):
            if chunks and self._answer.is_large(sum(len(chunk.token_ids) for _, chunk in chunks)):
                async for block in self._written(self._answer.event_parts(chunks)):
                    yield block
            else:
                yield self._answer.events(chunks) if chunks else self._answer.ping()
        yield self._answer.closing()

    def _document(self) -> Iterator[str]:
        yield from json_parts(self._answer.whole(self._handle.finished_outputs()))  # a generator: it runs off the event loop

    async def _written(self, parts: Iterator[str]) -> AsyncIterator[bytes]:
        """Write parts off the event loop. A block is made when the previous one has been sent."""
        work = partial(next_block, parts)
        while block := await self._service.off_loop(work, self._handle.admission.client, LARGE_BYTES):
            yield block


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of some work. Raises ClientGone as soon as the client disconnects."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnect(receive))
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


class LazyRows:
    """A list whose items are created while they are written. It can be written once."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items


def rows(items: Iterable[Any], count: int) -> list[Any] | LazyRows:
    """Items as a list, or as LazyRows if there are many."""
    return list(items) if count <= _BATCH else LazyRows(items)


def dumps(value: Any) -> str:
    """The JSON of a small value, as one string."""
    return json.dumps(value, default=list)


def json_parts(value: Any) -> Iterator[str]:
    """The JSON of plain data and LazyRows, in parts that each take little time to write."""
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{json.dumps(key)}:"
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, LazyRows) or (isinstance(value, list) and not _nested(value)):
        yield "["
        items, first = iter(value), True
        while batch := list(islice(items, _BATCH)):
            yield f"{'' if first else ','}{dumps(batch)[1:-1]}"
            first = False
        yield "]"
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield "," if number else ""
            yield from json_parts(item)
        yield "]"
    else:
        yield dumps(value)


def _nested(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], dict | list)


def next_block(parts: Iterator[str]) -> bytes:
    """Join the next parts to a block of about 128 KiB. Returns an empty block after the last part."""
    taken, size = [], 0
    for part in parts:
        taken.append(part)
        size += len(part)
        if size >= _BLOCK:
            break
    return "".join(taken).encode()
