"""Draft chains of a draft model on a GPU: K tokens by one graph, and the overlapped launch of the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.core import FutureTokens
from outrider.model.cuda_inputs import GRAPH_ROWS, GraphInputs, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.runner import Chances, Feed, PendingChains, Tokens, Verified
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.sampling import Row

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["CHAIN_LENGTHS", "MAX_CHAIN_TOKENS", "Chains"]

CHAIN_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MAX_CHAIN_TOKENS = GRAPH_ROWS[-1] * CHAIN_LENGTHS[-1]


class Chain(NamedTuple):
    """A captured draft of K tokens for a fixed number of sequences."""

    inputs: GraphInputs
    replay: Any
    drawn: Tensor  # (K, B) int32, the beginning of the future-token buffer: one draft is in flight at a time
    probs: Tensor  # (K, B)
    host: tuple[Tensor, Tensor]
    after: AttentionMetadata  # rows of the later steps, kept alive because the graph writes to them


class Chains:
    """Draft chains by CUDA graph replay.

    While the target verifies a draft, the next draft can be launched: a kernel works out on the device where the verdict
    leaves every sequence.
    """

    def __init__(self, runner: CudaRunner, target: CudaRunner) -> None:
        self._runner, self._target = runner, target  # whose future-token buffer others may draw to
        self._graphs: dict[tuple[int, int], Chain] = {}
        self._done: Any = torch.cuda.Event() if runner.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def draw(self, feeds: Sequence[Feed], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        """Draw a chain after each feed."""
        longest = [feed for feed in feeds if len(feed.tokens) > 2]
        if longest:  # all but the newest two tokens of each
            self._runner.catch_up([feed._replace(tokens=feed.tokens[:-2]) for feed in longest])
        chain = self._chain(len(feeds), max(lengths))
        self.fill(chain, feeds, rows)
        return self._launched(chain, lengths)

    def draw_next(self, verified: Sequence[Verified], rows: Sequence[Row], lengths: Sequence[int]) -> PendingChains:
        """Draw the chains after those whose verification is in flight."""
        count = len(verified)
        chain = self._chain(count, max(lengths))
        self.fill(chain, [one.feed for one in verified], rows)
        batch = chain.drawn.shape[1]
        halves = chain.inputs.fields.reshape(6, 2, batch)[:, :, :count]
        halves[0, 1] = halves[0, 0]  # the roots
        halves[0, 0] = [-1 - one.choices.first for one in verified]
        halves[5, 0] = [one.drawn.stride for one in verified]
        verified_nodes = [one.choices.count - 1 for one in verified]
        chain.inputs.param_rows.reshape(2, batch)[:, :count] = verified_nodes, [one.drawn.first for one in verified]
        return self._launched(chain, lengths)

    def _chain(self, count: int, length: int) -> Chain:
        self._wait()  # for the draft before: its host inputs are about to change
        return self.graph(bucket(count, GRAPH_ROWS), bucket(length, CHAIN_LENGTHS))

    def _launched(self, chain: Chain, lengths: Sequence[int]) -> PendingChains:
        self._replay(chain)
        drawn = self._target.drawn = object()
        max_length, count, batch = max(lengths), len(lengths), chain.drawn.shape[1]

        def resolve() -> tuple[Tokens, Chances]:
            self._wait()
            tokens, probs = (host.numpy()[:max_length, :count].T.tolist() for host in chain.host)
            return tokens, probs

        future = [FutureTokens(b, length, batch) for b, length in enumerate(lengths)]
        return PendingChains(future, resolve, lambda: self._target.drawn is drawn)

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
