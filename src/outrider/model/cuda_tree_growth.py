"""Large draft trees of a draft model on a GPU: a step expands nodes of all sequences by one graph, which ranks their children.

The host chooses which nodes to expand (`best_first`). It sees a few tokens and chances of every row, never logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.model.best_first import BestFirst
from outrider.model.cuda_inputs import GraphInputs, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.runner import Feed, TreeGrowth
from outrider.ops.cuda.tree_launch import rank_rows
from outrider.sampling import Row

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = ["TreeGrower"]

_STEP_ROWS = (1, 4, 8, 16, 32, 64, 96, 128)  # of a step's graph; more rows take several replays
_TEXT_ROWS = 16  # tokens of a text that are read with the first step; those before are read by themselves
_STEPS = 8  # a tree takes about so many and a few more: each expands one part in so many of its nodes
_LEAST_BEAM = 8
_LEVELS = 32  # of the deepest tree
Grown = tuple[list[int], list[int], list[float]]  # tokens, parents, survival


class _Step(NamedTuple):
    """A captured step for a fixed number of rows and children."""

    inputs: GraphInputs
    replay: Any
    host: tuple[Tensor, Tensor]  # tokens and chances (rows, branch), in pinned memory


class _Row(NamedTuple):
    """What a row of a step holds, beside its sequence's."""

    tokens: NDArray[Any]
    places: NDArray[Any]  # in the sequence's pages
    positions: NDArray[Any]
    root: int  # the last place that the page table finds by position; the others are listed
    listed: NDArray[Any] | None = None  # (rows, depth) places of the path after the root


