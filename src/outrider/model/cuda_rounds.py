"""Rounds of decode rows on a GPU: filled, replayed as CUDA graphs, and read back when the host asks for their scores.

A round may be launched while the one before it runs. Its rows read that round's choices in the future-token buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.core import Batch, Drafts, FutureTokens, PendingDrafts, Scores, Tree
from outrider.model.cuda_inputs import GRAPH_ROWS, GraphInputs, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.cuda_sampling_metadata import SamplingMetadata
from outrider.model.cuda_states import RowRoom
from outrider.model.runner import Feed, Round
from outrider.sampling import choose, rows_of

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["DecodeRounds", "Graph", "LaunchedRound", "choose_on_host"]


class Side(NamedTuple):
    """The host's half of a graph: a graph has two, so that one can be filled while the device may still read the other."""

    inputs: GraphInputs
    choices: Tensor  # int32, in pinned memory
    touched: Tensor  # experts read by each layer that has some, likewise
    done: Any  # a CUDA event: the launch that used this side last is over

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def experts(self) -> float:
        """Distinct experts that the launch has read, the mean over layers that have some; 0 where none has."""
        touched = self.touched.tolist()
        return sum(touched) / len(touched) if touched else 0.0


class Graph(NamedTuple):
    """A captured forward for a fixed number of rows, with logits and choices."""

    sides: tuple[Side, Side]
    replay: Callable[[], None]
    outputs: list[Any]  # logits and taps (or None) of the last replay; every graph shares their memory
    chosen: Tensor  # on the device, in the future-token buffer
    touched: Tensor  # experts read by each layer that has some, on the device

    def start(self, side: Side) -> None:
        """Send a side's inputs, run the forward, and bring its choices back."""
        side.inputs.send()
        self.replay()
        side.choices.copy_(self.chosen, non_blocking=True)
        if len(self.touched):
            side.touched.copy_(self.touched, non_blocking=True)
        if side.done is not None:
            side.done.record()


@dataclass(slots=True)
class LaunchedRound:
    """A round whose forward is in flight."""

    rounds: DecodeRounds
    batch: Batch
    trees: Sequence[Tree]
    roots: list[int]  # of each sequence among the rows
    side: Side
    logits: Tensor  # valid until the next launch
    taps: Tensor | None
    by_host: list[int]  # sequences that the host must choose for

    @property
    def choices(self) -> Sequence[FutureTokens]:
        if self.rounds.last is not self or self.by_host:
            return ()
        first = self.rounds.first_choice
        return [FutureTokens(first + root, 1 + len(tree.tokens)) for root, tree in zip(self.roots, self.trees, strict=True)]

    def wait(self) -> Scores:
        """The round's host synchronisation."""
        self.side.wait()
        choices = self.side.choices[: len(self.logits)].tolist()
        logits = choose_on_host(self.logits, choices, self.by_host, self.batch, self.trees, self.roots)
        return Scores(logits, list(self.roots), list(self.roots), self.taps, {}, choices, experts=self.side.experts)


