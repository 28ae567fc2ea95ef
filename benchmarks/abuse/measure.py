"""One scenario: /health and another client's short request, alone and under attack, and the server's memory."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from benchmarks.abuse.attacker import Attacker
from benchmarks.abuse.scenarios import Scenario
from benchmarks.server import Observations, ServerProcess, client_of, is_idle, observing, stats_when_idle
from outrider.bench.client import Client
from outrider.quantiles import percentile_ms

__all__ = ["Bars", "measure", "wait_until_ready"]

_OTHER = "127.0.0.3"  # the client whose requests are timed
_HEALTH_EVERY_S, _MEMORY_EVERY_S = 0.02, 0.1
_ALONE = 15  # requests timed without an attack
_FEWEST = 5  # requests timed under attack, however long it lasts
_REQUEST_S = 120.0  # no request is waited for longer
_IDLE_S = 60.0  # for the server to become idle afterwards


@dataclass(frozen=True, slots=True)
class Bars:
    """What must hold."""

    health_p99_ms: float = 50.0
    health_max_ms: float = 250.0


@dataclass(slots=True)
class _Observations(Observations):
    request_s: list[float] = field(default_factory=list)


async def wait_until_ready(port: int) -> None:
    """Until /health says that requests are served."""
    until = time.monotonic() + _IDLE_S
    async with client_of(port) as client:
        while (await client.get("/health"))[0] != 200 and time.monotonic() < until:
            await asyncio.sleep(0.05)


async def measure(server: ServerProcess, scenario: Scenario, seconds: float, bars: Bars) -> dict[str, Any]:
    """The scenario's row of the report."""
    before = server.resident_mib()
    alone = _Observations()
    other = client_of(server.port, _OTHER)
    for number in range(_ALONE):
        await _request(other, number, alone)
    attacker = await asyncio.to_thread(Attacker, server.port, scenario.name, seconds)
    seen = _Observations()
    async with observing(server, seen, _HEALTH_EVERY_S, _MEMORY_EVERY_S):
        await asyncio.sleep(0.5)  # the probes are under way before the attack is
        seen.health_s.clear()
        attacker.start()
        begun = time.monotonic()
        for number in count(_ALONE):
            if (attacker.done or time.monotonic() - begun > 2 * seconds) and len(seen.request_s) >= _FEWEST:
                break
            if seen.failures.total() >= _FEWEST:
                break
            await _request(other, number, seen)
            await asyncio.sleep(0.01)
        lasted = time.monotonic() - begun
        statuses = attacker.stop()
    await other.close()
    return _row(scenario, bars, alone, seen) | {
        "statuses": statuses,
        "seconds": round(lasted, 2),
        "memory_mib": {"before": round(before, 1), "peak": round(max(seen.memory_mib, default=before), 1)},
        "idle_afterwards": await _is_idle(server.port),
    }


def _row(scenario: Scenario, bars: Bars, alone: _Observations, seen: _Observations) -> dict[str, Any]:
    health = {name: percentile_ms(seen.health_s, share, 2) or 0.0 for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    times = {
        "alone": percentile_ms(alone.request_s, 0.5, 2) or 0.0,
        "attacked": percentile_ms(seen.request_s, 0.5, 2) or 0.0,
        "attacked_max": percentile_ms(seen.request_s, 1.0, 2) or 0.0,
    }
    ratio = round(times["attacked"] / times["alone"], 2) if times["alone"] and seen.request_s else None
    held = {
        "health_p99": bool(seen.health_s) and health["p99"] < bars.health_p99_ms,
        "health_max": bool(seen.health_s) and health["max"] < bars.health_max_ms,
        "others_answered": not seen.failures and not alone.failures,
    }
    if scenario.max_slowdown is not None:
        held["slowdown"] = ratio is not None and ratio <= scenario.max_slowdown
    return {
        "about": scenario.about,
        "health_ms": health | {"samples": len(seen.health_s)},
        "request_ms": times | {"ratio": ratio, "samples": len(seen.request_s)},
        "failures": sorted(alone.failures + seen.failures)[:5],
        "held": held,
        "passed": all(held.values()),
    }


async def _request(client: Client, number: int, seen: _Observations) -> None:
    """Four tokens after a short prompt that was not seen before."""
    body = {"prompt": f"value_{number} = ", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(_REQUEST_S):
            status = await client.post("/v1/completions", json.dumps(body).encode())
    except (TimeoutError, httpx.HTTPError) as error:
        seen.failures[type(error).__name__] += 1
        return
    if status == 200:
        seen.request_s.append(time.perf_counter() - begun)
    else:
        seen.failures[f"HTTP {status}"] += 1


async def _is_idle(port: int) -> bool:
    """Whether the server becomes idle in time."""
    with suppress(httpx.HTTPError, ValueError):
        async with client_of(port) as client:
            return is_idle(await stats_when_idle(client, _IDLE_S))
    return False
