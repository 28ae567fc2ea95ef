"""Resources that clients share fairly: places for requests, the time for Retry-After, and threads.

The threads do work that would block the event loop. Clients take turns, and small jobs do not wait for large ones.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, NamedTuple, TypeVar

__all__ = ["LARGE_BYTES", "Admission", "Completions", "FairPool", "Places", "client_of", "in_daemon_thread"]

T = TypeVar("T")
LARGE_BYTES = 16 * 2**10  # jobs on fewer bytes are small
_IPV6_PREFIX = 64  # one subscriber usually owns a whole /64
_WINDOW_S = 60.0  # older completions are ignored
_UNKNOWN_S = 5  # Retry-After if nothing has completed lately


def client_of(scope: Mapping[str, Any]) -> str:
    """The client of a request: the name of its API key, or else the address it came from."""
    name = scope.get("outrider.client")
    if name:
        return f"key {name}"
    host = (scope.get("client") or ("",))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return f"address {host}"
    if isinstance(address, IPv6Address):
        return f"address {ip_network((address, _IPV6_PREFIX), strict=False)}"
    return f"address {address}"


class Places:
    """A number of places, first come, first served. A client below its fair share is admitted even when others fill them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self._held: dict[str, int] = {}

    def take(self, client: str, count: int = 1) -> bool:
        """Take places for a client. Returns False if there are not enough for it."""
        held, total = self._held.get(client, 0) + count, self.total + count
        clients = len(self._held.keys() | {client})
        if total > self.capacity and (held > self.capacity // clients or total > 2 * self.capacity):
            return False
        if count:
            self._held[client], self.total = held, total
        return True

    def release(self, client: str, count: int = 1) -> None:
        """Release places."""
        if not count:
            return
        assert self._held.get(client, 0) >= count, "more places are released than were taken"
        self.total -= count
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]


class Admission:
    """What one HTTP request holds: a place for each sequence until it ends, and memory for prompt log probabilities
    until its answer is written.
    """

    def __init__(self, client: str, places: Places, room: Places) -> None:
        self.client = client
        self._places = places
        self._room = room
        self._sequences = 0
        self._entries = 0

    def take(self, sequences: int) -> bool:
        """Take places for the request's sequences."""
        taken = self._places.take(self.client, sequences)
        self._sequences += sequences * taken
        return taken

    def hold(self, entries: int) -> bool:
        """Take memory for this many log probabilities."""
        taken = self._room.take(self.client, entries)
        self._entries += entries * taken
        return taken

    def ended(self, sequences: int = 1) -> None:
        """Release the places of sequences that ended."""
        self._places.release(self.client, sequences)
        self._sequences -= sequences

    def answered(self) -> None:
        """Release the memory of log probabilities: the answer is written, or its client has left."""
        self._room.release(self.client, self._entries)
        self._entries = 0

    def abandon(self) -> None:
        """Release everything. For requests that never reached the engine."""
        self.ended(self._sequences)
        self.answered()


class Completions:
    """Recent completion times, from which the wait of queued requests is estimated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=64)

    def add(self) -> None:
        self._times.append(self._clock())

    def retry_after(self, waiting: int) -> int:
        """Seconds until this many sequences will have ended at the present rate, between 1 and 60."""
        now = self._clock()
        while self._times and self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        if not self._times:
            return _UNKNOWN_S
        rate = len(self._times) / max(now - self._times[0], 1e-3)
        return min(60, max(1, math.ceil(waiting / rate)))


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


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run work in a new daemon thread. Neither the end of the event loop nor the end of the process waits for it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # so that the result is set even if nobody waits for it any more

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)
