"""States of recurrent layers: of each sequence that runs, and those after full pages, kept under the pages' keys.

A state cannot be cut back as KV can. So a sequence keeps the state after its last committed token and the inputs of the draft
nodes behind it; the next forward replays those of the accepted path. Tensors are never written to once they are here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from outrider.cache.device_states import Places
from outrider.cache.pages import Key

__all__ = ["LayerState", "Past", "Pending", "SequenceState", "StateCache", "States"]


class LayerState(NamedTuple):
    """What one layer knows of the rows before."""

    window: Tensor  # (kernel - 1, channels) inputs of the convolution
    memory: Tensor | None = None  # (heads, key_dim, head_dim)


# A LayerState of every recurrent layer, or the one Place of all layers' states on a device; empty: nothing was read yet.
States = Sequence[Any]


class Past(NamedTuple):
    """Where rows go on: states after some tokens, and of every layer the inputs of tokens after them, to be replayed."""

    states: States = ()
    inputs: Sequence[Any] = ()  # (rows, width) of every recurrent layer, or the StoredRows of all layers on a device

    @property
    def rows(self) -> int:
        return len(self.inputs[0]) if self.inputs else 0

    def cut(self, rows: int) -> Past:
        """With the first inputs alone."""
        return Past(self.states, [x[:rows] for x in self.inputs] if rows else ())


class Pending(NamedTuple):
    """What a forward left: states on either side of its last fed token, and the inputs of the draft nodes after it."""

    root: int  # position of the last fed token
    before: States
    after: States
    nodes: Sequence[Any] = ()  # (nodes, width) of every recurrent layer, or the StoredRows of all layers on a device


_NOTHING = Past()


@dataclass(eq=False, repr=False, slots=True)
class SequenceState:
    """The recurrent state of one sequence. Rows may go on from where the last forward began, or from its root on.

    They may also go on from where the one before began, where the last was launched before that one's verdict.
    """

    position: int = 0  # tokens that the past holds
    past: Past = _NOTHING
    pending: Pending | None = None
    earlier: tuple[int, Past] | None = None  # position and past of the forward before, until its verdict is known
    borders: dict[int, States] | None = None  # by page index: states after the last slot of a page, where they are kept

    def at(self, start: int) -> Past | None:
        """The past of rows from `start` on; None where there is none."""
        if start == self.position:
            return self.past
        after = -1 if self.pending is None else start - self.pending.root
        if self.pending is None or after < 0:
            return self.earlier[1] if self.earlier is not None and self.earlier[0] == start else None
        if after == 0:
            return Past(self.pending.before)
        nodes = Past(self.pending.after, self.pending.nodes)
        return nodes.cut(after - 1) if after - 1 <= nodes.rows else None

    def keep(self, start: int, past: Past, pending: Pending, overlaps: bool = False) -> None:
        """Record a forward of rows from `start` on, which may have been launched before the verdict on the one before."""
        self.earlier = (self.position, self.past) if overlaps else None
        self.position, self.past, self.pending = start, past, pending

    def restart(self) -> None:
        """Forget everything: rows begin at 0."""
        self.position, self.past, self.pending, self.earlier = 0, _NOTHING, None, None

    def accept(self, path: Sequence[int]) -> None:
        """These nodes of the last forward became text, in this order."""
        if self.pending is not None and self.pending.nodes:
            chosen = list(path)
            self.pending = self.pending._replace(nodes=[x[chosen] for x in self.pending.nodes])


class StateCache:
    """States after full pages by the pages' keys, at most `capacity` of them; the least recently used one is dropped first.

    With a capacity of None the model has no recurrent layers: sequences have no state, and rows may go on after any page.
    `nodes` are places for the inputs of draft nodes, and `sequences` how many can run, where they are limited.
    """

    def __init__(self, capacity: int | None = None, nodes: Places | None = None, sequences: int | None = None) -> None:
        self.capacity, self.sequences = capacity, sequences
        self._nodes = nodes
        self._kept: OrderedDict[Key, States] = OrderedDict()

    @property
    def kept(self) -> int:
        """States that are kept."""
        return len(self._kept)

    def fitting(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Draft lengths, cut to the nodes whose inputs can be kept until their verdict."""
        if self._nodes is None or sum(lengths) <= self._nodes.free:
            return tuple(lengths)
        left, cut = self._nodes.free, []
        for length in lengths:
            cut.append(min(length, left))
            left -= cut[-1]
        return tuple(cut)

    def usable(self, keys: Sequence[Key]) -> int:
        """How many of these leading pages a sequence can start after."""
        if self.capacity is None:
            return len(keys)
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._kept), 0)

    def begin(self, keys: Sequence[Key], page_size: int) -> SequenceState | None:
        """The state of a sequence that starts after these pages."""
        if self.capacity is None:
            return None
        borders: dict[int, States] | None = {} if self.capacity else None
        if not keys:
            return SequenceState(borders=borders)
        self._kept.move_to_end(keys[-1])
        return SequenceState(len(keys) * page_size, Past(self._kept[keys[-1]]), borders=borders)

    def publish(self, state: SequenceState | None, keys: Sequence[Key]) -> None:
        """Keep what a sequence left at the ends of its committed pages."""
        if state is None or not state.borders or self.capacity is None:
            return
        for index in [index for index in state.borders if index < len(keys)]:
            self._kept[keys[index]] = state.borders.pop(index)
            self._kept.move_to_end(keys[index])
            while len(self._kept) > self.capacity:
                self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the state that was used least recently; False where there is none."""
        if self._kept:
            self._kept.popitem(last=False)
            return True
        return False

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop states that must not be trusted."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()
