"""Attention over paged KV, reduced by logical position.

A query's keys are its committed prefix and then its ancestors in the draft, in order. They are
cut into blocks of one page by *logical* position, whatever slots they lie in, and every product
has the shape (BLOCK rows, one page), so a node of a draft tree meets the same additions in the
same order as the same token decoded alone. Full pages are read where they lie; only the pages a
tree node shares with draft slots are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.ops.plain import BLOCK

__all__ = ["AttentionPlan", "Segment", "paged_attention", "plan_attention"]

Windows = frozenset[int | None]


class Segment(NamedTuple):
    """Consecutive rows of the flat batch that belong to one sequence.

    Rows are `fed` committed tokens at positions start, start + 1, ... and then one row per draft
    node, whose KV goes to the slots after them in node order. The first `known` nodes were fed
    before: they have no rows, and their KV is in its slots.
    """

    first_row: int
    start: int
    fed: int
    pages: Sequence[int]
    parents: Sequence[int] = ()  # of draft nodes; -1 is the root, the last committed token
    known: int = 0
    first_key: int = 0  # positions before it hold nothing

    @property
    def rows(self) -> int:
        return self.fed + len(self.parents) - self.known

    @property
    def root(self) -> int:
        """Position of the root."""
        return self.start + self.fed - 1

    @property
    def is_tree(self) -> bool:
        """Whether some node does not lie at its logical position."""
        return bool(self.parents) and any(parent != i - 1 for i, parent in enumerate(self.parents))

    def positions(self) -> list[int]:
        """Logical position of every row."""
        fed = list(range(self.start, self.start + self.fed))
        return fed + [self.root + depth for depth in self.depths()[self.known :]] if self.parents else fed

    def slots(self) -> range:
        """Where every row's KV goes, as positions in the sequence's pages."""
        if self.known:
            assert self.fed == 0, "nodes fed before leave no committed tokens to feed"
        return range(self.start + self.known, self.start + self.fed + len(self.parents))

    def depths(self) -> list[int]:
        """Depth of every node, the root's children at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(slots=True)
class _Tail:
    """Pages gathered per root-to-leaf path, because draft nodes lie out of order in their slots."""

    slots: Tensor  # (paths, tail positions) physical slots
    rows: Tensor  # (paths, BLOCK) which of the block's rows each path computes
    path_of: Tensor  # (BLOCK,) the path that computes a row
    place_of: Tensor  # (BLOCK,) and its place in that path


@dataclass(slots=True)
class _Unit:
    """Up to BLOCK rows of one sequence and the pages they read."""

    rows: slice
    runs: list[tuple[int, int]]  # (first page, count): consecutive page ids are read in one view
    masks: dict[int | None, Tensor]  # by window; see _masks
    tail: _Tail | None = None


@dataclass(slots=True)
class AttentionPlan:
    """Everything about a forward's attention that is the same in all layers."""

    page_size: int
    units: list[_Unit] = field(default_factory=list)


