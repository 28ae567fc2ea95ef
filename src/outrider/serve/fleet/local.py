"""Replicas as processes of this machine: started, watched, started again when they end, and drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.routing import ReplicaLoad, Router
from outrider.serve.fleet.upstream import REPLICA_HEADER, Call, NoReplica, ReplicaLost, Reply, WholeReply, ask
from outrider.serve.rules import read_rules
from outrider.serve.settings import ServerSettings

__all__ = ["NO_PROMISE", "LocalFleet", "LocalPlan"]

_log = logging.getLogger("outrider.serve")
_WATCH_S = 0.25  # between two looks at a replica's health
_HEALTH_S = 5.0  # for an answer about it; a process that is busy for longer gets no new requests meanwhile
_BACKOFF_S = (0.5, 30.0)  # before a replica that has ended is started again: first, and at most
_GRACE_S = 15.0  # beyond the drain, before a replica is killed
NO_PROMISE = "equal requests may get different tokens from replicas with different fingerprints"


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What to start, and how much each replica can do."""

    arguments: Sequence[str]  # of `outrider`, without the socket
    replicas: int
    capacity: int  # sequences that one runs at once
    environments: Sequence[dict[str, str]] = ()  # variables of each replica

    def environment(self, number: int) -> dict[str, str]:
        return dict(os.environ) | (self.environments[number] if self.environments else {})


@dataclass(slots=True)
class _Replica:
    number: int
    socket: Path
    process: asyncio.subprocess.Process | None = None
    status: str = "loading"
    fingerprint: str = ""
    starts: int = 0
    in_flight: int = 0  # sequences

    @property
    def name(self) -> str:
        return str(self.number)