class TreeGrower:
    """Grows trees over a draft model's pages."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._steps: dict[tuple[int, int], _Step] = {}
        self._done: Any = torch.cuda.Event() if runner.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.rows_run: list[int] = []  # rows of the last trees' graphs, for whoever times them alone

    def grow(self, feeds: Sequence[Feed], rows: Sequence[Row], rooms: Sequence[int], growth: TreeGrowth) -> list[Grown]:
        """A tree after each feed, by temperature and noise alone; none at all where logits leave no choice."""
        self.rows_run = []
        cuts = [max(len(feed.tokens) - _TEXT_ROWS, 0) for feed in feeds]  # tokens whose children are not wanted
        texts = [feed._replace(start=feed.start + n, tokens=feed.tokens[n:]) for feed, n in zip(feeds, cuts, strict=True)]
        early = [feed._replace(tokens=feed.tokens[:n]) for feed, n in zip(feeds, cuts, strict=True) if n]
        if early:
            self._runner.catch_up(early)
        levels = min(growth.levels, _LEVELS)
        trees = [BestFirst(room, levels, growth.beam or max(room // _STEPS, _LEAST_BEAM)) for room in rooms]
        work = [(b, _text_rows(feed)) for b, feed in enumerate(texts)]
        while work:
            ranked = self._run(work, texts, rows, growth.branch)
            for (b, _), (tokens, chances) in zip(work, ranked, strict=True):
                if tokens.min() < 0:
                    return []
                tree = trees[b]
                count = len(tree.frontier)
                tree.add(tokens[-count:], chances[-count:])
            work = [(b, _node_rows(tree, texts[b])) for b, tree in enumerate(trees) if len(tree.frontier)]
        return [tree.finish() for tree in trees]

    def _run(
        self, work: Sequence[tuple[int, _Row]], feeds: Sequence[Feed], rows: Sequence[Row], branch: int
    ) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Tokens and chances of the children of every row, by sequence."""
        parts: list[list[NDArray[Any]]] = [[], []]
        pieces = _pieces(work, _STEP_ROWS[-1])
        for piece in pieces:
            step = self._step(bucket(sum(len(part.tokens) for _, part in piece), _STEP_ROWS), branch)
            count = self._fill(step.inputs, piece, feeds, rows)
            step.replay()
            if self._done is not None:
                self._done.record()
                self._done.synchronize()
            for kept, host in zip(parts, step.host, strict=True):
                kept.append(host[:count].numpy().copy())
        tokens, chances = (np.concatenate(part) for part in parts)
        ends = np.cumsum([len(part.tokens) for _, part in work])[:-1]
        return list(zip(np.split(tokens, ends), np.split(chances, ends), strict=True))

    def _fill(self, inputs: GraphInputs, piece: Sequence[tuple[int, _Row]], feeds: Sequence[Feed], rows: Sequence[Row]) -> int:
        """Fill a step's inputs; returns how many rows it has."""
        size, scratch, at = self._runner.pool.page_size, self._runner.pool.pages - 1, 0
        inputs.param_rows[:] = -1
        for number, (b, part) in enumerate(piece):
            feed, count = feeds[b], len(part.tokens)
            here, pages = slice(at, at + count), np.asarray(feed.pages)
            inputs.place(number, feed.pages, scratch, feed.rotary_start)
            slots = pages[part.places // size] * size + part.places % size
            roots = part.positions if part.listed is None else np.full(count, part.root)
            first = np.full(count, feed.first_key)
            inputs.fields[:, here] = (part.tokens, np.full(count, number), part.positions, roots, first, slots)
            if part.listed is not None:
                inputs.ancestors[here, : part.listed.shape[1]] = pages[part.listed // size] * size + part.listed % size
            inputs.set_noise(here, [rows[b]])
            at += count
        inputs.filled = 0
        inputs.pad(at, scratch, size)
        self.rows_run.append(inputs.rows)
        return at

    def _step(self, rows: int, branch: int) -> _Step:
        if (rows, branch) not in self._steps:
            self._steps[rows, branch] = self._capture(rows, branch)
        return self._steps[rows, branch]

    def _capture(self, rows: int, branch: int) -> _Step:
        runner, device = self._runner, self._runner.device
        inputs = GraphInputs(rows, rows + 1, runner.width, device, _LEVELS)
        inputs.pad(0, runner.pool.pages - 1, runner.pool.page_size)
        inputs.param_rows[:] = -1
        pinned = device.type == "cuda"
        host = (
            torch.zeros(rows, branch, dtype=torch.int32, pin_memory=pinned),
            torch.zeros(rows, branch, pin_memory=pinned),
        )

        def work() -> None:
            inputs.send()
            meta = inputs.meta
            logits = runner.cuda.logits(runner.cuda.forward(CudaRows(meta), runner.pool).last)
            ranked = rank_rows(logits, None, (meta.temperatures, meta.prefixes, meta.positions), branch)
            for host_values, values in zip(host, ranked, strict=True):
                host_values.copy_(values, non_blocking=True)

        return _Step(inputs, runner.capture(f"tree step of {rows} rows", work), host)

    def replays(self, rows: Sequence[int], branch: int) -> list[Any]:
        """The graphs of so many rows each, to time them alone."""
        return [self._step(count, branch).replay for count in rows]


def _text_rows(feed: Feed) -> _Row:
    places = feed.start + np.arange(len(feed.tokens))
    return _Row(np.asarray(feed.tokens), places, places, int(places[-1]))


def _node_rows(tree: BestFirst, feed: Feed) -> _Row:
    """The frontier's rows, one slot each after the text, in the order in which nodes are expanded."""
    root = feed.start + len(feed.tokens) - 1
    paths, depths = tree.paths + root + 1, tree.depths
    own = paths[np.arange(len(paths)), depths - 1]
    return _Row(tree.tokens, own, root + depths, root, paths[:, : int(depths.max())])


def _pieces(work: Sequence[tuple[int, _Row]], most: int) -> list[list[tuple[int, _Row]]]:
    """The rows in pieces of at most so many, in order. Rows of one step do not see each other but where they are text."""
    pieces: list[list[tuple[int, _Row]]] = [[]]
    room = most
    for b, part in work:
        first = 0
        while first < len(part.tokens):
            if not room:
                pieces.append([])
                room = most
            taken = min(room, len(part.tokens) - first)
            cut = slice(first, first + taken)
            listed = None if part.listed is None else part.listed[cut]
            pieces[-1].append((b, _Row(part.tokens[cut], part.places[cut], part.positions[cut], part.root, listed)))
            first, room = first + taken, room - taken
    return pieces
