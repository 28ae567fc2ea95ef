"""Drafts of a draft model on a GPU: K tokens by one graph, and the next ones launched behind the verdict on these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.model.cuda_rows import GRAPH_ROWS, Packed, bucket
from outrider.model.runner import Chances, Drawing, Feed, Tokens
from outrider.ops.cuda.launch import Paged
from outrider.sampling import Row
from outrider.sampling.noise import prefix_of

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["CHAIN_LENGTHS", "MOST_DRAWN", "Chains"]

CHAIN_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MOST_DRAWN = GRAPH_ROWS[-1] * CHAIN_LENGTHS[-1]
_PAUSE = 16  # drafts without another try after some for nothing, at most: twice as many each time


class Chain(NamedTuple):
    """A captured draft of K tokens for a fixed number of sequences."""

    packed: Packed
    replay: Any
    drawn: Tensor  # (K, B) int32, the beginning of `promised`: one draft is under way at a time
    odds: Tensor  # (K, B)
    host: tuple[Tensor, Tensor]
    after: Paged  # the rows of later steps: the graph writes there, so they must live as long as it does


class _Drawn(NamedTuple):
    """A draft that was launched."""

    chain: Chain
    feeds: Sequence[Feed]
    rows: Sequence[Row]
    lengths: Sequence[int]
    columns: list[int]  # of each feed
    tokens: list[list[int]]  # of each feed, when they are known here


class Chains:
    """What a draft model draws, by graphs.

    While the target judges a draft, the next one can be launched behind it: where the verdict leaves every sequence is
    found on the device. What is asked for next is that draft, unless a sequence joined or the plan changed; otherwise it
    was drawn for nothing. Its keys and values lie behind the text then, where whatever is drawn next is written again.
    """

    def __init__(self, runner: CudaRunner, target: CudaRunner | None) -> None:
        self._runner, self._target = runner, target
        self._graphs: dict[tuple[int, int], Chain] = {}
        self._done: Any = torch.cuda.Event() if runner.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: _Drawn | None = None  # what was drawn last,
        self._behind: _Drawn | None = None  # and whose continuation is under way
        self._pause, self._missed = 0, 1

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> Drawing:
        columns = self._columns(feeds, lengths)
        behind, self._behind = self._behind, None
        if behind is not None and columns:
            chain, self._missed = behind.chain, 1
        else:
            if behind is not None:
                self._wait()  # its integers on the host are about to change
                if any(feed.pages is own.pages for feed in feeds for own in behind.feeds):  # not all have ended
                    self._pause = self._missed = min(2 * self._missed, _PAUSE)
            columns = list(range(len(feeds)))
            chain = self._launch(feeds, rows, max(lengths))
        drawn = self._last = _Drawn(chain, feeds, rows, lengths, columns, [])
        length, batch = max(lengths), chain.drawn.shape[1]

        def land() -> tuple[Tokens, Chances]:
            self._wait()
            tokens, odds = (host.numpy()[:length, columns].T.tolist() for host in chain.host)
            drawn.tokens.extend(tokens)
            return tokens, odds

        return Drawing([list(range(-1 - b, -1 - b - own * batch, -batch)) for b, own in zip(columns, lengths, strict=True)], land)

    def draw_behind(self, numbers: Sequence[int]) -> None:
        """The next draft of those drawn for last, if the target's round under way judges this one; `numbers`: theirs in it."""
        last, roots = self._last, None if self._target is None else self._target.judging
        self._pause = max(self._pause - 1, 0)
        if last is None or roots is None or not last.tokens or self._pause:
            return
        size = bucket(len(numbers), GRAPH_ROWS), bucket(max(last.lengths), CHAIN_LENGTHS)
        chain = self._graphs.get(size, last.chain)  # no longer than this draft was
        batch, apart = chain.drawn.shape[1], last.chain.drawn.shape[1]
        self.fill(chain, last.feeds, last.rows)
        halves = chain.packed.fields.reshape(6, 2, batch)[:, :, : len(numbers)]
        halves[0, 1] = halves[0, 0]  # the roots
        halves[0, 0] = [-1 - MOST_DRAWN - roots[number] for number in numbers]
        halves[5, 0] = apart
        chain.packed.shaped.reshape(2, batch)[:, : len(numbers)] = last.lengths, last.columns
        self._replay(chain)
        self._behind = last._replace(chain=chain)

    def _columns(self, feeds: Sequence[Feed], lengths: Sequence[int]) -> list[int]:
        """Of each feed, its column in the draft under way; none where that is not the one to follow it."""
        if (behind := self._behind) is None or max(lengths) > len(behind.chain.drawn):
            return []
        known = {id(feed.pages): column for column, feed in enumerate(behind.feeds)}
        columns = [known.get(id(feed.pages), -1) for feed in feeds]
        size, placed = self._runner.pool.page_size, behind.chain.packed.placed
        for feed, own, column in zip(feeds, lengths, columns, strict=True):
            if column < 0 or not _follows(feed, behind, column):
                return []
            needed = -(-(feed.start + len(feed.tokens) + own - 1) // size)
            if len(feed.pages) < needed or (placed[column] or [])[:needed] != feed.pages[:needed]:
                return []
        return columns

    def _launch(self, feeds: Sequence[Feed], rows: Sequence[Row], length: int) -> Chain:
        longest = [feed for feed in feeds if len(feed.tokens) > 2]
        if longest:  # all but the newest two tokens of each
            self._runner.catch_up([feed._replace(tokens=feed.tokens[:-2]) for feed in longest])
        chain = self.graph(bucket(len(feeds), GRAPH_ROWS), bucket(length, CHAIN_LENGTHS))
        self.fill(chain, feeds, rows)
        self._replay(chain)
        return chain

    def _replay(self, chain: Chain) -> None:
        chain.replay()
        if self._done is not None:
            self._done.record()

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def fill(self, chain: Chain, feeds: Sequence[Feed], rows: Sequence[Row] = ()) -> None:
        """Rows 0..B-1 are the newest tokens, rows B..2B-1 the ones before them. Without `rows`, greedy."""
        packed, batch, count = chain.packed, chain.drawn.shape[1], len(feeds)
        size, scratch = self._runner.pool.page_size, self._runner.pool.pages - 1
        if packed.filled != count:
            packed.filled = count
            packed.fields[:] = 0
            packed.fields[1] = packed.order % batch
            packed.fields[5] = scratch * size
            packed.temperatures[:] = 0.0
            for b in range(count, batch):
                packed.place(b, [], scratch)
        heats = [0.0 if row.params.greedy else row.params.temperature for row in rows] or [0.0] * count
        packed.temperatures[:count] = heats
        packed.prefixes[: len(rows)] = [prefix_of(row.seed, row.sample) for row in rows]
        newest = [feed.start + len(feed.tokens) - 1 for feed in feeds]
        before = [at - (len(feed.tokens) > 1) for feed, at in zip(feeds, newest, strict=True)]  # a lone token is fed twice
        halves = packed.fields.reshape(6, 2, batch)[:, :, :count]
        halves[0] = [feed.tokens[-1] for feed in feeds], [feed.tokens[-2:][0] for feed in feeds]
        halves[2:4] = newest, before
        halves[5] = [
            [feed.pages[at // size] * size + at % size for feed, at in zip(feeds, own, strict=True)] for own in (newest, before)
        ]
        for b, feed in enumerate(feeds):
            packed.place(b, feed.pages, scratch)

    def graph(self, batch: int, length: int) -> Chain:
        """The graph of a draft: one of GRAPH_ROWS sequences, one of CHAIN_LENGTHS tokens."""
        key = (batch, length)
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, length)
        return self._graphs[key]

    def _capture(self, batch: int, length: int) -> Chain:
        runner, device = self._runner, self._runner.device
        packed = Packed(2 * batch, batch, runner.width, device, 1)
        for b in range(batch):
            packed.place(b, (), runner.pool.pages - 1)
        packed.fields[5] = (runner.pool.pages - 1) * runner.pool.page_size
        after = Packed(batch, 1, 1, device, 1).paged
        after.table = packed.paged.table
        drawn = runner.promised[: length * batch].view(length, batch)
        odds = torch.zeros(length, batch, device=device)

        host = tuple(torch.zeros(part.shape, dtype=part.dtype, pin_memory=device.type == "cuda") for part in (drawn, odds))

        def work() -> None:
            packed.send()
            before = packed.paged
            runner.cuda.kernels.after_verdict(before, batch)
            for step in range(length):
                last = runner.cuda.forward(before, runner.pool).last
                found = runner.cuda.kernels.choose(runner.cuda.logits(last[:batch]), before.rows(slice(0, batch)))
                runner.cuda.kernels.next_rows(found, before, after, (drawn, odds), step)
                before = after
            for kept, own in zip(host, (drawn, odds), strict=True):
                kept.copy_(own, non_blocking=True)

        replay = runner.capture(f"draft of {length} tokens for {batch}", work)
        return Chain(packed, replay, drawn, odds, host, after)  # type: ignore[arg-type]


def _follows(feed: Feed, before: _Drawn, column: int) -> bool:
    """Whether a feed is what the verdict on a draft left: its first tokens came true, and then came another."""
    root, guessed, judged = before.feeds[column], before.tokens[column], before.lengths[column]
    right = feed.start + len(feed.tokens) - root.start - len(root.tokens) - 1
    if right == judged:  # the last of them was never fed
        return list(feed.tokens[:-1]) == guessed[judged - 1 : judged]
    return 0 <= right < judged and len(feed.tokens) == 1 and feed.tokens[0] != guessed[right]
