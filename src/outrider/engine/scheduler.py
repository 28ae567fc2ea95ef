"""Who runs in a round. Plain Python, testable without a model."""

from __future__ import annotations

from collections import deque

from outrider.cache import PageTable
from outrider.config import EngineConfig
from outrider.core import Batch, Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served. A sequence is admitted when the pages of its whole life are free.

    Reserving a life's pages up front means nobody is ever preempted. Decode rows always run; prompt
    chunks share `max_batch_rows` between them.
    """

    def __init__(self, pages: PageTable, config: EngineConfig) -> None:
        self.pages = pages
        self._config = config
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reserved = 0

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence. Its drafts fit in the pages of tokens it may still emit."""
        seq.reserved = self.pages.pages_for(seq.prompt_len + seq.request.max_tokens)
        assert seq.reserved <= self.pages.count, "requests are checked before they are queued"
        self._waiting.append(seq)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences that fit to the running ones, and name them."""
        started = []
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            seq = self._waiting[0]
            if self._reserved + seq.reserved > self.pages.count:
                break
            self._waiting.popleft()
            self._reserved += seq.reserved
            self._running.append(seq)
            started.append(seq)
        return started

    def next(self) -> Batch:
        """The running sequences and how many of their tokens each feeds."""
        budget = self._config.max_batch_rows
        sequences, feeds = [], []
        for seq in self._running:
            missing = len(seq.tokens) - seq.cached
            fed = missing if missing == 1 else min(missing, budget)
            if fed:
                sequences.append(seq)
                feeds.append(fed)
                budget -= fed if missing > 1 else 0
        return Batch(sequences, feeds)

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence and release its pages; False where it was only waiting."""
        if seq not in self._running:
            if seq in self._waiting:
                self._waiting.remove(seq)
            return False
        self._running.remove(seq)
        self._reserved -= seq.reserved
        self.pages.release(seq.pages)
        seq.pages.clear()
        return True
