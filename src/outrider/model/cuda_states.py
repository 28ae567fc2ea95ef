"""States of recurrent layers on a GPU: their pool, and the rows of a forward as paths along which they go.

A forward reads states that nobody writes to any more and leaves new ones in places of their own, so it may run again. Accepted
nodes of the last draft are replayed from their inputs, and every branch of a tree goes its own way from its root. Where all of
that lies is a list of integers, which is sent before the forward; so graphs serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.cache import Past, Pending, Place, Places, SequenceState, StateCache, StoredRows
from outrider.model.memory import StateSizes
from outrider.model.recurrent import Recurrent
from outrider.model.recurrent_rows import LaidLanes, Lane, lay_out_lanes, open_lane
from outrider.ops.cuda.recurrence_launch import DeltaShape, DeltaState, RowBuffers, RowPaths

if TYPE_CHECKING:
    from outrider.model.runner import Feed

__all__ = ["DeviceStates", "RecurrentInputs", "RowRoom", "delta_shape"]

_BORDERS = 8  # states at the ends of pages that one sequence leaves in a forward
_NOWHERE = -1


class RowRoom(NamedTuple):
    """How many rows a forward feeds and replays, and how many steps its paths have together."""

    rows: int
    replays: int
    steps: int

    def holds(self, other: RowRoom) -> bool:
        return self.rows >= other.rows and self.replays >= other.replays and self.steps >= other.steps

    @classmethod
    def of_graph(cls, rows: int) -> RowRoom:
        """The room of a graph of so many rows."""
        return cls(rows, rows + 16, 16 * rows + 64)

    @classmethod
    def of_feeds(cls, feeds: Sequence[Feed]) -> RowRoom:
        """The room that feeds need."""
        rows = replays = steps = 0
        for feed in feeds:
            replayed = _open(feed).past.rows
            text = len(feed.tokens) + (replayed if feed.tokens else 0)
            paths = _paths(feed.parents, feed.known)
            rows += len(feed.tokens) + len(feed.nodes)
            replays += replayed
            steps += sum(text + len(path) for path in paths) if paths else text
        return cls(rows, replays, steps)


class DeviceStates:
    """The pool: states of all recurrent layers under one number, and inputs of draft nodes under another."""

    def __init__(self, mixers: Sequence[Recurrent], page_size: int, sizes: StateSizes, device: torch.device) -> None:
        self.device, self.page_size = device, page_size
        self.nodes = Places(sizes.nodes)
        self.cache = StateCache(sizes.borders, self.nodes, sizes.sequences)
        self.states = Places(sizes.running + sizes.borders, self.cache.drop_oldest)
        self._borders: WeakSet[Place] = WeakSet()  # at most so many, so that sequences that run always find places
        self.shapes = [delta_shape(mixer) for mixer in mixers]
        self.kernel = self.shapes[0].kernel
        self.layers = [_layer_state(shape, self.states.count, sizes.nodes, device) for shape in self.shapes]

    def take(self) -> Place:
        """A place for a state that is needed."""
        place = self.states.take()
        if place is None:
            raise MemoryError(f"all {self.states.count} places for recurrent states are taken; lower max_num_seqs")
        return place

    def take_border(self, place: Place | None) -> Place | None:
        """A place for a state at the end of a page, which may be taken already; None where there are as many as there may be."""
        while len(self._borders) >= (self.cache.capacity or 0):
            if not self.cache.drop_oldest():
                return None
        place = place or self.states.take()
        if place is not None:
            self._borders.add(place)
        return place

    def take_nodes(self, count: int) -> StoredRows:
        """Places for the inputs of draft nodes."""
        places = [place for place in (self.nodes.take() for _ in range(count)) if place is not None]
        if len(places) < count:
            raise MemoryError(f"all {self.nodes.count} places for draft nodes are taken; draft fewer tokens")
        return StoredRows(places)


class RecurrentInputs:
    """The integers of a forward's recurrent rows on the host and on the device, moved by one copy, and the kernels' buffers."""

    def __init__(self, pool: DeviceStates, room: RowRoom, beside: RecurrentInputs | None = None) -> None:
        """With `beside` they are sent to the same place on the device as that one's."""
        self._pool, self.room = pool, room
        device, every, held = pool.device, room.replays + room.rows, pool.kernel - 1
        shapes = ((1, room.replays), (every, held), (1, every), (1, every), (1, room.rows), (1, room.rows + 1), (room.steps, 2))
        words = sum(map(_words, shapes))
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device: Tensor = torch.zeros(words, dtype=torch.int32, device=device) if beside is None else beside._device
        on_host = [part.numpy() for part in _parts(self._host, shapes)]
        self._replayed, self._kept, self._saved, self._pasts, self._firsts = (on_host[i][0] for i in (0, 2, 3, 4, 5))
        self._taps, self._steps = on_host[1], on_host[6]
        replayed, taps, kept, saved, pasts, firsts, steps = _parts(self._device, shapes)
        self.paths = RowPaths(replayed[0], taps, kept[0], saved[0], pasts[0], firsts[0], steps)
        shared = {shape: RowBuffers.of(shape, room.rows, room.replays, device) for shape in set(pool.shapes) if beside is None}
        self.buffers: list[RowBuffers] = [shared[shape] for shape in pool.shapes] if beside is None else beside.buffers
        self.fill([])

    def other_side(self) -> RecurrentInputs:
        """As many integers on the host, for the same place on the device."""
        return RecurrentInputs(self._pool, self.room, self)

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def layer(self, number: int) -> tuple[DeltaState, RowBuffers]:
        """The pool of a recurrent layer, and its buffers."""
        return self._pool.layers[number], self.buffers[number]

    def fill(self, feeds: Sequence[Feed], overlaps: bool = False) -> None:
        """Lay out the rows of feeds, and record in their sequences what the forward will leave there.

        With `overlaps` it is launched before the verdict on the forward before.
        """
        laid = lay_out_lanes(feeds, list(map(_open, feeds)))
        for part in (self._replayed, self._taps, self._kept, self._saved, self._pasts):  # rows that are padding read nothing
            part.fill(_NOWHERE)
        self._place_taps(laid)
        replayed = [number for lane in laid.lanes if lane.past.rows for number in lane.past.inputs[0].numbers]
        self._replayed[: len(replayed)] = replayed
        steps: list[int] = []
        firsts = [0]
        for feed, lane in zip(feeds, laid.lanes, strict=True):
            past = lane.past.states[0].number if lane.past.states else _NOWHERE
            places, unseen = {} if feed.state is None else self._keep(lane, laid.first, overlaps), {*lane.tokens, *lane.nodes}
            for path in _lane_paths(feed, lane):
                self._pasts[len(firsts) - 1] = past
                for row in path:  # a row that several paths share has its result, and leaves its state, in the first of them
                    steps += (2 * self._number(row, laid.first) + (row in unseen), places.pop(row, _NOWHERE))
                    unseen.discard(row)
                firsts.append(len(steps) // 2)
        self._steps.reshape(-1)[: len(steps)] = steps
        self._firsts[: len(firsts)] = firsts
        self._firsts[len(firsts) :] = firsts[-1]

    def _number(self, row: int, first: int) -> int:
        """A row's number for the kernels, where replayed rows are padded."""
        return row if row < first else self.room.replays + row - first

    def _place_taps(self, laid: LaidLanes) -> None:
        """Which rows, or rows of windows, the convolution of every row sees before it."""
        held = self._pool.kernel - 1
        begins = [_window(lane.past.states[0], held) if lane.past.states else (-1,) * held for lane in laid.lanes]
        taps: list[tuple[int, ...]] = []
        after: list[tuple[int, ...]] = []
        for row, previous in enumerate(laid.before):
            taps.append(after[previous] if previous >= 0 else begins[-1 - previous])
            after.append((*taps[row][1:], self._number(row, laid.first)))
        if laid.first:
            self._taps[: laid.first] = taps[: laid.first]
        if len(taps) > laid.first:
            self._taps[self.room.replays :][: len(taps) - laid.first] = taps[laid.first :]

    def _keep(self, lane: Lane, first: int, overlaps: bool) -> dict[int, int]:
        """Record in a sequence what the forward leaves there. Returns the places of states, by the rows they follow."""
        pool, state = self._pool, lane.state
        nodes = pool.take_nodes(len(lane.nodes))
        for row, number in zip(lane.nodes, nodes.numbers, strict=True):
            self._kept[self._number(row, first)] = number
        if lane.nodes_only:
            assert state.pending is not None
            known = lane.past.inputs[0][:] if lane.past.rows else StoredRows(())
            state.pending = state.pending._replace(nodes=[StoredRows((*known, *nodes))])
            return {}
        kept = {row: pool.take() for row in (lane.tokens[-1:] if len(lane.tokens) == 1 else lane.tokens[-2:])}
        borders = self._keep_borders(lane, kept)
        before = (kept[lane.tokens[-2]],) if len(lane.tokens) > 1 else ()  # a lone token is fed again from where it began
        after, root = (kept[lane.tokens[-1]],), lane.start + len(lane.tokens) - 1
        state.keep(lane.start, lane.past, Pending(root, before, after, [nodes] if nodes else []), overlaps)
        if state.borders is not None:
            state.borders |= borders
            for page in list(state.borders)[:-_BORDERS]:
                del state.borders[page]
        for row, place in kept.items():
            self._saved[self._number(row, first)] = place.number
        return {row: place.number for row, place in kept.items()}

    def _keep_borders(self, lane: Lane, kept: dict[int, Place]) -> dict[int, tuple[Place]]:
        """States at the ends of pages, as many as there is room for: the last ones, and others at equal distances."""
        if lane.state.borders is None:
            return {}
        pages = lane.borders(self._pool.page_size)
        stride, made = -(-len(pages) // _BORDERS), {}
        for page in sorted(pages)[::-1][:: max(stride, 1)]:
            place = self._pool.take_border(kept.get(pages[page]))
            if place is None:
                break
            kept[pages[page]] = place
            made[page] = (place,)
        return dict(sorted(made.items()))


def delta_shape(mixer: Recurrent) -> DeltaShape:
    """A mixer's sizes, as the kernels take them."""
    return DeltaShape(mixer.heads, mixer.head_dim, mixer.key_heads, mixer.key_dim, mixer.kernel)


def _layer_state(shape: DeltaShape, states: int, nodes: int, device: torch.device) -> DeltaState:
    memories = torch.zeros(states, shape.heads, shape.head_dim, shape.key_dim, device=device)
    windows = torch.zeros(states, shape.kernel - 1, shape.channels, device=device)
    return DeltaState(memories, windows, torch.zeros(nodes, shape.stored, device=device))


def _open(feed: Feed) -> Lane:
    """Where a feed's rows go on. Rows without a state begin with nothing and leave nothing."""
    return open_lane(feed) if feed.state is not None else Lane(SequenceState(), feed.start, Past(), not feed.tokens)


def _window(place: Place, held: int) -> tuple[int, ...]:
    """The rows of a state's window, as taps name them."""
    return tuple(range(-2 - place.number * held, -2 - (place.number + 1) * held, -1))


def _paths(parents: Sequence[int], known: int) -> list[list[int]]:
    """The nodes from the root to each leaf that is no known node."""
    inner, paths = set(parents), []
    for leaf in range(known, len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (above := parents[path[-1]]) >= 0:
                path.append(above)
            paths.append(path[::-1])
    return paths


def _lane_paths(feed: Feed, lane: Lane) -> list[list[int]]:
    """The rows of a lane along each of its paths."""
    text, rows = lane.text, (lane.replayed if lane.nodes_only else []) + lane.nodes
    paths = [[*text, *(rows[node] for node in path)] for path in _paths(feed.parents, feed.known)]
    return paths or ([text] if text else [])


def _words(shape: tuple[int, int]) -> int:
    """Integers that a part takes: kernels are compiled once, for parts that begin at 16 bytes."""
    return -(-math.prod(shape) // 4) * 4


def _parts(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Consecutive parts of a flat tensor in their shapes."""
    parts = torch.split(flat, [*map(_words, shapes)])
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]
