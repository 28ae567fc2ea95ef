"""The attacker: a separate process, whose bodies are made before the clock starts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.abuse.scenarios import SCENARIOS, Shot
from benchmarks.server import client_of

__all__ = ["Attacker"]

_ADDRESS = "127.0.0.2"  # another client than those who measure
_REFUSED_PER_S = 200  # requests of all connections together that are refused at once: a flood of them would be another attack
_MAX_SHOTS = 2000  # of one connection
_START_S = 60.0  # the process and its bodies must be ready by then


class Attacker:
    """Begins on `start`, and ends by itself."""

    def __init__(self, port: int, name: str, seconds: float) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_attack, args=(other, port, name, seconds), daemon=True)
        self._process.start()
        if not self._pipe.poll(_START_S):
            self.stop()
            raise RuntimeError(f"the attacker of {name} did not start")
        self._pipe.recv()

    def start(self) -> None:
        self._pipe.send("go")

    @property
    def done(self) -> bool:
        return self._pipe.poll() or not self._process.is_alive()

    def stop(self) -> dict[str, int]:
        """End it if it has not ended; how often it got which answer."""
        statuses: dict[str, int] = self._pipe.recv() if self._pipe.poll() else {"unfinished": 1}
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return statuses


def _attack(pipe: Connection[Any, Any], port: int, name: str, seconds: float) -> None:
    scenario = SCENARIOS[name]
    shots = scenario.shots()
    pipe.send("ready")
    pipe.recv()
    statuses = asyncio.run(_shoot_all(port, shots, scenario.connections, seconds if scenario.again else 0.0, seconds))
    pipe.send(dict(statuses))


async def _shoot_all(port: int, shots: list[Shot], connections: int, repeat_s: float, limit_s: float) -> Counter[str]:
    statuses: Counter[str] = Counter()
    shares = [shots[i::connections] or [shots[i % len(shots)]] for i in range(connections)]
    pause = connections / _REFUSED_PER_S
    tasks = [asyncio.create_task(_shoot(port, share, repeat_s, pause, statuses)) for share in shares]
    _, pending = await asyncio.wait(tasks, timeout=limit_s)
    for task in pending:
        task.cancel()
        statuses["unfinished"] += 1
    await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


async def _shoot(port: int, shots: list[Shot], seconds: float, pause: float, statuses: Counter[str]) -> None:
    """Every shot once, and again while the time lasts."""
    until = time.monotonic() + seconds
    async with client_of(port, _ADDRESS) as client:
        for number in range(_MAX_SHOTS):
            if number >= len(shots) and time.monotonic() >= until:
                return
            shot = shots[number % len(shots)]
            status = await client.post(shot.path, shot.body)
            statuses[str(status)] += 1
            if status != 200:
                await asyncio.sleep(pause)
