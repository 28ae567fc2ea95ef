"""Threads for work that would block the event loop. Clients take turns, and small jobs do not wait for large ones."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

__all__ = ["LARGE_BYTES", "FairPool"]

T = TypeVar("T")
LARGE_BYTES = 16 * 2**10  # jobs on fewer bytes are small


class _Job(NamedTuple):
    client: str
    work: Callable[[], Any]
    result: Future[Any]


class _Lane:
    """Jobs of one size class. Clients take turns (round robin), and each runs at most `per_client` jobs at once."""

    def __init__(self, per_client: int) -> None:
        self._per_client = per_client
        self._busy: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # clients in the order of their turns

    def put(self, job: _Job) -> None:
        self._waiting.setdefault(job.client, deque()).append(job)

    def take(self) -> _Job | None:
        """The next job that may start, or None."""
        for client, jobs in self._waiting.items():
            if self._busy[client] < self._per_client:
                self._busy[client] += 1
                self._waiting.move_to_end(client)
                job = jobs.popleft()
                if not jobs:
                    del self._waiting[client]
                return job
        return None

    def done(self, job: _Job) -> None:
        self._busy -= Counter((job.client,))

    def cancel(self) -> None:
        for jobs in self._waiting.values():
            for job in jobs:
                job.result.cancel()
        self._waiting.clear()


class FairPool:
    """A few threads, of which one client can never occupy all. The first `reserved` of them only run small jobs."""

    def __init__(self, name: str, threads: int, reserved: int = 1) -> None:
        self._large, self._small = _Lane(per_client=1), _Lane(per_client=2)
        self._changed = threading.Condition()
        self._open = True
        for number in range(threads):
            lanes = (self._small,) if number < reserved else (self._large, self._small)
            threading.Thread(target=self._work, args=(lanes,), name=f"{name}-{number}", daemon=True).start()

    async def run(self, work: Callable[[], T], client: str = "", size: int = 0) -> T:
        """Run `work` for a client and return its result. `size` in bytes decides whether the job is small or large."""
        result: Future[T] = Future()
        with self._changed:
            if not self._open:
                raise RuntimeError("the pool is closed")
            lane = self._large if size >= LARGE_BYTES else self._small
            lane.put(_Job(client, work, result))
            self._changed.notify_all()
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Refuse new jobs and cancel waiting ones. Running jobs finish."""
        with self._changed:
            self._open = False
            self._large.cancel()
            self._small.cancel()
            self._changed.notify_all()

    def _work(self, lanes: tuple[_Lane, ...]) -> None:
        while (turn := self._next(lanes)) is not None:
            lane, job = turn
            try:
                if job.result.set_running_or_notify_cancel():
                    job.result.set_result(job.work())
            except BaseException as error:
                job.result.set_exception(error)
            with self._changed:
                lane.done(job)
                self._changed.notify_all()
            del turn, job  # do not keep a large result alive while waiting for the next job

    def _next(self, lanes: tuple[_Lane, ...]) -> tuple[_Lane, _Job] | None:
        """Wait for the next job. Returns None when the pool is closed."""
        with self._changed:
            while self._open:
                for lane in lanes:
                    if (job := lane.take()) is not None:
                        return lane, job
                self._changed.wait()
        return None
