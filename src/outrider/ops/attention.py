"""Attention over paged KV, reduced by logical position.

A query's keys are its committed prefix and then its ancestors in the draft, in order. They are
cut into blocks of one page by *logical* position, whatever slots they lie in, and every product
is of one page and a row count that gives a row the same bits (ops/row_counts.py). So a node of a draft
tree has the same additions in the same order as the same token decoded alone. Full pages are read in
place; only the pages that hold draft slots of a tree are gathered.

Positions that a row does not see cannot change it, even if they hold NaN or infinity: their scores are replaced, not
added to, and the values in KV memory are finite (cache/kv.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core import ancestors, depths
from outrider.ops.row_counts import BLOCK, attention_counts, fitting, page_products

__all__ = ["AttentionPlan", "Segment", "paged_attention", "plan_attention"]

Windows = frozenset[int | None]
Counts = tuple[int, ...]


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
    first_key: int = 0  # the first position with a key; those before are empty

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
        return [depth + 1 for depth in depths(self.parents)]


class _Form(NamedTuple):
    """A layer's window, the row counts of its products, its soft cap, and the sinks of its heads."""

    window: int | None
    counts: Counts
    soft_cap: float | None
    sinks: Tensor | None  # (1, KV heads, 1, group, 1)


@dataclass(slots=True)
class _Tail:
    """Pages gathered per root-to-leaf path, because draft nodes lie out of order in their slots."""

    slots: Tensor  # (paths, tail positions) physical slots
    rows: Tensor  # (paths, rows) which of the unit's rows each path computes
    path_of: Tensor  # (unit's rows,) the path that computes a row
    place_of: Tensor  # (unit's rows,) and its place in that path