def plan_attention(segments: Sequence[Segment], page_size: int, windows: Windows) -> AttentionPlan:
    """Cut segments into units. `windows` are the sliding windows any layer uses."""
    plan = AttentionPlan(page_size)
    for segment in segments:
        if segment.is_tree:
            plan.units.extend(_tree_units(segment, page_size, windows))
        else:
            plan.units.extend(_chain_units(segment, page_size, windows))
    return plan


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, window: int | None = None) -> Tensor:
    """Attention of all rows. q (N, H, d) float32, keys and values (pages, KV heads, page_size, width).

    The width is d or more; what is more holds zeros.
    """
    head_dim, width = q.shape[-1], keys.shape[-1]
    out = torch.zeros_like(q)
    q = q * head_dim**-0.5
    if width > head_dim:
        q = torch.nn.functional.pad(q, (0, width - head_dim))
    for unit in plan.units:
        rows = _attend(_pad_rows(q[unit.rows]), keys, values, unit, window)
        out[unit.rows] = rows[: unit.rows.stop - unit.rows.start, :, :head_dim]
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, unit: _Unit, window: int | None) -> Tensor:
    """One unit: (BLOCK, H, width) queries to (BLOCK, H, width) outputs.

    Scores of a page are a product of fixed shape; exponentials are summed inside a page and then
    page by page in logical order, so trailing pages of masked keys add exact zeros.
    """
    kv_heads, width = keys.shape[1], q.shape[-1]
    group = q.shape[1] // kv_heads
    block = q.view(BLOCK, kv_heads, group, width).transpose(0, 1).reshape(kv_heads, BLOCK * group, width)
    parts = [torch.matmul(block, keys[first : first + count].mT) for first, count in unit.runs]
    if unit.tail is not None:
        parts.append(_tail_product(block.view(kv_heads, BLOCK, group, width), _gather(keys, unit.tail), unit.tail))
    scores = parts[0] if len(parts) == 1 else torch.cat(parts)  # (pages, KV heads, BLOCK * group, page)
    pages, page = scores.shape[0], scores.shape[-1]
    by_row = scores.view(pages, kv_heads, BLOCK, group, page).add_(unit.masks[window])
    top = by_row.amax(dim=(0, 4), keepdim=True)
    weights = by_row.sub_(top).exp_()
    total = weights.sum(-1).cumsum(0)[-1]  # (KV heads, BLOCK, group)
    flat = weights.view(pages, kv_heads, BLOCK * group, page)
    mixed, done = [], 0
    for first, count in unit.runs:
        mixed.append(torch.matmul(flat[done : done + count], values[first : first + count]))
        done += count
    if unit.tail is not None:
        mixed.append(_tail_mix(weights[done:], _gather(values, unit.tail), unit.tail))
    summed = (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).cumsum(0)[-1]
    out = summed.view(kv_heads, BLOCK, group, width) / total[..., None]
    return out.transpose(0, 1).reshape(BLOCK, kv_heads * group, width)


def _tail_product(block: Tensor, keys: Tensor, tail: _Tail) -> Tensor:
    """Scores of the gathered pages, (tail pages, KV heads, BLOCK * group, page)."""
    kv_heads, _, group, width = block.shape
    paths, pages = keys.shape[:2]
    queries = block[:, tail.rows].transpose(0, 1).reshape(paths, 1, kv_heads, BLOCK * group, width)
    scores = torch.matmul(queries, keys.mT).view(paths, pages, kv_heads, BLOCK, group, -1)
    own = scores[tail.path_of, :, :, tail.place_of]  # (BLOCK, pages, KV heads, group, page)
    return own.permute(1, 2, 0, 3, 4).reshape(pages, kv_heads, BLOCK * group, -1)


def _tail_mix(weights: Tensor, values: Tensor, tail: _Tail) -> Tensor:
    """Weighted values of the gathered pages, (tail pages, KV heads, BLOCK * group, d)."""
    pages, kv_heads, _, group, page = weights.shape
    paths = values.shape[0]
    spread = weights[:, :, tail.rows].permute(2, 0, 1, 3, 4, 5)  # (paths, pages, KV heads, BLOCK, group, page)
    mixed = torch.matmul(spread.reshape(paths, pages, kv_heads, BLOCK * group, page), values)
    own = mixed.view(paths, pages, kv_heads, BLOCK, group, -1)[tail.path_of, :, :, tail.place_of]
    return own.permute(1, 2, 0, 3, 4).reshape(pages, kv_heads, BLOCK * group, -1)


