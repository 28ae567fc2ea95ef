"""Fair scheduling: which waiting sequence is next, and how a round's prompt rows are divided. Plain Python.

Shares are per client first, then per tenant within a client, so that more requests do not bring a larger share. Slots are
max-min fair. Between clients that run equally many sequences, the one with the fewest served tokens is next: the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.core import Sequence as Generation

__all__ = ["FairQueue", "fair_split", "shortest_first"]

_GUARANTEED = 4  # the oldest prompt gets at least one of this many rows of its share
_MAX_CLIENTS = 8  # a round's prompt rows go to at most this many clients, so that chunks stay large


class FairQueue:
    """Waiting sequences by client and tenant, with the running sequences and served tokens of each."""

    def __init__(self) -> None:
        self._root = _Share()

    def __len__(self) -> int:
        return self._root.waiting

    @property
    def contended(self) -> bool:
        """Whether several clients have work."""
        return len(self._root.parts) > 1

    def push(self, seq: Generation) -> None:
        """Queue a sequence in its tenant's heap, ordered by priority and arrival."""
        path = self._path(seq)
        heapq.heappush(path[-1].queue, (seq.order, seq))
        for share in path:
            share.waiting += 1

    def first(self) -> Generation | None:
        """The sequence to admit next: by priority, then fewest running sequences, then fewest served tokens."""
        return self._root.first()

    def start(self, seq: Generation) -> None:
        """Move the first sequence from the queue to a slot."""
        path = self._path(seq)
        started = heapq.heappop(path[-1].queue)[1]
        assert started is seq, "only the first of a queue may start"
        for share in path:
            share.waiting -= 1
            share.running += 1

    def stop(self, seq: Generation) -> None:
        """Move a running sequence back to the queue."""
        self.push(seq)
        for share in self._path(seq):
            share.running -= 1

    def leave(self, seq: Generation, was_running: bool) -> None:
        """Remove a finished sequence. One that was waiting stays in its heap until it reaches the top."""
        path = self._path(seq)
        for share in path:
            if was_running:
                share.running -= 1
                share.served += seq.output_len
            else:
                share.waiting -= 1
        root, client, tenant = path
        if tenant.is_idle:
            del client.parts[seq.request.tenant]
        if client.is_idle:
            del root.parts[seq.request.client]

    def slots(self, seq: Generation) -> tuple[int, int]:
        """The number of running sequences of the sequence's client, and of its tenant within that client."""
        _, client, tenant = self._path(seq)
        return client.running, tenant.running

    def divide(self, readers: Sequence[Generation], budget: int) -> dict[Generation, int]:
        """Prompt rows for each sequence: by priority, then max-min fair between clients, tenants and requests."""
        rows: dict[Generation, int] = {}
        least = max(1, budget // _MAX_CLIENTS)
        for _, group in groupby(sorted(readers, key=lambda seq: seq.order), key=lambda seq: seq.order[0]):
            of_priority = list(group)
            for of_client, client_rows in self._shares(of_priority, 1, budget, least):
                for of_tenant, tenant_rows in self._shares(of_client, 2, client_rows, least):
                    rows |= zip(of_tenant, shortest_first(tenant_rows, list(map(_unread, of_tenant))), strict=True)
            budget -= sum(rows[seq] for seq in of_priority)
        for seq, count in rows.items():
            for share in self._path(seq):
                share.served += count
        return rows

    def _shares(
        self, readers: Sequence[Generation], level: int, budget: int, least: int
    ) -> Iterator[tuple[list[Generation], int]]:
        """The sequences of each client (level 1) or tenant (level 2), and the part of the budget it gets."""
        groups: dict[_Share, list[Generation]] = {}
        for seq in readers:
            groups.setdefault(self._path(seq)[level], []).append(seq)
        line = sorted(groups, key=lambda share: share.served)
        parts = fair_split(budget, [sum(map(_unread, groups[share])) for share in line], least)
        return zip((groups[share] for share in line), parts, strict=True)

    def _path(self, seq: Generation) -> tuple[_Share, _Share, _Share]:
        client = self._root.part(seq.request.client)
        return self._root, client, client.part(seq.request.tenant)


class _Share:
    """Running, waiting and served counts of one node: the root, a client, or a tenant of a client."""

    __slots__ = ("parts", "queue", "running", "served", "waiting")

    def __init__(self, served: int = 0) -> None:
        self.parts: dict[str | None, _Share] = {}
        self.queue: list[tuple[tuple[int, int], Generation]] = []  # a tenant's heap
        self.running = self.waiting = 0
        self.served = served  # virtual token counter: prompt rows read, plus output tokens of finished sequences

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    def part(self, name: str | None) -> _Share:
        """The child of this name. A new one starts at the lowest counter of its siblings, so that idle time earns nothing."""
        if name not in self.parts:
            self.parts[name] = _Share(min((share.served for share in self.parts.values()), default=0))
        return self.parts[name]

    def first(self) -> Generation | None:
        if self.parts:
            heads = [(head, share) for share in self.parts.values() if share.waiting and (head := share.first()) is not None]
            return min(heads, key=_precedence, default=(None,))[0]
        while self.queue and self.queue[0][1].finish_reason is not None:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None


def _precedence(head: tuple[Generation, _Share]) -> tuple[int, int, int, tuple[int, int]]:
    seq, share = head
    return seq.order[0], share.running, share.served, seq.order


def _unread(seq: Generation) -> int:
    return len(seq.tokens) - seq.cached


def fair_split(budget: int, wants: Sequence[int], least: int = 1) -> list[int]:
    """Max-min fair parts of a budget. Nothing is left over while a want is unmet.

    If equal parts would be smaller than `least`, only the first `budget // least` entries share the budget. The others
    share what remains.
    """
    parts = [0] * len(wants)
    places = range(len(wants))
    served = max(1, budget // least)
    for line in (places[:served], places[served:]):
        for done, i in enumerate(sorted(line, key=wants.__getitem__)):
            parts[i] = min(wants[i], budget // (len(line) - done))
            budget -= parts[i]
    return parts


def shortest_first(budget: int, wants: Sequence[int]) -> list[int]:
    """Parts of a budget for prompts, which are given from the oldest to the youngest.

    The shortest prompt is read first, so that it does not wait for many long ones. The oldest always gets a quarter of
    the budget, so that a long prompt is not starved.
    """
    parts = [0] * len(wants)
    oldest_first = [0, *sorted(range(len(wants)), key=wants.__getitem__)]
    for turn, i in enumerate(oldest_first):
        limit = -(-budget // _GUARANTEED) if turn == 0 else budget
        more = min(wants[i] - parts[i], limit)
        parts[i] += more
        budget -= more
    return parts