@dataclass(slots=True)
class _Unit:
    """Up to BLOCK rows of one sequence and the pages they read."""

    rows: slice
    runs: list[tuple[int, int]]  # (first page, count): consecutive page ids are read in one view
    masks: dict[int | None, Tensor]  # what rows do not see, by window; see _masks
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


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all rows. q (N, H, d) float32, keys and values (pages, KV heads, page_size, width).

    The width is d or more; what is more holds zeros. A soft cap replaces scores by cap * tanh(score / cap). Sinks (H,) are
    scores of keys without a value: each adds its exponential to the sum of its head.
    """
    head_dim, width = q.shape[-1], keys.shape[-1]
    kv_heads, page = keys.shape[1], keys.shape[2]
    counts = attention_counts(kv_heads, q.shape[1] // kv_heads, width, page, torch.get_num_threads())
    form = _Form(window, counts, soft_cap, None if sinks is None else sinks.view(1, kv_heads, 1, -1, 1))
    q = q * head_dim**-0.5
    if width > head_dim:
        q = F.pad(q, (0, width - head_dim))
    if len(plan.units) == 1 and plan.units[0].rows == slice(0, q.shape[0]):
        out = _attend(q, keys, values, plan.units[0], form)
    else:
        out = torch.zeros_like(q)
        for unit in plan.units:
            out[unit.rows] = _attend(q[unit.rows], keys, values, unit, form)
    return out if width == head_dim else out[..., :head_dim]


def _attend(q: Tensor, keys: Tensor, values: Tensor, unit: _Unit, form: _Form) -> Tensor:
    """One unit: (rows, H, width) queries to (rows, H, width) outputs.

    Scores of a page are a product of fixed width; exponentials are summed inside a page and then
    page by page in logical order, so trailing pages of masked keys add exact zeros. Rows are filled up
    to a row count of the products at the start, and cut at the end: no copy lies between the two products.
    """
    window, counts, soft_cap, sinks = form
    rows, heads, width = q.shape
    filled, hidden = fitting(rows, counts), unit.masks[window]
    by_head = _filled_rows(q.view(rows, keys.shape[1], -1, width), 0, filled).transpose(0, 1)  # (KV heads, filled, group, width)
    if 1 < rows < filled:
        hidden = F.pad(hidden, (0, 0, 0, 0, 0, filled - rows))
    scores = _times_pages(by_head.expand(hidden.shape[0], *by_head.shape), keys, unit, counts, transposed=True)
    if soft_cap is not None:
        scores = _soft_capped(scores, soft_cap)
    scores.masked_fill_(hidden, -torch.inf)  # (pages, KV heads, filled, group, page)
    highest = scores.amax(dim=(0, 4), keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    weights = scores.sub_(highest).exp_()
    total = _in_order(weights.sum(-1, keepdim=True))  # (KV heads, filled, group, 1)
    if sinks is not None:
        total = total + (sinks - highest)[0].exp()
    mixed = _in_order(_times_pages(weights, values, unit, counts, transposed=False))
    return (mixed / total)[:, :rows].transpose(0, 1).reshape(rows, heads, width)


def _soft_capped(scores: Tensor, cap: float) -> Tensor:
    """cap * tanh(score / cap) by exp, whose bits do not depend on where in memory a score lies."""
    grown = torch.exp(scores.clamp(-20 * cap, 20 * cap) * (-2.0 / cap))
    return (1.0 - grown) / (1.0 + grown) * cap


def _in_order(pages: Tensor) -> Tensor:
    """The sum over pages, one after the other."""
    return pages[0] if pages.shape[0] == 1 else pages.cumsum(0)[-1]


def _times_pages(x: Tensor, pool: Tensor, unit: _Unit, counts: Counts, transposed: bool) -> Tensor:
    """x (pages, KV heads, filled rows, group, inner) times each page of a unit, or times its transpose."""
    if unit.tail is None and len(unit.runs) == 1:
        first, count = unit.runs[0]
        return _product(x, pool[first : first + count], counts, transposed)
    parts, done = [], 0
    for first, count in unit.runs:
        parts.append(_product(x[done : done + count], pool[first : first + count], counts, transposed))
        done += count
    if (tail := unit.tail) is not None:
        pages = _gather(pool, tail)
        paths = x[done:, :, tail.rows].permute(2, 0, 1, 3, 4, 5)  # (paths, tail pages, KV heads, rows, group, inner)
        part = _product(paths.flatten(0, 1), pages.flatten(0, 1), counts, transposed)
        part = part.view(*pages.shape[:2], *part.shape[1:])
        part = part[tail.path_of, :, :, tail.place_of].permute(1, 2, 0, 3, 4)  # every row from its path
        parts.append(_filled_rows(part, 2, x.shape[2]))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)  # a repeated row shares memory


def _product(x: Tensor, pages: Tensor, counts: Counts, transposed: bool) -> Tensor:
    """The product of each page and head, at a row count that gives a row the same bits."""
    count, kv_heads, rows, group, inner = x.shape
    if rows > counts[-1]:
        return torch.cat([_product(part, pages, counts, transposed) for part in torch.split(x, counts[-1], 2)], 2)
    filled = fitting(rows, counts)
    operand = _filled_rows(x, 2, filled).reshape(count * kv_heads, filled * group, inner).contiguous()
    matrices = pages.flatten(0, 1)
    product = page_products(operand, matrices.mT if transposed else matrices).view(count, kv_heads, filled, group, -1)
    return product if filled == rows else product[:, :, :rows]


def _filled_rows(x: Tensor, dim: int, count: int) -> Tensor:
    """Rows padded to `count` with zeros; a single row is repeated."""
    missing = count - x.shape[dim]
    if missing == 0:
        return x
    if x.shape[dim] == 1:
        return x.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))


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
    lineage = [ancestors(segment.parents, node) for node in nodes]
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
    path_of, place_of = [0] * rows, [0] * rows
    for path_index, group in enumerate(members):
        for place, row in enumerate(group):
            path_of[row], place_of[row] = path_index, place
    widest = max(map(len, members))
    padded = [group + [0] * (widest - len(group)) for group in members]
    return _Tail(torch.tensor(slots), torch.tensor(padded), torch.tensor(path_of), torch.tensor(place_of))


def _masks(positions: Sequence[int], keys: int, page_size: int, windows: Windows, first_key: int) -> dict[int | None, Tensor]:
    """Masks of hidden keys. A row sees keys from the first up to its position, inside the window.

    (pages, 1, rows, 1, page_size), true where a key is hidden.
    """
    key, position = np.arange(keys), np.array(positions)[:, None]
    masks: dict[int | None, Tensor] = {}
    for window in windows:
        seen = (key <= position) & (key >= first_key)
        if window is not None:
            seen &= key > position - window
        masks[window] = torch.from_numpy(~seen.reshape(len(positions), -1, page_size).transpose(1, 0, 2)[:, None, :, None])
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
