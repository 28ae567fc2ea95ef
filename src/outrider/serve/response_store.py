"""Answers of /v1/responses that later requests may continue, read or delete. They are kept in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from outrider.serve.settings import Limits

__all__ = ["Owner", "ResponseStore", "StoredResponse"]


class Owner(NamedTuple):
    """Who may see an answer: a client, and the tenant that its `cache_salt` names."""

    client: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation that ends with it."""

    document: bytes
    turns: tuple[bytes, ...]  # messages as JSON, one list for each turn; shared with the answers before this one

    @property
    def size(self) -> int:
        """Bytes, where shared turns count in full, so that the sum is an upper bound."""
        return len(self.document) + sum(map(len, self.turns))


class ResponseStore:
    """Stored answers by owner and id. When they exceed the limits, the client that holds the most loses its least recently used.

    Methods may be called from any thread.
    """

    def __init__(self, limits: Limits) -> None:
        self.bytes = 0
        self.count = 0
        self._limits = limits
        self._clients: dict[str, OrderedDict[tuple[str, str], StoredResponse]] = {}  # by tenant and id, the last used at the end
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def get(self, owner: Owner, name: str) -> StoredResponse | None:
        """A stored answer of this owner, or None."""
        with self._lock:
            held = self._clients.get(owner.client)
            stored = None if held is None else held.get((owner.tenant, name))
            if held is not None and stored is not None:
                held.move_to_end((owner.tenant, name))
            return stored

    def put(self, owner: Owner, name: str, stored: StoredResponse) -> None:
        """Store an answer. One that is larger than the whole store is not kept."""
        if stored.size > self._limits.responses_bytes:
            return
        with self._lock:
            self._remove(owner.client, (owner.tenant, name))
            self._clients.setdefault(owner.client, OrderedDict())[owner.tenant, name] = stored
            self._sizes[owner.client] = self._sizes.get(owner.client, 0) + stored.size
            self.bytes += stored.size
            self.count += 1
            self._shrink()

    def drop(self, owner: Owner, name: str) -> bool:
        """Delete an answer. Returns whether there was one."""
        with self._lock:
            return self._remove(owner.client, (owner.tenant, name))

    def _shrink(self) -> None:
        while self.bytes > self._limits.responses_bytes:
            self._remove_oldest(max(self._sizes, key=self._sizes.__getitem__))
        while self.count > self._limits.responses:
            self._remove_oldest(max(self._clients, key=lambda client: len(self._clients[client])))

    def _remove_oldest(self, client: str) -> None:
        self._remove(client, next(iter(self._clients[client])))

    def _remove(self, client: str, key: tuple[str, str]) -> bool:
        stored = self._clients.get(client, OrderedDict()).pop(key, None)
        if stored is None:
            return False
        self.bytes -= stored.size
        self.count -= 1
        self._sizes[client] -= stored.size
        if not self._clients[client]:
            del self._clients[client], self._sizes[client]
        return True