class LocalFleet:
    """A `Fleet` of processes. All methods run on the event loop."""

    def __init__(self, plan: LocalPlan, settings: ServerSettings, router: Router, announce: Callable[[], None]) -> None:
        self.settings = settings
        self.failure: BaseException | None = None
        self.draining = False
        self._plan = plan
        self._router = router
        self._announce = announce
        self._announced = False
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # of this user alone
        self._replicas = [_Replica(number, self._folder / f"{number}.sock") for number in range(plan.replicas)]
        self._pipe: tuple[int, int] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._said: set[str] = set()

    def begin(self) -> None:
        self._pipe = os.pipe()
        self._tasks = [asyncio.ensure_future(self._keep(replica)) for replica in self._replicas]

    async def end(self) -> None:
        """End every process, at once if it was not drained."""
        self.draining = True
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            if replica.process is not None and replica.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    replica.process.kill()
                await replica.process.wait()
        if self._pipe is not None:
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = None
        shutil.rmtree(self._folder, ignore_errors=True)

    async def drain(self) -> None:
        """Let running requests finish: every replica drains as a single server does."""
        self.draining = True
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + self.settings.drain_timeout + _GRACE_S
        while any(map(_runs, self._replicas)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        while any(replica.in_flight for replica in self._replicas) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)  # the last bytes of their answers are on their way

    def stop_draining(self) -> None:
        self._signal(signal.SIGTERM)  # their second one

    def reload(self) -> None:
        """Let every replica read its key file and limits again."""
        self._signal(signal.SIGHUP)

    def read_rules(self, settings: ServerSettings) -> None:
        """Check the file of rules; the replicas use it."""
        if settings.speculation_rules is not None:
            read_rules(settings.speculation_rules)

    def configure(self, settings: ServerSettings, _: None) -> None:
        self.settings = settings

    def state(self) -> dict[str, Any]:
        prints = {replica.fingerprint for replica in self._replicas if replica.fingerprint}
        return {
            "status": self._status(),
            "same_tokens": len(prints) <= 1,
            "replicas": {
                replica.name: {
                    "status": replica.status,
                    "sequences": replica.in_flight,
                    "starts": replica.starts,
                    "pid": None if replica.process is None else replica.process.pid,
                }
                for replica in self._replicas
            },
        }

    async def each(self, call: Call) -> dict[str, WholeReply]:
        async def one(replica: _Replica) -> WholeReply | None:
            try:
                return await (await ask(replica.socket, call)).whole()
            except ReplicaLost:
                return None

        ready = [replica for replica in self._replicas if replica.status == "ok"]
        answers = await asyncio.gather(*map(one, ready))
        return {replica.name: answer for replica, answer in zip(ready, answers, strict=True) if answer is not None}

    async def send(self, call: Call) -> Reply:
        replica = self._chosen(call)
        replica.in_flight += call.sequences
        process, is_open = replica.process, True

        def close() -> None:
            nonlocal is_open
            replica.in_flight -= call.sequences * is_open
            is_open = False

        try:
            reply = await ask(replica.socket, call)
        except ReplicaLost:
            if process is replica.process and replica.status == "ok":
                replica.status = "lost"  # until it answers about its health
            close()
            raise
        except BaseException:
            close()
            raise
        inner = reply.close

        def close_both() -> None:
            inner()
            close()

        reply.close = close_both
        reply.headers.append((REPLICA_HEADER, replica.name.encode()))
        return reply

    def _chosen(self, call: Call) -> _Replica:
        capacity = self._plan.capacity
        loads = {
            replica.name: ReplicaLoad(min(replica.in_flight, capacity), max(replica.in_flight - capacity, 0), capacity)
            for replica in self._replicas
            if replica.status == "ok"
        }
        if not loads or self.draining:
            raise NoReplica
        name = self._router.choose(call.keys, loads, time.monotonic())
        self._router.sent(name, call.keys)
        return self._replicas[int(name)]

    def _status(self) -> str:
        if self.failure is not None:
            return "dead"
        if self.draining:
            return "draining"
        return "ok" if any(replica.status == "ok" for replica in self._replicas) else "loading"

    def _signal(self, number: signal.Signals) -> None:
        for replica in self._replicas:
            if replica.process is not None and replica.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    replica.process.send_signal(number)

    async def _keep(self, replica: _Replica) -> None:
        try:
            await self._restart(replica)
        except Exception as error:
            self.failure = error

    async def _restart(self, replica: _Replica) -> None:
        """Run a replica's process, again and again, until the fleet ends."""
        pause = _BACKOFF_S[0]
        while not self.draining:
            started_s, was_ready = time.monotonic(), await self._run(replica)
            assert replica.process is not None
            if self.draining:
                return
            code = replica.process.returncode
            if not was_ready and not self._announced:
                self.failure = OutriderError(f"replica {replica.name} ended with exit code {code} before it was ready; see above")
                return
            if time.monotonic() - started_s > 2 * _BACKOFF_S[1]:
                pause = _BACKOFF_S[0]
            _log.error("replica %s ended with exit code %s; it is started again in %g s", replica.name, code, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _BACKOFF_S[1])

    async def _run(self, replica: _Replica) -> bool:
        """Run one process to its end. Returns whether it was ready at any time."""
        assert self._pipe is not None
        replica.socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "outrider.serve.fleet.replica", str(self._pipe[0]), *self._plan.arguments]
        replica.process = await asyncio.create_subprocess_exec(
            *command,
            "--uds",
            str(replica.socket),
            stdin=asyncio.subprocess.DEVNULL,
            env=self._plan.environment(replica.number),
            pass_fds=[self._pipe[0]],
            start_new_session=True,  # Ctrl-C reaches the front door alone, which drains them
        )
        replica.starts += 1
        replica.status = "loading"
        watch = asyncio.ensure_future(self._watch(replica))
        try:
            await replica.process.wait()
        finally:
            watch.cancel()
            was_ready = bool(replica.fingerprint)
            replica.status, replica.fingerprint = "ended", ""
            self._router.gone(replica.name)
        return was_ready

    async def _watch(self, replica: _Replica) -> None:
        """Follow a replica's health."""
        while True:
            try:
                async with asyncio.timeout(_HEALTH_S):
                    reply = await ask(replica.socket, Call("GET", "/health", [(b"host", b"localhost")]))
                    health = json.loads((await reply.whole()).body)
                replica.status = health["status"]
                replica.fingerprint = health.get("fingerprint", replica.fingerprint)
                self._check()
            except (ReplicaLost, TimeoutError):
                replica.status = "loading" if not replica.fingerprint else "lost"
            await asyncio.sleep(_WATCH_S)

    def _check(self) -> None:
        """Say once when all are ready, and once for each set of different fingerprints."""
        if not self._announced and all(replica.status == "ok" for replica in self._replicas):
            self._announced = True
            self._announce()
        prints = sorted({replica.fingerprint for replica in self._replicas if replica.fingerprint})
        if len(prints) > 1 and (text := ", ".join(prints)) not in self._said:
            self._said.add(text)
            _log.warning("the replicas differ (%s): %s", text, NO_PROMISE)


def _runs(replica: _Replica) -> bool:
    return replica.process is not None and replica.process.returncode is None
