"""Who runs in a round. Plain Python, testable without a model."""

from __future__ import annotations

import heapq
from bisect import insort
from itertools import count
from typing import NamedTuple

from outrider.cache import OutOfPages, PageTable, next_key, root_key
from outrider.config import EngineConfig
from outrider.core import Batch, Sequence
from outrider.errors import QueueFull

__all__ = ["Scheduler", "Turn"]


class Turn(NamedTuple):
    """One round's cast."""

    batch: Batch
    started: list[Sequence]  # joined, or came back
    stopped: list[Sequence]  # gave their pages to their seniors and wait again


class Scheduler:
    """Seniority is priority, then arrival. The senior ones keep running whatever comes.

    A sequence is admitted when the pages its tokens need now are free. When pages run out, the most
    junior one gives up its own and waits: its tokens are kept, its KV is rebuilt later, from the
    prefix cache as far as that still holds it. Decode rows always run; prompt chunks share
    `max_batch_rows`. Drafts get pages only where some are left over.
    """

    def __init__(self, pages: PageTable, config: EngineConfig) -> None:
        self.pages = pages
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # and found there
        self._config = config
        self._running: list[Sequence] = []  # most senior first
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; ended ones are dropped when they surface
        self._queued = 0  # those of them that have not ended
        self._parked: dict[Sequence, list[Sequence]] = {}  # samples that wait for their sibling to read the prompt
        self._siblings: dict[str, Sequence] = {}
        self._arrivals = count()

    @property
    def most(self) -> int:
        """Sequences that may run at once."""
        return self._config.max_num_seqs

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def waiting(self) -> int:
        return self._queued + sum(map(len, self._parked.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queued or self._parked)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Samples of one request wait until the first has read the prompt, and share its pages."""
        assert self.pages.pages_for(seq.prompt_len + seq.request.max_tokens) <= self.pages.count, "checked before queueing"
        limit = self._config.max_queue
        if limit is not None and self.waiting >= limit:
            raise QueueFull(f"{self.waiting} requests are waiting, as many as max_queue allows; try again later")
        seq.order = (seq.request.priority, next(self._arrivals))
        first = self._siblings.get(seq.request.id)
        if seq.request.index == 0:
            self._siblings[seq.request.id] = seq
        if self._config.prefix_cache and seq.request.index > 0 and first is not None and first.cached < first.prompt_len:
            self._parked.setdefault(first, []).append(seq)
        else:
            self._enqueue(seq)

    def next(self) -> Turn:
        """The running sequences, how many of their tokens each feeds, and who came and went for it."""
        for first in [first for first in self._parked if first.cached >= first.prompt_len]:
            self._unpark(first)
        budget = self._config.max_batch_rows
        batch = Batch([], [])
        stopped: list[Sequence] = []
        size = self.pages.page_size
        for seq in list(self._running):
            if stopped and seq in stopped:
                break  # so are all its juniors
            if len(seq.tokens) == seq.cached + 1 <= len(seq.pages) * size:  # nearly everybody, nearly always
                batch.sequences.append(seq)
                batch.feeds.append(1)
            else:
                budget -= self._feed(seq, budget, batch, stopped)
        started = [] if stopped else self._admit()
        for seq in started:
            budget -= self._feed(seq, budget, batch, stopped)
        return Turn(batch, started, stopped)

    def reserve(self, batch: Batch, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Pages for draft nodes, as far as some are free, and how many nodes fit: never at a neighbour's cost."""
        if not any(lengths):
            return lengths
        granted = []
        for seq, fed, length in zip(batch.sequences, batch.feeds, lengths, strict=True):
            if length:
                base = seq.cached + fed
                missing = self.pages.pages_for(base + length) - len(seq.pages)
                if missing > 0:
                    seq.pages += self.pages.allocate(min(missing, self.pages.free))
                length = min(length, len(seq.pages) * self.pages.page_size - base)
            granted.append(length)
        return tuple(granted)

    def settle(self, seq: Sequence, goes_on: bool = False) -> None:
        """After a round: give back the draft's pages, unless the next one has begun in them, and make full ones findable."""
        size = self.pages.page_size
        if not goes_on and len(seq.pages) * size >= len(seq.tokens) + size:
            self.pages.truncate(seq.pages, len(seq.tokens))
        if seq.named < (full := seq.cached // size) and self._config.prefix_cache:
            self._extend_keys(seq, full)
            for i in range(seq.named, full):
                self.pages.name(seq.pages[i], seq.keys[i])
            seq.named = full

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence that ended and release its pages; False where it was not running."""
        self._unpark(seq)
        if self._siblings.get(seq.request.id) is seq:
            del self._siblings[seq.request.id]
        if seq in self._running:
            self._running.remove(seq)
            self._release(seq)
            return True
        for first, parked in list(self._parked.items()):
            if seq in parked:
                parked.remove(seq)
                if not parked:
                    del self._parked[first]
                return False
        self._queued -= 1
        return False

    def _enqueue(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.order, seq))
        self._queued += 1

    def _unpark(self, first: Sequence) -> None:
        for seq in self._parked.pop(first, ()):
            self._enqueue(seq)

    def _feed(self, seq: Sequence, budget: int, batch: Batch, stopped: list[Sequence]) -> int:
        """Give a sequence its rows of this round; how many of them are prompt rows."""
        missing = len(seq.tokens) - seq.cached
        fed = missing if missing == 1 else min(missing, budget)
        if fed == 0 or not self._make_room(seq, seq.cached + fed, stopped):
            return 0
        batch.sequences.append(seq)
        batch.feeds.append(fed)
        return fed if missing > 1 else 0

    def _make_room(self, seq: Sequence, tokens: int, stopped: list[Sequence]) -> bool:
        """Pages for that many tokens, taken from juniors if need be; False where it is the most junior itself."""
        while True:
            try:
                self.pages.extend(seq.pages, tokens)
                return True
            except OutOfPages:
                junior = self._running.pop()
                self._release(junior)
                self._enqueue(junior)
                self.preemptions += 1
                stopped.append(junior)
                if junior is seq:
                    return False

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences that fit to the running ones, and name them."""
        started = []
        while self._queued and len(self._running) < self._config.max_num_seqs:
            seq = self._waiting[0][1]
            if seq.finish_reason is None:
                if not self._take_pages(seq):
                    break
                insort(self._running, seq, key=lambda own: own.order)
                started.append(seq)
                self._queued -= 1
            heapq.heappop(self._waiting)
        return started

    def _take_pages(self, seq: Sequence) -> bool:
        """What the prefix cache holds of it, if the rest of its tokens fits beside what the running ones need."""
        usable = (len(seq.tokens) - 1) // self.pages.page_size  # one token at least is fed, to have its logits
        if not self._config.prefix_cache or seq.request.params.prompt_logprobs is not None:
            usable = 0
        self._extend_keys(seq, usable)
        found = self.pages.find(seq.keys[:usable])
        missing = sum(max(self.pages.pages_for(len(own.tokens) + 1) - len(own.pages), 0) for own in self._running)
        if self._running and missing + self.pages.pages_for(len(seq.tokens) + 1) - len(found) > self.pages.free:
            self.pages.release(found)
            return False
        seq.pages = found
        seq.named = len(found)
        seq.cached = len(found) * self.pages.page_size
        self.prefix_queries += len(seq.tokens)
        self.prefix_hits += seq.cached
        return True

    def _extend_keys(self, seq: Sequence, pages: int) -> None:
        size = self.pages.page_size
        while len(seq.keys) < pages:
            previous = seq.keys[-1] if seq.keys else root_key(seq.request.tenant)
            seq.keys.append(next_key(previous, seq.tokens[len(seq.keys) * size : (len(seq.keys) + 1) * size]))

    def _release(self, seq: Sequence) -> None:
        self.pages.release(seq.pages)
        seq.pages = []
        seq.cached = seq.named = 0
