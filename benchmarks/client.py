"""A server process and a client that costs little, for benchmarks through HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import OutriderError

__all__ = ["Connection", "Reply", "ServerProcess"]


class ServerProcess:
    """`outrider serve` as a process, on any free port of this machine."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "outrider.cli", "serve", *arguments, "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = 0
        self._said: list[str] = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            match = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            if match is not None:
                self.port = int(match[1])
            if line.startswith("ready on"):
                break
        else:
            raise OutriderError(f"the server did not start: {''.join(self._said[-3:]).strip()}")
        self._reader = threading.Thread(target=self._read_on, name="outrider-bench-log", daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        """A pipe that nobody reads would in the end hold up whoever writes to it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-99:], line]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_mib(self) -> float:
        """Memory the process holds now."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    def stop(self) -> int:
        """Tell it to stop; how it exited."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


@dataclass(slots=True)
class Reply:
    """What came of one streamed request."""

    status: int = 0
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    done: bool = False  # the stream ended as it should
    cancelled: bool = False
    first_s: float = 0.0  # until the first token
    total_s: float = 0.0
    error: str | None = None
    chunks: list[str] = field(default_factory=list)


class Connection:
    """One connection, one request at a time, from this address of the machine where that matters."""

    def __init__(self, port: int, address: str | None = None) -> None:
        self._port = port
        self._local = None if address is None else (address, 0)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._closes = False  # whether the server ends the connection after this answer

    async def get(self, path: str) -> tuple[int, bytes]:
        reader, status, length = await self._ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return status, await reader.readexactly(length or 0)

    async def post(self, path: str, data: bytes) -> int:
        """The status of an answer whose body is read and forgotten."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        try:
            reader, status, length = await self._ask(head.encode() + data)
            if length is not None:
                await _skip(reader, length)
            else:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    await _skip(reader, size + 2)
                await reader.readexactly(2)
        except BaseException:
            self.close()  # the rest of its answer must not be taken for the next one's
            raise
        if self._closes:
            self.close()
        return status

    async def stream(self, body: dict[str, Any], leave_after: int | None = None) -> Reply:
        """A streamed completion, read to its end or left after some chunks."""
        data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reply, begun = Reply(), time.perf_counter()
        try:
            reader, reply.status, length = await self._ask(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            if length is not None:
                reply.error = (await reader.readexactly(length)).decode()
            else:
                await self._read(reader, reply, begun, leave_after)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
            self.close()
        except asyncio.CancelledError:
            self.close()
            raise
        reply.total_s = time.perf_counter() - begun
        return reply

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, data: bytes) -> tuple[asyncio.StreamReader, int, int | None]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20, local_addr=self._local)
        reader, writer = self._streams
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        self._closes = "connection: close" in head
        length = re.search(r"content-length: (\d+)", head)
        return reader, int(head.split(" ", 2)[1]), None if length is None else int(length[1])

    async def _read(self, reader: asyncio.StreamReader, reply: Reply, begun: float, leave_after: int | None) -> None:
        left, chunks = b"", 0
        while size := int(await reader.readuntil(b"\r\n"), 16):
            left += (await reader.readexactly(size + 2))[:-2]
            *events, left = left.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    reply.first_s = reply.first_s or time.perf_counter() - begun
                    self._take(json.loads(event[6:]), reply)
                    chunks += 1
                reply.done |= event == b"data: [DONE]"
            if leave_after is not None and chunks >= leave_after and not reply.done:
                reply.cancelled = True
                self.close()
                return
        await reader.readexactly(2)

    @staticmethod
    def _take(chunk: dict[str, Any], reply: Reply) -> None:
        if "error" in chunk:
            reply.error = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            reply.chunks.append(choice["text"])
            reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        if chunk.get("usage"):
            reply.tokens = chunk["usage"]["completion_tokens"]
            reply.text = "".join(reply.chunks)


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        data = await reader.read(min(size, 2**16))
        if not data:
            raise asyncio.IncompleteReadError(data, size)
        size -= len(data)
