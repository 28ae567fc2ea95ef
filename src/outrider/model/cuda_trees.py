"""Draft trees on a GPU: all levels of a tree are one graph, which begins with the text that the network has missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from outrider.model.cuda_chains import CHAIN_LENGTHS
from outrider.model.cuda_inputs import GRAPH_ROWS, bucket
from outrider.model.cuda_layer import CudaRows
from outrider.model.cuda_readback import Readback
from outrider.model.runner import Feed, Growth
from outrider.ops import GrownTree
from outrider.ops.cuda.launch import AttentionMetadata
from outrider.ops.cuda.tree_launch import GrowingTrees
from outrider.ops.cuda.tree_sizes import MAX_BRANCH, MAX_CHILDREN, MAX_KEPT, MAX_LEVELS, TreeSizes
from outrider.sampling import Row

if TYPE_CHECKING:
    from outrider.model.cuda_runner import CudaRunner

__all__ = [
    "PendingTrees", "Prepare", "Trees", "fixed_growth", "grow_by_model", "newest_first", "split_newest", "takes_at_once",
    "text_rows",
]  # fmt: skip

_MAX_ROWS = 512  # rows of a level, and of the texts that trees grow after

Levels = Callable[[GrowingTrees, AttentionMetadata], None]  # adds all levels; the first rows are the newest tokens
Prepare = Callable[[slice, Sequence[Feed], TreeSizes], None]  # feeds some sequences' early tokens, before a replay


class PendingTrees(NamedTuple):
    """Trees in flight on a device."""

    place: Callable[[AttentionMetadata], None]  # lays them out over the rows of the target's forward
    resolve: Callable[[], list[GrownTree]]  # synchronises with the device; no trees where logits leave no choice
    is_intact: Callable[[], bool]  # nothing has been grown over them


class _Graph:
    """The captured growth of trees of fixed sizes."""

    def __init__(self, trees: GrowingTrees, run: Callable[[Sequence[Feed], Sequence[Row], Sequence[int]], None]) -> None:
        self.trees, self._run = trees, run
        self._host = Readback(trees.finished)
        self._wait: Callable[[], Tensor] = lambda: trees.finished
        self.last: object = None  # stands for the trees grown last

    def start(self, feeds: Sequence[Feed], rows: Sequence[Row], numbers: Sequence[int]) -> object:
        """Grow trees, and bring them to the host when they are finished."""
        self._run(feeds, rows, numbers)
        self._wait = self._host.start(self.trees.finished)
        self.last = object()
        return self.last

    def wait(self, count: int) -> list[GrownTree]:
        """The first trees of those grown last."""
        return [GrownTree(*tree, []) for tree in self.trees.read(self._wait(), count)]


class Trees:
    """Trees by CUDA graph replay, for a network over its target's pages."""

    def __init__(self, name: str, runner: CudaRunner, levels: Levels) -> None:
        self._name, self._runner, self._levels = name, runner, levels
        self._graphs: dict[TreeSizes, _Graph] = {}

    def grow(
        self, feeds: Sequence[Feed], rows: Sequence[Row], rooms: Sequence[int], growth: Growth, prepare: Prepare
    ) -> list[GrownTree]:
        """Run the feeds and grow a tree after each, by temperature and noise alone; no trees where logits leave no choice."""
        grown: list[GrownTree] = []
        for part, sizes in _parts(len(feeds), growth):
            graph = self._start(part, sizes, (feeds[part], rows[part], rooms[part]), growth, prepare)
            if not (trees := graph.wait(len(feeds[part]))):
                return []
            grown += trees
        return grown

    def launch(
        self, feeds: Sequence[Feed], rows: Sequence[Row], places: Sequence[tuple[int, int]], growth: Growth, prepare: Prepare
    ) -> PendingTrees:
        """What `grow` does, without waiting, where one graph takes all.

        The places are of each tree the nodes that it may keep, and its root's row in the target's forward.
        """
        ((part, sizes),) = _parts(len(feeds), growth)
        rooms, roots = zip(*places, strict=True)
        graph = self._start(part, sizes, (feeds, rows, rooms), growth, prepare, roots)
        last, count = graph.last, len(feeds)
        return PendingTrees(graph.trees.place, lambda: graph.wait(count), lambda: graph.last is last)

    def _start(
        self, part: slice, sizes: TreeSizes, grown: tuple[Sequence[Feed], Sequence[Row], Sequence[int]], growth: Growth,
        prepare: Prepare, roots: Sequence[int] = (),
    ) -> _Graph:  # fmt: skip
        feeds, rows, rooms = grown
        graph, idle = self._graph(sizes), [0] * (sizes.batch - len(feeds))
        early, recent = split_newest(feeds, sizes.levels + 1)
        prepare(part, early, sizes)
        levels, roots = [_levels_of(growth)] * len(feeds), [*roots, *[-1] * (sizes.batch - len(roots))]
        ordered = newest_first(recent, sizes.batch, self._runner.pool.pages - 1)
        graph.start(ordered, rows, [*rooms, *idle, *levels, *idle, *roots])
        return graph

    def _graph(self, sizes: TreeSizes) -> _Graph:
        if sizes not in self._graphs:
            pool, device = self._runner.pool, self._runner.device
            trees = GrowingTrees(sizes, pool.page_size, (pool.pages - 1) * pool.page_size, device)

            def work(meta: AttentionMetadata) -> None:
                trees.begin(meta)
                self._levels(trees, meta)
                trees.finish()

            name = f"{self._name}'s trees of {sizes.levels} levels for {sizes.batch}"
            self._graphs[sizes] = _Graph(trees, self._runner.capture_rows(name, text_rows(sizes), work))
        return self._graphs[sizes]


