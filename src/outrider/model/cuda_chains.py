"""Draft chains of a draft model on a GPU: K tokens by one graph, and the overlapped launch of the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.model.cuda_inputs import GRAPH_ROWS, GraphInputs, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.runner import Chances, Feed, PendingChains, Tokens
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.sampling import Row

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["CHAIN_LENGTHS", "MAX_CHAIN_TOKENS", "Chains"]

CHAIN_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MAX_CHAIN_TOKENS = GRAPH_ROWS[-1] * CHAIN_LENGTHS[-1]
_PAUSE = 16  # maximum drafts without overlap after wasted ones; the pause doubles with each


class Chain(NamedTuple):
    """A captured draft of K tokens for a fixed number of sequences."""

    inputs: GraphInputs
    replay: Any
    drawn: Tensor  # (K, B) int32, the beginning of the future-token buffer: one draft is in flight at a time
    probs: Tensor  # (K, B)
    host: tuple[Tensor, Tensor]
    after: AttentionMetadata  # rows of the later steps, kept alive because the graph writes to them


class _Launched(NamedTuple):
    """A draft that was launched."""

    chain: Chain
    feeds: Sequence[Feed]
    rows: Sequence[Row]
    lengths: Sequence[int]
    columns: list[int]  # each feed's column in `chain.drawn`
    tokens: list[list[int]]  # each feed's tokens, once the host has synchronised


class Chains:
    """Draft chains by CUDA graph replay.

    While the target verifies a draft, the next draft can be launched: a kernel works out on the device where the verdict
    leaves every sequence. The next call wants that draft unless a sequence joined or the plan changed; otherwise the
    launch was wasted. Its keys and values then lie past the text, where the next draft overwrites them.
    """

    def __init__(self, runner: CudaRunner, target: CudaRunner | None) -> None:
        self._runner, self._target = runner, target
        self._graphs: dict[tuple[int, int], Chain] = {}
        self._done: Any = torch.cuda.Event() if runner.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: _Launched | None = None  # the last draft
        self._overlapped: _Launched | None = None  # the draft whose continuation is in flight
        self._pause, self._misses = 0, 1

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        columns = self._columns(feeds, lengths)
        launched, self._overlapped = self._overlapped, None
        if launched is not None and columns:
            chain, self._misses = launched.chain, 1
        else:
            if launched is not None:
                self._wait()  # its host inputs are about to change
                if any(feed.pages is old.pages for feed in feeds for old in launched.feeds):  # not all have ended
                    self._pause = self._misses = min(2 * self._misses, _PAUSE)
            columns = list(range(len(feeds)))
            chain = self._launch(feeds, rows, max(lengths))
        drawn = self._last = _Launched(chain, feeds, rows, lengths, columns, [])
        max_length, batch = max(lengths), chain.drawn.shape[1]

        def resolve() -> tuple[Tokens, Chances]:
            self._wait()
            tokens, probs = (host.numpy()[:max_length, columns].T.tolist() for host in chain.host)
            drawn.tokens.extend(tokens)
            return tokens, probs

        places = zip(columns, lengths, strict=True)
        return PendingChains([list(range(-1 - b, -1 - b - length * batch, -batch)) for b, length in places], resolve)

    def launch_next_draft(self, numbers: Sequence[int]) -> None:
        """Launch the next draft, if the target's round in flight verifies the last one. `numbers` are their rows in its batch."""
        last, roots = self._last, None if self._target is None else self._target.verifying_roots
        self._pause = max(self._pause - 1, 0)
        if last is None or roots is None or not last.tokens or self._pause:
            return
        size = bucket(len(numbers), GRAPH_ROWS), bucket(max(last.lengths), CHAIN_LENGTHS)
        chain = self._graphs.get(size, last.chain)  # no longer than this draft was
        batch, stride = chain.drawn.shape[1], last.chain.drawn.shape[1]
        self.fill(chain, last.feeds, last.rows)
        halves = chain.inputs.fields.reshape(6, 2, batch)[:, :, : len(numbers)]
        halves[0, 1] = halves[0, 0]  # the roots
        halves[0, 0] = [-1 - MAX_CHAIN_TOKENS - roots[number] for number in numbers]
        halves[5, 0] = stride
        chain.inputs.param_rows.reshape(2, batch)[:, : len(numbers)] = last.lengths, last.columns
        self._replay(chain)
        self._overlapped = last._replace(chain=chain)

    def _columns(self, feeds: Sequence[Feed], lengths: Sequence[int]) -> list[int]:
        """Each feed's column in the overlapped draft; empty where that draft does not continue these feeds."""
        if (launched := self._overlapped) is None or max(lengths) > len(launched.chain.drawn):
            return []
        known = {id(feed.pages): column for column, feed in enumerate(launched.feeds)}
        columns = [known.get(id(feed.pages), -1) for feed in feeds]
        size, placed = self._runner.pool.page_size, launched.chain.inputs.placed
        for feed, length, column in zip(feeds, lengths, columns, strict=True):
            if column < 0 or not _follows(feed, launched, column):
                return []
            needed = -(-(feed.start + len(feed.tokens) + length - 1) // size)
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
        """Fill the inputs: rows 0..B-1 are the newest tokens, rows B..2B-1 the ones before them. Without `rows`, greedy."""
        inputs, batch, count = chain.inputs, chain.drawn.shape[1], len(feeds)
        size, scratch = self._runner.pool.page_size, self._runner.pool.pages - 1
        if inputs.filled != count:
            inputs.filled = count
            inputs.fields[:] = 0
            inputs.fields[1] = inputs.order % batch
            inputs.fields[5] = scratch * size
            inputs.temperatures[:] = 0.0
            for b in range(count, batch):
                inputs.place(b, [], scratch)
        inputs.temperatures[:count] = 0.0
        inputs.set_noise(slice(len(rows)), rows)
        newest = [feed.start + len(feed.tokens) - 1 for feed in feeds]
        before = [at - (len(feed.tokens) > 1) for feed, at in zip(feeds, newest, strict=True)]  # a lone token is fed twice
        halves = inputs.fields.reshape(6, 2, batch)[:, :, :count]
        halves[0] = [feed.tokens[-1] for feed in feeds], [feed.tokens[-2:][0] for feed in feeds]
        halves[2:4] = newest, before
        halves[5] = [
            [feed.pages[at // size] * size + at % size for feed, at in zip(feeds, positions, strict=True)]
            for positions in (newest, before)
        ]
        for b, feed in enumerate(feeds):
            inputs.place(b, feed.pages, scratch, feed.rotary_start)

    def graph(self, batch: int, length: int) -> Chain:
        """The graph of a draft. `batch` is one of GRAPH_ROWS and `length` one of CHAIN_LENGTHS."""
        key = (batch, length)
        if key not in self._graphs:
            self._graphs[key] = self._capture(batch, length)
        return self._graphs[key]

    def _capture(self, batch: int, length: int) -> Chain:
        runner, device = self._runner, self._runner.device
        inputs = GraphInputs(2 * batch, batch, runner.width, device, 1)
        for b in range(batch):
            inputs.place(b, (), runner.pool.pages - 1)
        inputs.fields[5] = (runner.pool.pages - 1) * runner.pool.page_size
        after = GraphInputs(batch, 1, 1, device, 1).meta
        after.table, after.starts = inputs.meta.table, inputs.meta.starts
        drawn = runner.future_tokens[: length * batch].view(length, batch)
        probs = torch.zeros(length, batch, device=device)

        host = tuple(torch.zeros(part.shape, dtype=part.dtype, pin_memory=device.type == "cuda") for part in (drawn, probs))

        def work() -> None:
            inputs.send()
            before = inputs.meta
            runner.cuda.kernels.after_verdict(before, batch)
            for step in range(length):
                last = runner.cuda.forward(CudaRows(before), runner.pool).last
                choice = runner.cuda.kernels.choose(runner.cuda.logits(last[:batch]), before.rows(slice(0, batch)))
                runner.cuda.kernels.next_rows(choice, before, after, (drawn, probs), step)
                before = after
            for host_values, device_values in zip(host, (drawn, probs), strict=True):
                host_values.copy_(device_values, non_blocking=True)

        replay = runner.capture(f"draft of {length} tokens for {batch}", work)
        return Chain(inputs, replay, drawn, probs, host, after)  # type: ignore[arg-type]


def _follows(feed: Feed, before: _Launched, column: int) -> bool:
    """Whether a feed is what the verdict on a draft leaves: an accepted beginning of it, then another token."""
    root, guessed, verified = before.feeds[column], before.tokens[column], before.lengths[column]
    accepted = feed.start + len(feed.tokens) - root.start - len(root.tokens) - 1
    if accepted == verified:  # the last of them was never fed
        return list(feed.tokens[:-1]) == guessed[verified - 1 : verified]
    return 0 <= accepted < verified and len(feed.tokens) == 1 and feed.tokens[0] != guessed[accepted]
