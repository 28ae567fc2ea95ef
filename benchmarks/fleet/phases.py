"""What is done to a fleet, and what must hold then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.fleet.load import (
    ConversationPlan,
    ask,
    percentiles,
    prefix_counts,
    replicas_of,
    run_conversations,
    unequal,
)
from benchmarks.server import ServerProcess

__all__ = ["crowd", "flooded", "killed", "prefix_rate", "scaled", "server_with"]

_PROBE = """
import sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    begun = time.perf_counter()
    opener.open(sys.argv[1] + "/health").read()
    print(time.perf_counter() - begun, flush=True)
    time.sleep(0.05)
"""  # a process of its own: the clients of the crowd would hold it up
_HEALTH_MS = 20.0  # that /health may take while a crowd is served
_PATIENCE_S = 120.0


@contextlib.contextmanager
def server_with(*arguments: str) -> Iterator[str]:
    """A server with one thread for each replica; its address."""
    server = ServerProcess(arguments)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def killed(url: str, plan: ConversationPlan) -> dict[str, Any]:
    """Kill the replica with the most to do when half of the requests have ended."""
    victims: list[str] = []

    def kill() -> None:
        busiest = max(replicas_of(url).items(), key=lambda item: item[1]["sequences"])
        victims.append(busiest[0])
        os.kill(busiest[1]["pid"], signal.SIGKILL)

    outcome = asyncio.run(run_conversations(url, plan, kill))
    report = outcome.report(victims[0]) | {"unequal": unequal(outcome)}
    return report | {"passed": report["lost"] == report["unequal"] == 0 and report["finished"] > 0}


def prefix_rate(url: str, plan: ConversationPlan) -> float:
    """The share of looked-up prompt tokens that were in a prefix cache."""
    before = prefix_counts(url)
    asyncio.run(run_conversations(url, plan))
    queries, hits = (after - first for after, first in zip(prefix_counts(url), before, strict=True))
    return hits / queries


def scaled(url: str, plan: ConversationPlan) -> dict[str, Any]:
    """Load a fleet that starts with one replica until it has three, then wait until it has one again."""
    begun, counts = time.monotonic(), list[tuple[float, int]]()

    def note() -> int:
        count = sum(bool(replica["status"] == "ok") for replica in replicas_of(url).values())
        if not counts or counts[-1][1] != count:
            counts.append((round(time.monotonic() - begun, 1), count))
        return count

    async def load(seed: int) -> None:
        while True:
            await run_conversations(url, replace(plan, seed=(seed := seed + 1)))

    async def grow() -> None:
        loading = asyncio.create_task(load(0))
        while await asyncio.to_thread(note) < 3 and time.monotonic() < begun + _PATIENCE_S:
            await asyncio.sleep(0.5)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading

    _until(lambda: note() == 1)
    del counts[:-1]  # before the first replica was ready
    asyncio.run(grow())
    _until(lambda: note() == 1)
    numbers = [count for _, count in counts]
    passed = numbers[0] == numbers[-1] == 1 and max(numbers) == 3
    return {"replicas_by_second": counts, "passed": passed}


def crowd(url: str, streams: int, seconds: float) -> dict[str, Any]:
    """Many streams at once, some left, while /health is probed."""
    reports: list[dict[str, Any]] = []
    plan = ConversationPlan(streams, 4, cancel=0.2, streams=streams, tokens=48)

    async def load() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            reports.append((await run_conversations(url, replace(plan, seed=len(reports)))).report())

    with subprocess.Popen([sys.executable, "-c", _PROBE, url], stdout=subprocess.PIPE, text=True) as probing:
        asyncio.run(load())
        probing.terminate()
        health = [float(line) for line in probing.communicate()[0].split()]
    sums = {name: sum(report[name] for report in reports) for name in ("requests", "finished", "cancelled", "lost")}
    milliseconds = percentiles(health)
    return sums | {
        "streams": streams,
        "health_ms": milliseconds,
        "passed": sums["lost"] == 0 and milliseconds["p99"] < _HEALTH_MS,
    }


def flooded(url: str, streams: int, requests: int) -> dict[str, Any]:
    """One client's latency alone, and while another client sends all it can."""
    body = {"prompt": "def load_config(path):", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")

    async def median(client: httpx.AsyncClient) -> float:
        answers = [await ask(client, body) for _ in range(requests)]
        assert all(answer.outcome == "finished" for answer in answers), answers
        return statistics.median(answer.seconds for answer in answers)

    async def measure() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=120, trust_env=False) as client:
            alone = await median(client)
            plan = ConversationPlan(10_000, 1, streams=streams, tokens=64, letters=60)
            flood = asyncio.create_task(run_conversations(url, plan, address="127.0.0.3"))
            await asyncio.sleep(2.0)
            beside = await median(client)
            flood.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flood
        return alone, beside

    alone, beside = asyncio.run(measure())
    return {
        "alone_ms": round(1000 * alone, 2),
        "beside_a_flood_ms": round(1000 * beside, 2),
        "ratio": round(beside / alone, 2),
        "flood_streams": streams,
        "passed": beside <= 2 * alone,
    }


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.5)
