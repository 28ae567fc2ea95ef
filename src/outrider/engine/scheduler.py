"""The scheduler: which sequences run in a round. Plain Python, testable without a model."""

from __future__ import annotations

from bisect import insort
from itertools import count
from typing import NamedTuple

from outrider.cache import Key, OutOfPages, PageTable, StateCache, next_key, root_key
from outrider.config import EngineConfig
from outrider.core import Batch, Sequence
from outrider.engine.fairness import FairQueue
from outrider.errors import QueueFull

__all__ = ["Scheduler", "Turn"]


class Turn(NamedTuple):
    """The sequences of one round."""

    batch: Batch
    started: list[Sequence]  # admitted for the first time, or resumed after preemption
    stopped: list[Sequence]  # preempted; they wait in the queue again


class Scheduler:
    """Which sequences run in a round, and how many of their tokens each feeds.

    A sequence is admitted when the pages that its tokens need now are free. `FairQueue` chooses the next one. Decode rows
    always run, and prompt chunks share `max_batch_rows`. Drafts only get pages that are free.

    Sequences are ordered by priority, then by arrival. When pages run out, a sequence is preempted: the last one, in that
    order, of the client that runs the most. A client is also preempted when it runs at least two sequences more than
    another client whose next sequence cannot be admitted. So the first sequence always runs to its end, and so does the
    first one of each client that holds its fair share. A preempted sequence keeps its tokens. Its KV is recomputed when it
    resumes, except for the pages that the prefix cache still holds.
    """

    def __init__(self, pages: PageTable, config: EngineConfig, states: StateCache | None = None) -> None:
        self.pages = pages
        self.states = StateCache() if states is None else states
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # of these tokens, those that were cached
        self._config = config
        self._arrivals = count()
        self._running: list[Sequence] = []  # highest priority first, then oldest first
        pages.running.append(self._running)
        self.forget_all()

    def forget_all(self) -> None:
        """Drop all sequences. Their pages are not released here: the caller has already reset the page table."""
        self._running.clear()
        self._queue = FairQueue()
        self._awaiting_prefix: dict[Sequence, list[Sequence]] = {}  # by first sample: those that wait for its prefix
        self._siblings: dict[str, Sequence] = {}
        self._refused = False  # sequences wait that could not be admitted in the last turn
        self._limit = self._config.max_num_seqs  # of running sequences; lower after `shrink`

    @property
    def max_num_seqs(self) -> int:
        """The maximum number of sequences that run at once."""
        return self._config.max_num_seqs

    @property
    def running(self) -> list[Sequence]:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._awaiting_prefix.values()))

    @property
    def may_admit(self) -> bool:
        """Whether the next turn could start a sequence that waits: none did last time, unless something changed since."""
        if not self._refused and len(self._queue):
            return True
        return any(first.cached >= first.prompt_len for first in self._awaiting_prefix)

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._queue) or self._awaiting_prefix)

    def check_queue(self, sequences: int) -> None:
        """Raise QueueFull if this many more sequences would exceed `max_queue`."""
        limit = self._config.max_queue
        if limit is not None and self.waiting + sequences > limit:
            raise QueueFull(
                f"{self.waiting} requests are waiting; with {sequences} more they exceed max_queue={limit}; try again later"
            )

    def submit(self, seq: Sequence, limited: bool = True) -> None:
        """Queue a sequence. Samples of one request wait until the first has read the prompt, and share its pages."""
        if limited:
            self.check_queue(1)
        assert self.pages.pages_for(seq.prompt_len + seq.request.max_tokens) <= self.pages.count, "checked before queueing"
        seq.order = (seq.request.priority, next(self._arrivals))
        self._refused = False
        first = self._siblings.get(seq.request.id)
        if seq.request.index == 0:
            self._siblings[seq.request.id] = seq
        if self._config.prefix_cache and seq.request.index > 0 and first is not None and first.cached < first.prompt_len:
            self._awaiting_prefix.setdefault(first, []).append(seq)
        else:
            self._queue.push(seq)

    def next(self) -> Turn:
        """Schedule one round: the running sequences, how many tokens each feeds, and which ones started or were preempted."""
        for first in [first for first in self._awaiting_prefix if first.cached >= first.prompt_len]:
            self._queue_siblings(first)
        batch = Batch([], [])
        stopped: list[Sequence] = []
        readers: list[Sequence] = []
        size = self.pages.page_size
        for seq in list(self._running):
            missing = len(seq.tokens) - seq.cached
            if missing == 1 and seq.cached < len(seq.pages) * size:  # the common case: one decode row that needs no new page
                batch.sequences.append(seq)
                batch.feeds.append(1)
            elif seq in stopped:
                continue
            elif missing == 1:
                self._feed(seq, 1, batch, stopped)
            else:
                readers.append(seq)
        started = [] if stopped or not len(self._queue) else self._admit(stopped)
        self._refused = not stopped
        readers = [seq for seq in (*readers, *started) if seq not in stopped]
        if readers:
            self._read_prompts(readers, batch, stopped)
        if stopped:
            batch = batch.where(lambda seq, _: seq not in stopped)
        return Turn(batch, started, stopped)

    def shrink(self) -> list[Sequence]:
        """Preempt half of the running sequences, those of the lowest priority, and run no more at once until some have ended."""
        stopped: list[Sequence] = []
        self._limit = max(len(self._running) // 2, 1)
        while len(self._running) > self._limit:
            self._preempt(self._lowest_priority(), stopped)
        return stopped

    def reserve(self, batch: Batch, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Reserve free pages for draft nodes and return how many nodes fit. Drafts never preempt another sequence."""
        if not any(lengths):
            return lengths
        lengths = self.states.fitting(lengths)
        reserved = []
        for seq, fed, length in zip(batch.sequences, batch.feeds, lengths, strict=True):
            if length:
                base = seq.cached + fed
                missing = self.pages.pages_for(base + length) - len(seq.pages)
                if missing > 0:
                    seq.pages += self.pages.allocate(min(missing, self.pages.free))
                length = min(length, len(seq.pages) * self.pages.page_size - base)
            reserved.append(length)
        return tuple(reserved)

    def settle(self, seq: Sequence, goes_on: bool = False) -> None:
        """After a round, release the draft's pages, unless the next round already uses them, and publish full pages for reuse."""
        size = self.pages.page_size
        if not goes_on and len(seq.pages) * size >= len(seq.tokens) + size:
            self.pages.truncate(seq.pages, len(seq.tokens))
        if seq.named < (full := seq.cached // size) and self._config.prefix_cache:
            self._extend_keys(seq, full)
            for i in range(seq.named, full):
                self.pages.name(seq.pages[i], seq.keys[i])
            seq.named = full
        if self._config.prefix_cache:
            self.states.publish(seq.state, seq.keys[: seq.named])

    def remove(self, seq: Sequence) -> bool:
        """Remove a finished sequence and release its pages. Returns whether it was running."""
        self._refused = False
        self._limit = min(self._limit + 1, self._config.max_num_seqs)
        self._queue_siblings(seq)
        if self._siblings.get(seq.request.id) is seq:
            del self._siblings[seq.request.id]
        if seq in self._running:
            self._running.remove(seq)
            self._queue.leave(seq, was_running=True)
            self._release(seq)
            return True
        for first, siblings in list(self._awaiting_prefix.items()):
            if seq in siblings:
                siblings.remove(seq)
                if not siblings:
                    del self._awaiting_prefix[first]
                return False
        self._queue.leave(seq, was_running=False)
        return False

    def _queue_siblings(self, first: Sequence) -> None:
        for seq in self._awaiting_prefix.pop(first, ()):
            self._queue.push(seq)

    def _read_prompts(self, readers: list[Sequence], batch: Batch, stopped: list[Sequence]) -> None:
        """Divide the round's prompt rows. A sequence with a single missing token is a decode row, which always runs."""
        prompts = [seq for seq in readers if len(seq.tokens) - seq.cached > 1]
        budget = self._config.max_batch_rows
        if batch.sequences:  # their tokens wait for these rows
            budget = min(budget, self._config.max_mixed_rows or budget)
        rows = self._queue.divide(prompts, budget)
        for seq in readers:
            if seq not in stopped:
                self._feed(seq, rows.get(seq, 1), batch, stopped)
        if self._running and all(seq in stopped for seq in batch.sequences):  # all rows went to sequences that got no pages
            oldest = self._running[0]
            self._feed(oldest, min(len(oldest.tokens) - oldest.cached, self._config.max_batch_rows), batch, stopped)

    def _feed(self, seq: Sequence, rows: int, batch: Batch, stopped: list[Sequence]) -> None:
        """Add a sequence with `rows` of its tokens to the batch, if pages can be made free for them."""
        if rows and self._make_room(seq, seq.cached + rows, stopped):
            batch.sequences.append(seq)
            batch.feeds.append(rows)

    def _make_room(self, seq: Sequence, tokens: int, stopped: list[Sequence]) -> bool:
        """Allocate pages for `tokens` tokens, preempting others if needed. Returns False if the sequence itself is preempted."""
        while True:
            try:
                self.pages.extend(seq.pages, tokens)
                return True
            except OutOfPages:
                victim = self._lowest_priority()
                self._preempt(victim, stopped)
                if victim is seq:
                    return False

    def _preempt(self, seq: Sequence, stopped: list[Sequence]) -> None:
        self._running.remove(seq)
        self._release(seq)
        self._queue.stop(seq)
        self.preemptions += 1
        stopped.append(seq)

    def _lowest_priority(self) -> Sequence:
        """The sequence to preempt: of the lowest priority, the youngest of the client and tenant that run the most sequences."""
        if not self._queue.contended:
            return self._running[-1]
        last = self._running[-1].order[0]
        return max((seq for seq in self._running if seq.order[0] == last), key=lambda seq: (*self._queue.slots(seq), seq.order))

    def _admit(self, stopped: list[Sequence]) -> list[Sequence]:
        """Start waiting sequences while they fit, or while their client's fair share allows preempting another client."""
        started: list[Sequence] = []
        while (seq := self._queue.first()) is not None and seq not in stopped:
            if len(self._running) < self._limit and self._take_pages(seq):
                self._queue.start(seq)
                insort(self._running, seq, key=lambda one: one.order)
                started.append(seq)
            elif (victim := self._over_share(seq, started)) is not None:
                self._preempt(victim, stopped)
            else:
                break
        return started

    def _over_share(self, seq: Sequence, started: list[Sequence]) -> Sequence | None:
        """The sequence to preempt for a waiting one: the youngest of a client that runs more even then."""
        if not self._queue.contended:
            return None
        limit = self._queue.slots(seq)[0] + 1
        heavier = [
            other
            for other in self._running
            if other.order[0] >= seq.order[0] and other not in started and self._queue.slots(other)[0] > limit
        ]
        return max(heavier, key=lambda other: (self._queue.slots(other), other.order), default=None)

    def _take_pages(self, seq: Sequence) -> bool:
        """Take the cached prefix pages, if the remaining tokens fit beside the pages that running sequences will need.

        Running sequences of other engines on the same page table count too. Otherwise two engines could preempt
        each other's admissions for ever.
        """
        usable = (len(seq.tokens) - 1) // self.pages.page_size  # at least one token is fed, because its logits are needed
        if not self._config.prefix_cache or seq.request.params.prompt_logprobs is not None:
            usable = 0
        self._extend_keys(seq, usable)
        hits = self.pages.find(seq.keys[:usable])
        startable = self.states.usable(seq.keys[: len(hits)])
        self.pages.release(hits[startable:])
        del hits[startable:]
        running = [other for group in self.pages.running for other in group]
        missing = sum(max(self.pages.pages_for(len(other.tokens) + 1) - len(other.pages), 0) for other in running)
        if running and missing + self.pages.pages_for(len(seq.tokens) + 1) - len(hits) > self.pages.free:
            self.pages.release(hits)
            return False
        seq.pages = hits
        seq.named = len(hits)
        seq.cached = len(hits) * self.pages.page_size
        seq.state = self.states.begin(seq.keys[: len(hits)], self.pages.page_size)
        self.prefix_queries += len(seq.tokens)
        self.prefix_hits += seq.cached
        return True

    def _extend_keys(self, seq: Sequence, pages: int) -> None:
        size = self.pages.page_size
        while len(seq.keys) < pages:
            previous = seq.keys[-1] if seq.keys else _first_key(seq)
            seq.keys.append(next_key(previous, seq.tokens[len(seq.keys) * size : (len(seq.keys) + 1) * size]))

    def _release(self, seq: Sequence) -> None:
        self.pages.release(seq.pages)
        seq.pages, seq.state = [], None
        seq.cached = seq.named = 0


def _first_key(seq: Sequence) -> Key:
    """What the key of its first page depends on beside its tokens."""
    adapter = seq.request.adapter
    return root_key(seq.request.tenant, seq.rotary_start, 0 if adapter is None else adapter.serial)