def takes_at_once(count: int, growth: Growth) -> bool:
    """Whether one graph grows so many trees."""
    return len([*_parts(count, growth)]) == 1


def text_rows(sizes: TreeSizes) -> int:
    """Rows that trees begin with: all tokens that a round can commit, and room for three parameters of each sequence."""
    return sizes.batch * max(sizes.levels + 1, 3)


def fixed_growth(levels: int, beam: int, branch: int, room: int) -> Growth | None:
    """How trees of at most `room` nodes grow in one graph; None where one does not hold them."""
    needed, is_fixed = min(levels, room), levels <= MAX_LEVELS
    if needed > MAX_LEVELS or branch > MAX_BRANCH or beam * branch > MAX_CHILDREN or room > MAX_KEPT:
        return None
    return Growth(levels if is_fixed else needed, beam, branch, 0.0, is_fixed)


def grow_by_model(runner: CudaRunner, trees: GrowingTrees, meta: AttentionMetadata) -> None:
    """All levels of trees of a draft model."""
    levels = trees.sizes.levels
    for level in range(levels):
        rows = trees.rows(level)
        last = runner.cuda.forward(CudaRows(rows if level else meta), runner.pool).last[: len(rows.tokens)]
        trees.add(level, runner.cuda.logits(last), None)
        if level + 1 < levels:
            trees.expand(level)


def split_newest(feeds: Sequence[Feed], max_tokens: int) -> tuple[list[Feed], list[Feed]]:
    """The tokens of every feed before its last `max_tokens`, and those."""
    early = [feed._replace(tokens=feed.tokens[:-max_tokens]) for feed in feeds]
    starts = [feed.start + len(fed.tokens) for feed, fed in zip(feeds, early, strict=True)]
    return early, [
        feed._replace(start=start, tokens=feed.tokens[-max_tokens:]) for feed, start in zip(feeds, starts, strict=True)
    ]


def newest_first(feeds: Sequence[Feed], batch: int, idle_page: int) -> list[Feed]:
    """The newest tokens of `batch` sequences, then those before them."""
    return [
        *(feed._replace(start=feed.start + len(feed.tokens) - 1, tokens=feed.tokens[-1:]) for feed in feeds),
        *[Feed([idle_page], 0, [0])] * (batch - len(feeds)),
        *(feed._replace(tokens=feed.tokens[:-1]) for feed in feeds if len(feed.tokens) > 1),
    ]


def _levels_of(growth: Growth) -> int:
    return min(growth.levels, MAX_LEVELS)


def _parts(count: int, growth: Growth) -> Iterator[tuple[slice, TreeSizes]]:
    """Sequences in parts that one graph takes, and its sizes."""
    captured = _levels_of(growth) if growth.is_fixed else bucket(_levels_of(growth), CHAIN_LENGTHS)
    widest = max(captured + 1, growth.beam)
    max_batch = max(size for size in GRAPH_ROWS if size == 1 or size * widest <= _MAX_ROWS)
    for i in range(0, count, max_batch):
        sizes = TreeSizes(bucket(min(max_batch, count - i), GRAPH_ROWS), captured, growth.beam, growth.branch)
        yield slice(i, i + max_batch), sizes
