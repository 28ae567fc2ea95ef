"""A server process for benchmarks through HTTP, clients of it, and what it shows: /health, /stats and its memory."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.bench.client import Client, Endpoint
from outrider.errors import OutriderError

__all__ = ["Observations", "ServerProcess", "client_of", "is_idle", "observing", "stats_of", "stats_when_idle"]


def client_of(port: int, address: str | None = None) -> Client:
    """A client of a server on this machine, from one of its addresses."""
    return Client(Endpoint(f"http://127.0.0.1:{port}"), address)


class ServerProcess:
    """`outrider serve` as a process, on any free port of this machine."""

    def __init__(self, arguments: Sequence[str], program: Sequence[str] = ("outrider.cli", "serve")) -> None:
        command = [sys.executable, "-m", *program, *arguments, "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = 0
        self._log: list[str] = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            match = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            if match is not None:
                self.port = int(match[1])
            if line.startswith("ready on"):
                break
        else:
            raise OutriderError(f"the server did not start: {''.join(self._log[-3:]).strip()}")
        self._reader = threading.Thread(target=self._read_on, name="outrider-bench-log", daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        """A pipe that nobody reads would in the end hold up whoever writes to it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log = [*self._log[-99:], line]

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
class Observations:
    """What a benchmark sees of a server while it loads it."""

    health_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def observing(
    server: ServerProcess, seen: Observations, health_every_s: float, memory_every_s: float
) -> AsyncIterator[None]:
    """Probe /health and the server's memory in the background."""

    async def probe_health() -> None:
        async with client_of(server.port) as client:
            while True:
                begun = time.perf_counter()
                try:
                    status, _ = await client.get("/health")
                    if status != 200:
                        seen.failures[f"/health said {status}"] += 1
                except httpx.HTTPError as error:
                    seen.failures[f"/health: {type(error).__name__}"] += 1
                    await asyncio.sleep(0.5)
                finally:  # one that was not answered in time counts for as long as it was waited for
                    seen.health_s.append(time.perf_counter() - begun)
                await asyncio.sleep(health_every_s)

    async def probe_memory() -> None:
        while True:
            seen.memory_mib.append(server.resident_mib())
            await asyncio.sleep(memory_every_s)

    tasks = [asyncio.create_task(probe()) for probe in (probe_health, probe_memory)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stats_of(client: Client) -> dict[str, Any]:
    """The server's statistics."""
    stats: dict[str, Any] = json.loads((await client.get("/stats"))[1])
    return stats


def is_idle(stats: dict[str, Any]) -> bool:
    """Whether nothing runs, nothing waits, and every page is back."""
    return bool(stats["running"] == stats["waiting"] == stats["kv_usage"] == 0)


async def stats_when_idle(client: Client, timeout_s: float) -> dict[str, Any]:
    """The statistics once the server is idle, or after the timeout."""
    until = time.monotonic() + timeout_s
    while not is_idle(stats := await stats_of(client)) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return stats
