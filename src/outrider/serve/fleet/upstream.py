"""The front door's side of a replica's connection: one HTTP request over a Unix socket, its answer streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httptools

from outrider.routing import RequestKeys

__all__ = ["Call", "NoReplica", "ReplicaLost", "Reply", "WholeReply", "ask"]

Headers = list[tuple[bytes, bytes]]
_READ = 64 * 2**10
_WAITING = 256 * 2**10  # bytes of an answer that wait for a slow client; then the replica waits
REPLICA_HEADER = b"x-outrider-replica"  # in an answer: the name of the replica that gave it
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection", b"expect")
)


class ReplicaLost(Exception):
    """The replica ended, or cannot be reached, before its answer was complete."""


class NoReplica(Exception):
    """There is no replica that could answer now."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it is passed on."""

    method: str
    target: str  # path and query
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""
    keys: RequestKeys = field(default_factory=RequestKeys)
    sequences: int = 1

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class WholeReply(NamedTuple):
    """A complete answer."""

    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Reply:
    """The head of an answer, and its body as it arrives. `close` must be called; it ends an unfinished answer."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]  # raises ReplicaLost
    close: Callable[[], None]

    async def whole(self) -> WholeReply:
        """The complete answer."""
        try:
            return WholeReply(self.status, self.headers, b"".join([chunk async for chunk in self.chunks]))
        finally:
            self.close()


async def ask(socket: Path, call: Call) -> Reply:
    """Send a request. Raises ReplicaLost if no head of an answer arrives."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket), limit=_WAITING)
    except OSError as error:
        raise ReplicaLost(str(error)) from error
    exchange = _Exchange(call, reader, writer)
    try:
        return await exchange.begin()
    except BaseException:
        exchange.close()
        raise


class _Exchange:
    """One request and its answer. The other methods are httptools' callbacks."""

    def __init__(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._call, self._reader, self._writer = call, reader, writer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._chunks: list[bytes] = []
        self._has_head = self._complete = False

    async def begin(self) -> Reply:
        try:
            self._writer.write(_head(self._call) + self._call.body)
            await self._writer.drain()
        except OSError:  # the answer may be there all the same: a refusal of the body
            pass
        while not self._has_head:
            await self._read()
        return Reply(self._parser.get_status_code(), self._headers, self._body(), self.close)

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            if self._chunks:
                chunk = b"".join(self._chunks)
                self._chunks.clear()
                yield chunk
            elif self._complete:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ)
            if data:
                self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise ReplicaLost(str(error)) from error
        if not data and not self._complete:
            raise ReplicaLost("the connection ended")

    def close(self) -> None:
        self._writer.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in HOP_BY_HOP:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._call.method == "HEAD":
            self._complete = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._complete = True


def _head(call: Call) -> bytes:
    lines = [f"{call.method} {call.target} HTTP/1.1".encode("latin-1"), b"connection: close"]
    lines += [name + b": " + value for name, value in call.headers]
    if call.body or call.method == "POST":
        lines.append(b"content-length: %d" % len(call.body))
    return b"\r\n".join([*lines, b"", b""])
