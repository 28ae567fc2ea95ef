"""The rows of one forward as paths along which recurrent states go, and what the forward leaves in its sequences.

In order they are, of each sequence, inputs that are replayed because their tokens became text since the last forward, or because
they are nodes that new nodes hang from; and after those of all sequences the rows that are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.cache import LayerState, Past, Pending, SequenceState, States
from outrider.model.recurrence import Mixer
from outrider.ops import Ops
from outrider.ops.scan import Paths

if TYPE_CHECKING:
    from outrider.model.runner import Feed

__all__ = ["LaidLanes", "Lane", "RecurrentRows", "lay_out_lanes", "open_lane"]


@dataclass(slots=True)
class Lane:
    """One sequence's rows, by their numbers. Where nodes are fed alone, the past is that of their root."""

    state: SequenceState
    start: int
    past: Past
    nodes_only: bool
    replayed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        """The rows of tokens in order."""
        return [] if self.nodes_only else self.replayed + self.tokens

    def borders(self, page_size: int) -> dict[int, int]:
        """Page index -> the row of text that fills the page."""
        first = self.start - len(self.replayed)
        filled = ((position, row) for position, row in enumerate(self.text, first + 1) if position % page_size == 0)
        return {position // page_size - 1: row for position, row in filled}


class RecurrentRows:
    """The recurrent rows of a forward. Each recurrent layer runs once, in order; then `settle` records what they left."""

    def __init__(self, feeds: Sequence[Feed], page_size: int, kernel: int) -> None:
        self._page_size = page_size
        self._lanes, before, self._first = lay_out_lanes(feeds, list(map(open_lane, feeds)))
        self._paths = Paths(before, len(feeds), kernel)
        self._borders = [{} if lane.state.borders is None else lane.borders(page_size) for lane in self._lanes]
        kept = [row for lane in self._lanes for row in lane.text[-2:]]
        self._kept = frozenset(kept).union(*(borders.values() for borders in self._borders))
        self._inputs: list[Tensor] = []
        self._states: list[Sequence[LayerState]] = []  # of every layer, those that lanes begin with
        self._after: list[dict[int, LayerState]] = []  # of every layer, those after rows that are kept

    def run(self, mixer: Mixer, x: Tensor, ops: Ops) -> Tensor:
        """The columns (N, width) of the rows that are fed through a layer's mixer, (N, inner)."""
        number = mixer.number
        assert number == len(self._inputs), "recurrent layers run once, in order"
        replayed = [lane.past.inputs[number] for lane in self._lanes if lane.past.rows]
        rows = torch.cat([*replayed, x]) if replayed else x
        first = [lane.past.states[number] if lane.past.states else mixer.start() for lane in self._lanes]
        out, after = mixer.along(rows, first, self._paths, self._kept, ops)
        self._inputs.append(rows)
        self._states.append(first)
        self._after.append(dict(after))
        return out[self._first :]

    def settle(self) -> None:
        """Record states and inputs in the sequences, once all layers have run."""
        for number, (lane, borders) in enumerate(zip(self._lanes, self._borders, strict=True)):
            nodes = [x[lane.nodes] for x in self._inputs] if lane.nodes else []
            pending = lane.state.pending
            if lane.nodes_only:
                assert pending is not None
                known = [x[lane.replayed] for x in self._inputs]
                nodes = [torch.cat(parts) for parts in zip(known, nodes, strict=True)]
                lane.state.pending = pending._replace(nodes=nodes)
                continue
            before, after = [self._beginning(number), *map(self._states_after, lane.text[-2:])][-2:]
            if lane.state.borders is not None:
                lane.state.borders |= {page: self._states_after(row) for page, row in borders.items()}
            lane.state.keep(lane.start, lane.past, Pending(lane.start + len(lane.tokens) - 1, before, after, nodes))

    def _beginning(self, lane: int) -> States:
        return [states[lane] for states in self._states]

    def _states_after(self, row: int) -> States:
        return [states[row] for states in self._after]


class LaidLanes(NamedTuple):
    """Rows of lanes, by their numbers: first all that are replayed, then those that are fed."""

    lanes: Sequence[Lane]
    before: list[int]  # of each row the row before it, or -1 - lane
    first: int  # of those that are fed


def lay_out_lanes(feeds: Sequence[Feed], lanes: Sequence[Lane]) -> LaidLanes:
    """Number the rows of lanes, which are still empty."""
    before: list[int] = []
    for number, (lane, feed) in enumerate(zip(lanes, feeds, strict=True)):
        for i in range(lane.past.rows):
            above = feed.parents[i] if lane.nodes_only else i - 1
            lane.replayed.append(_add(before, lane.replayed[above] if above >= 0 else -1 - number))
    first = len(before)
    for number, (lane, feed) in enumerate(zip(lanes, feeds, strict=True)):
        root = lane.replayed[-1] if lane.replayed and not lane.nodes_only else -1 - number
        for _ in feed.tokens:
            root = _add(before, root)
            lane.tokens.append(root)
        known = lane.replayed if lane.nodes_only else []
        for i in range(feed.known, len(feed.parents)):
            above = feed.parents[i]
            lane.nodes.append(_add(before, (known + lane.nodes)[above] if above >= 0 else root))
    return LaidLanes(lanes, before, first)


def open_lane(feed: Feed) -> Lane:
    """Where a feed's rows go on."""
    state = SequenceState() if feed.state is None else feed.state
    if feed.tokens:
        past = state.at(feed.start)
        if past is None:
            raise ValueError(f"rows at position {feed.start} have no recurrent state to go on from")
        return Lane(state, feed.start, past, nodes_only=False)
    pending = state.pending
    if pending is None or pending.root + 1 != feed.start:
        raise ValueError(f"nodes after position {feed.start - 1} have no recurrent state to go on from")
    return Lane(state, feed.start, Past(pending.after, pending.nodes).cut(feed.known), nodes_only=True)


def _add(before: list[int], row: int) -> int:
    """A row after another. Returns its number."""
    before.append(row)
    return len(before) - 1