def _gather(pool: Tensor, tail: _Tail) -> Tensor:
    """(paths, tail pages, KV heads, page_size, d) from the slots of each path."""
    kv_heads, page_size, width = pool.shape[1:]
    paths, positions = tail.slots.shape
    taken = pool[tail.slots // page_size, :, tail.slots % page_size]  # (paths, positions, KV heads, d)
    return taken.view(paths, positions // page_size, page_size, kv_heads, width).transpose(2, 3).contiguous()


def _chain_units(segment: Segment, page_size: int, windows: Windows) -> Iterator[_Unit]:
    positions = segment.positions()
    for first in range(0, segment.rows, BLOCK):
        chosen = positions[first : first + BLOCK]
        pages = segment.pages[: chosen[-1] // page_size + 1]
        rows = slice(segment.first_row + first, segment.first_row + first + len(chosen))
        yield _Unit(rows, _runs(pages), _masks(chosen, len(pages) * page_size, page_size, windows, segment.first_key))


def _tree_units(segment: Segment, page_size: int, windows: Windows) -> Iterator[_Unit]:
    """Fed tokens before the root are a chain; the root and its nodes form units with a tail."""
    if segment.fed > 1:
        yield from _chain_units(segment._replace(fed=segment.fed - 1, parents=()), page_size, windows)
    root, depths = segment.root, segment.depths()
    shared = (root + 1) // page_size  # pages that hold no draft slot
    first_row = segment.first_row + max(segment.fed - 1, 0)
    nodes = [*([-1] if segment.fed else []), *range(segment.known, len(depths))]
    for first in range(0, len(nodes), BLOCK):
        chosen = nodes[first : first + BLOCK]
        positions = [root if node < 0 else root + depths[node] for node in chosen]
        pages = max(max(positions) // page_size + 1, shared)
        tail = _tail(segment, chosen, page_size, (shared, pages)) if pages > shared else None
        rows = slice(first_row + first, first_row + first + len(chosen))
        masks = _masks(positions, pages * page_size, page_size, windows, segment.first_key)
        yield _Unit(rows, _runs(segment.pages[:shared]), masks, tail)


def _tail(segment: Segment, nodes: Sequence[int], page_size: int, pages: tuple[int, int]) -> _Tail:
    """Group rows, each a node or the root (-1), by a root-to-leaf path that holds them."""
    root, rows = segment.root, len(nodes)
    lineage = [_lineage(segment.parents, node) for node in nodes]
    paths: list[list[int]] = []
    members: list[list[int]] = []
    for row in sorted(range(rows), key=lambda r: -len(lineage[r])):
        home = next((p for p, path in enumerate(paths) if path[: len(lineage[row])] == lineage[row]), None)
        if home is None:
            home = len(paths)
            paths.append(lineage[row])
            members.append([])
        members[home].append(row)
    begin, end = pages[0] * page_size, pages[1] * page_size
    slots = []
    for path in paths:
        storage = [*range(begin, root + 1), *(root + 1 + node for node in path)]
        storage += [storage[-1] if storage else begin] * (end - begin - len(storage))
        slots.append([segment.pages[s // page_size] * page_size + s % page_size for s in storage])
    path_of, place_of = [0] * BLOCK, [0] * BLOCK
    for path_index, group in enumerate(members):
        for place, row in enumerate(group):
            path_of[row], place_of[row] = path_index, place
    padded = [group + [0] * (BLOCK - len(group)) for group in members]
    return _Tail(torch.tensor(slots), torch.tensor(padded), torch.tensor(path_of), torch.tensor(place_of))


def _lineage(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to `node`; empty for the root itself."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _masks(positions: Sequence[int], keys: int, page_size: int, windows: Windows, first_key: int) -> dict[int | None, Tensor]:
    """Additive masks: a row sees keys from the first up to its own position, inside the window.

    (pages, 1, rows, 1, page_size); padding rows see the first key. A single row's mask serves its padding too.
    """
    rows = 1 if len(positions) == 1 else BLOCK
    masks: dict[int | None, Tensor] = {}
    for window in windows:
        mask = np.zeros((rows, keys), dtype=np.float32)
        for row, position in enumerate(positions):
            mask[row, position + 1 :] = -np.inf
            if window is not None:
                mask[row, : max(position + 1 - window, 0)] = -np.inf
        mask[len(positions) :, first_key + 1 :] = -np.inf
        mask[:, :first_key] = -np.inf
        masks[window] = torch.from_numpy(mask.reshape(rows, -1, page_size).transpose(1, 0, 2)[:, None, :, None])
    return masks


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive page ids as (first, count)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def _pad_rows(q: Tensor) -> Tensor:
    missing = BLOCK - q.shape[0]
    return q.contiguous() if missing == 0 else torch.cat((q, q.new_zeros(missing, *q.shape[1:])))
