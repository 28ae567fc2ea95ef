"""A runner on the processor that behaves as one on a GPU: what is launched is computed later, from what was known then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cache import KVPool
from outrider.core import Batch, Drafts, FutureTokens, InFlight, PendingDrafts, Scores
from outrider.model import Decoder, Feed, Runner
from outrider.model.runner import Chances, PendingChains, Tokens, Verified
from outrider.sampling import Row, choose, rank
from tests.support.models import make_pool

__all__ = ["DelayedDraft", "DelayedRunner"]

_DRAWN = 1000  # places of the future-token buffer for drafts; choices come after them


class Stream:
    """Work in the order in which it was launched, done when somebody waits for it."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.buffer: dict[int, int] = {}  # future tokens, by place
        self.drawn: object = None

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def finish(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def tokens(self, ids: Sequence[int]) -> list[int]:
        return [self.buffer[-1 - token] if token < 0 else token for token in ids]


class OrderedPool:
    """A pool whose changes come after what was launched before."""

    def __init__(self, pool: KVPool, stream: Stream) -> None:
        self._pool, self._stream = pool, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def move(self, *args: Any) -> None:
        self._stream.finish()
        self._pool.move(*args)

    def clear(self, *args: Any) -> None:
        self._stream.finish()
        self._pool.clear(*args)


@dataclass(eq=False)
class _Launched:
    runner: DelayedRunner
    batch: Batch
    drafts: Drafts | PendingDrafts
    counts: list[int]
    scores: Scores | None = None

    @property
    def choices(self) -> Sequence[FutureTokens]:
        if self.runner.last is not self:
            return ()
        firsts = [_DRAWN + sum(self.counts[:b]) for b in range(len(self.counts))]
        return [FutureTokens(first, count) for first, count in zip(firsts, self.counts, strict=True)]

    def wait(self) -> Scores:
        self.runner.stream.finish()
        assert self.scores is not None
        return self.scores


@dataclass(eq=False)
class DelayedRunner(Runner):
    """A target. Rounds of decode rows are in flight until somebody waits."""

    target: Decoder
    pages: int = 160
    page_size: int = 16
    stream: Stream = field(default_factory=Stream)
    last: _Launched | None = None
    overlapped: int = 0  # rounds that were launched while another was in flight

    def __post_init__(self) -> None:
        pool = make_pool(self.target, self.page_size, self.pages)
        Runner.__init__(self, self.target, pool)
        self.pool = OrderedPool(pool, self.stream)  # type: ignore[assignment]

    def launch(self, batch: Batch, drafts: Drafts | PendingDrafts, taps: tuple[int, ...] = ()) -> InFlight:
        laid = self._lay_out_round(batch, drafts)
        decoding = min(laid.roots) >= 0 and all(len(feed.tokens) == 1 for feed in laid.feeds) and not laid.prompt_rows
        if not decoding or any(seq.guide for seq in batch.sequences):
            self.stream.finish()
            self.last = None
            trees = [tree._replace(tokens=self.stream.tokens(tree.tokens)) for tree in drafts.per_sequence]
            return super().launch(batch, Drafts(trees), taps)
        counts = [1 + len(feed.nodes) for feed in laid.feeds]
        feeds = [feed._replace(pages=list(feed.pages)) for feed in laid.feeds]  # the pages may have other owners later
        launched = self.last = _Launched(self, batch, drafts, counts)
        requests = [seq.request for seq in batch.sequences]
        texts = [tuple(seq.tokens) for seq in batch.sequences]
        self.overlapped += bool(batch.future)

        def work() -> None:
            read = self.stream.tokens
            known = [feed._replace(tokens=read(feed.tokens), nodes=read(feed.nodes)) for feed in feeds]
            hidden = self.forward(known, taps, laid.wanted)
            assert hidden.logits is not None
            positions = [at for feed in known for at in _positions(feed)]
            owners = [pair for *pair, count in zip(requests, texts, counts, strict=True) for _ in range(count)]
            rows = [
                Row(request.params, request.seed, request.index, at, len(request.prompt_ids), text, request.stop_ids)
                for (request, text), at in zip(owners, positions, strict=True)
            ]
            choices = choose(hidden.logits, rows)
            self.stream.buffer |= {_DRAWN + i: token for i, token in enumerate(choices)}
            joined = hidden.joined if hidden.joined is not None or not taps else None
            launched.scores = Scores(hidden.logits, list(laid.roots), list(laid.first_rows), joined, {}, choices)

        self.stream.launch(work)
        return launched


def _positions(feed: Feed) -> list[int]:
    """The position after every row: the one that is chosen there."""
    depths: list[int] = []
    for parent in feed.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [feed.start + 1, *(feed.start + 1 + depth for depth in depths)]


class DelayedDraft(Runner):
    """A draft model beside a DelayedRunner, whose chains are drawn later too."""

    overlaps_drafts = drafts_by_temperature = True
    drafts_chains = 16

    def __init__(self, decoder: Decoder, target: DelayedRunner) -> None:
        super().__init__(decoder, make_pool(decoder, target.page_size, target.pages))
        self.stream = target.stream
        self.followed = 0  # chains drawn before the verdict on the last ones

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        fed = [feed._replace(pages=list(feed.pages)) for feed in feeds]
        return self._launched(lambda: fed, rows, lengths)

    def draw_next(self, verified: Sequence[Verified], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        self.followed += 1
        kept = [one._replace(feed=one.feed._replace(pages=list(one.feed.pages))) for one in verified]
        return self._launched(lambda: [self._after(one) for one in kept], rows, lengths)

    def _after(self, verified: Verified) -> Feed:
        """The last two tokens, once the verdict is known."""
        feed, buffer = verified.feed, self.stream.buffer
        drawn = self.stream.tokens(verified.drawn.ids[: verified.choices.count - 1])
        choices = self.stream.tokens(verified.choices.ids)
        accepted = next((i for i, token in enumerate(drawn) if token != choices[i]), len(drawn))
        assert buffer
        text = [feed.tokens[-1], *drawn[:accepted], choices[accepted]]
        start = feed.start + len(feed.tokens) - 1 + len(text) - 2
        return feed._replace(start=start, tokens=text[-2:])

    def _launched(self, feeds: Callable[[], Sequence[Feed]], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        result: list[tuple[Tokens, Chances]] = []
        batch, steps = len(lengths), max(lengths)
        mark = self.stream.drawn = object()

        def work() -> None:
            tokens: Tokens = []
            for feed, row in zip(feeds(), rows, strict=True):
                chain, start, fed = [], feed.start, list(feed.tokens)
                for _ in range(steps):
                    hidden = self.forward([feed._replace(start=start, tokens=fed)], (), [len(fed) - 1])
                    assert hidden.logits is not None
                    start += len(fed)
                    token = int(rank(hidden.logits, [row._replace(position=start)], 1).tokens[0, 0])
                    chain.append(token)
                    fed = [token]
                tokens.append(chain)
            self.stream.buffer |= {k * batch + b: tokens[b][k] for b in range(batch) for k in range(steps)}
            result.append((tokens, [[1.0] * steps] * batch))

        self.stream.launch(work)

        def resolve() -> tuple[Tokens, Chances]:
            self.stream.finish()
            return result[0]

        future = [FutureTokens(b, length, batch) for b, length in enumerate(lengths)]
        return PendingChains(future, resolve, lambda: self.stream.drawn is mark)
