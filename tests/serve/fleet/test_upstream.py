"""The connection to a replica: answers in pieces, and every way in which it can break."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.serve.fleet.upstream import Call, ReplicaLost, WholeReply, ask

HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nConnection: close\r\n"


def exchange(path: Path, answer: bytes, call: Call | None = None) -> tuple[WholeReply, bytes]:
    """What comes back from a replica that writes these bytes and closes, and what it was sent."""
    sent = b""

    async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        sent = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> WholeReply:
        async with await asyncio.start_unix_server(replica, str(path)), asyncio.timeout(20):
            return await (await ask(path, call or Call("GET", "/x?y=1", [(b"host", b"h")]))).whole()

    return asyncio.run(run()), sent


def test_answers_with_a_length_and_in_chunks(tmp_path: Path) -> None:
    reply, sent = exchange(tmp_path / "a", HEAD + b"Content-Length: 3\r\n\r\nabc")
    assert (reply.status, reply.body) == (200, b"abc")
    assert reply.headers == [(b"x-a", b"1"), (b"content-length", b"3")]
    assert sent == b"GET /x?y=1 HTTP/1.1\r\nconnection: close\r\nhost: h\r\n\r\n"
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
    assert exchange(tmp_path / "b", chunked)[0].body == b"abc"
    assert exchange(tmp_path / "c", HEAD + b"Content-Length: 0\r\n\r\n", Call("POST", "/"))[1].endswith(
        b"content-length: 0\r\n\r\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 20",
        b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: 3\r\n\r\nab",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
    ],
    ids=["nothing", "half a head", "no HTTP", "half a body", "half the chunks"],
)
def test_a_broken_answer_is_a_lost_replica(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(ReplicaLost):
        exchange(tmp_path / "a", answer)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ReplicaLost):
        asyncio.run(ask(tmp_path / "none", Call("GET", "/")))