class DecodeRounds:
    """The graphs of rounds, by number of rows, and the round launched last."""

    def __init__(self, runner: CudaRunner, sampling: SamplingMetadata, first_choice: int) -> None:
        self._runner, self._sampling = runner, sampling
        self.first_choice = first_choice  # the place of row 0's choice in the future-token buffer
        self.last: LaunchedRound | None = None  # whose choices are in that buffer
        self._graphs: dict[tuple[int, tuple[int, ...]], Graph] = {}
        self._turn = 0

    def launch_plain(self, batch: Batch, taps: tuple[int, ...]) -> LaunchedRound | None:
        """Launch a round of one row per sequence; None where the batch is not one."""
        sequences, rows = batch.sequences, len(batch.sequences)
        starts = [seq.cached for seq in sequences]
        if rows > self._runner.options.max_graph_rows or [len(seq.tokens) - 1 for seq in sequences] != starts:
            return None
        if any(seq.request.params.prompt_logprobs is not None for seq in sequences):
            return None
        if batch.future:
            starts, tokens = [start + 1 for start in starts], [-1 - future.first for future in batch.future]
        else:
            tokens = [seq.tokens[-1] for seq in sequences]
        size, feeds = bucket(rows, GRAPH_ROWS), []
        if self._runner.decoder.spec.recurrent:
            feeds = [Feed(seq.pages, start, (0,), state=seq.state) for seq, start in zip(sequences, starts, strict=True)]
            size = self._size(feeds)
        if not size:
            return None
        graph, side = self._take(size, taps)
        self._fill_plain(side.inputs, batch, starts, tokens)
        if side.inputs.recurrent is not None:
            side.inputs.recurrent.fill(feeds, overlaps=bool(batch.future))
        return self._start(graph, side, batch, [Tree([], [], [])] * rows, list(range(rows)))

    def launch(self, batch: Batch, drafts: Drafts | PendingDrafts, laid: Round, taps: tuple[int, ...]) -> LaunchedRound:
        """Launch a round of roots and draft nodes."""
        graph, side = self._take(self._size(laid.feeds), taps)
        self._runner.fill(side.inputs, laid.feeds)
        return self._start(graph, side, batch, drafts.per_sequence, laid.roots)

    def feed(self, feeds: Sequence[Feed]) -> None:
        """Run rows for the keys and values that they write."""
        graph, side = self._take(self._size(feeds), ())
        side.inputs.temperatures[:], side.inputs.sampled = 0.0, None
        self._runner.fill(side.inputs, feeds)
        graph.start(side)
        self.last = None

    def graph(self, rows: int, taps: tuple[int, ...] = ()) -> Graph:
        """The graph of a forward and its choices. `rows` is one of GRAPH_ROWS."""
        key = (rows, taps)
        if key not in self._graphs:
            self._graphs[key] = self._capture(rows, taps)
        return self._graphs[key]

    @property
    def graphs(self) -> dict[int, Graph]:
        """The graphs captured so far, by rows."""
        return {rows: graph for (rows, _), graph in self._graphs.items()}

    def has(self, rows: int, taps: tuple[int, ...] = ()) -> bool:
        return (rows, taps) in self._graphs

    def fits(self, feeds: Sequence[Feed]) -> bool:
        """Whether a graph holds these rows, with what recurrent layers replay before them."""
        return self._size(feeds) > 0

    def _size(self, feeds: Sequence[Feed]) -> int:
        """The rows of the smallest graph that holds these; 0 where none does."""
        rows = sum(len(feed.tokens) + len(feed.nodes) for feed in feeds)
        if not self._runner.decoder.spec.recurrent:
            return bucket(rows, GRAPH_ROWS) if rows <= GRAPH_ROWS[-1] else 0
        need = RowRoom.of_feeds(feeds)
        return next((size for size in GRAPH_ROWS if RowRoom.of_graph(size).holds(need)), 0)

    def _take(self, size: int, taps: tuple[int, ...]) -> tuple[Graph, Side]:
        """The graph of so many rows, and its side that was used longer ago."""
        graph = self.graph(size, taps)
        self._turn = 1 - self._turn
        side = graph.sides[self._turn]
        side.wait()
        return graph, side

    def _start(self, graph: Graph, side: Side, batch: Batch, trees: Sequence[Tree], roots: list[int]) -> LaunchedRound:
        rows = sum(1 + len(tree.tokens) for tree in trees)
        by_host = self._sampling.fill(side.inputs, batch, trees, roots)
        graph.start(side)
        logits, tapped = graph.outputs
        tapped = None if tapped is None else tapped[:rows].flatten(1).clone()  # the next replay overwrites them
        self.last = LaunchedRound(self, batch, trees, roots, side, logits[:rows], tapped, by_host)
        return self.last

    def _fill_plain(self, inputs: GraphInputs, batch: Batch, starts: list[int], fed: list[int]) -> None:
        rows, pool = len(starts), self._runner.pool
        size, scratch = pool.page_size, pool.pages - 1
        tokens, numbers, positions, roots, _, slots = inputs.fields
        tokens[:rows] = fed
        numbers[:rows] = inputs.order[:rows]
        positions[:rows] = starts
        roots[:rows] = positions[:rows]
        slots[:rows] = [seq.pages[at // size] * size + at % size for seq, at in zip(batch.sequences, starts, strict=True)]
        for b, seq in enumerate(batch.sequences):
            inputs.place(b, seq.pages, scratch, seq.rotary_start)
        if inputs.filled != rows:
            inputs.filled = rows
            inputs.fields[4] = 0
            inputs.pad(rows, scratch, size)

    def _capture(self, rows: int, taps: tuple[int, ...]) -> Graph:
        runner = self._runner
        device, on_gpu = runner.device, runner.device.type == "cuda"
        recurrent = runner.recurrent_inputs(RowRoom.of_graph(rows))
        inputs = GraphInputs(rows, rows, runner.width, device, recurrent=recurrent)
        sides = []
        for half in (inputs, inputs.other_side()):
            runner.fill(half, [])
            host, touched = (torch.zeros(n, dtype=torch.int32, pin_memory=on_gpu) for n in (rows, len(runner.cuda.touched)))
            sides.append(Side(half, host, touched, torch.cuda.Event() if on_gpu else None))  # type: ignore[no-untyped-call]
        inputs.send()
        chosen = runner.chosen[:rows]
        outputs: list[Any] = []

        def work() -> None:
            forward = runner.cuda.forward(CudaRows(inputs.meta, recurrent=recurrent), runner.pool, taps)
            logits = runner.cuda.logits(forward.last)
            self._sampling.table.choose(logits, inputs.meta, chosen)
            outputs[:] = [logits, forward.taps]

        replay = runner.capture(f"round of {rows} rows", work)
        return Graph((sides[0], sides[1]), replay, outputs, chosen, runner.cuda.touched)


def choose_on_host(
    logits: Tensor, choices: list[int], by_host: list[int], batch: Batch, trees: Sequence[Tree], roots: Sequence[int]
) -> Tensor:
    """Choose for the sequences that the device does not support. Returns the logits, on the host where it needs them."""
    if by_host or any(seq.request.params.logprobs is not None for seq in batch.sequences):
        logits = logits.cpu()
    for b in by_host:
        rows = rows_of(batch.sequences[b], trees[b].tokens, trees[b].parents)
        first = roots[b]
        choices[first : first + len(rows)] = choose(logits[first : first + len(rows)], rows)
    return logits
