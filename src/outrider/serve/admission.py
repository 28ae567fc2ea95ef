"""Admission control: places that clients share fairly, the places one request holds, and the time for Retry-After."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

__all__ = ["Admission", "Completions", "Places", "client_of"]

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
