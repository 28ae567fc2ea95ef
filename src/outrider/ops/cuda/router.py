"""Triton kernels that choose the experts of rows and sort (row, expert) pairs by expert. A row's choice depends on it alone.

`route` computes the router's logits in float32: every program has a tile of experts and a span of the inner dimension and goes
through the rows of a block one by one, so a row's additions are the same in every block. The last program of a block to end adds
the spans in order and chooses. The sums it needs are of values in an order that the tile's layout cannot change: maxima, pairs
added by halving, and one chosen weight after the other.

Pairs lie by expert, then by row: `_place` counts them and gives each its place, without atomics. Rows of padding (their KV goes
to `limit` or behind) go through no expert; their pairs come after all others.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["place_pairs", "route"]

_SIZES = ("rows", "limit", "layer", "item_rows")  # compiled once for all


@triton.jit(do_not_specialize=_SIZES)
def route(
    x, router, bias, correction, slots, partial, ended, counts, experts, weights, gates, order, items, touched, rows, limit,
    layer, item_rows, scale, closeness,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr, SCORES: tl.constexpr, HAS_BIAS: tl.constexpr, CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, NORMALISED: tl.constexpr, HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Experts (rows, CHOSEN) of every row in order of their numbers, and the weights of their results.

    A grid of (blocks of BLOCK rows, tiles of TILE experts, SPANS). counts[b] says how many rows of block b chose each expert.
    gates[r] is the sigmoid of the column after the experts, the gate of the shared one. One block also places its pairs.
    """
    block, tile, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    e, k = tile * TILE + tl.arange(0, TILE), span * SPAN + tl.arange(0, SPAN)
    inside = (e < COLUMNS)[:, None] & (k < HIDDEN)[None, :]
    w = tl.load(router + e[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0)
    for row in range(block * BLOCK, tl.minimum(rows, block * BLOCK + BLOCK)):
        values = tl.load(x + row * HIDDEN + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
        tl.store(partial + (span * rows + row) * COLUMNS + e, tl.sum(w * values[None, :], 1), mask=e < COLUMNS)
    tl.debug_barrier()  # all threads have stored when one of them says so
    if tl.atomic_add(ended + block, 1, sem="acq_rel") == tl.num_programs(1) * SPANS - 1:
        tl.store(ended + block, 0)  # for the next launch
        _choose(
            partial, bias, correction, slots, counts, experts, weights, gates, rows, limit, block, scale, closeness,
            COLUMNS, EXPERTS, PADDED, CHOSEN, SCORES, HAS_BIAS, CORRECTION, GROUPS, GROUPS_PADDED, CHOSEN_GROUPS, NORMALISED,
            HALVINGS, BLOCK, ROWS, SPANS,
        )  # fmt: skip
        if tl.num_programs(0) == 1:
            tl.debug_barrier()  # `_place` reads what `_choose` wrote
            _place(
                experts, counts, slots, order, items, touched, rows, limit, layer, item_rows, block, 1,
                EXPERTS, PADDED, CHOSEN, CHOSEN_PADDED, BLOCK, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def place_pairs(
    experts, counts, slots, order, items, touched, rows, limit, layer, item_rows,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What `_place` does, for every block of a launch of `route` with several."""
    _place(
        experts, counts, slots, order, items, touched, rows, limit, layer, item_rows, tl.program_id(0), tl.num_programs(0),
        EXPERTS, PADDED, CHOSEN, CHOSEN_PADDED, BLOCK, ROWS,
    )  # fmt: skip


# --- the choice --------------------------------------------------------------------------------------------------------


@triton.jit
def _choose(
    partial, bias, correction, slots, counts, experts, weights, gates, rows, limit, block, scale, closeness,
    COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr, CORRECTION: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, NORMALISED: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a block's rows, ROWS of them at a time."""
    e = tl.arange(0, PADDED)
    exists = (e < EXPERTS)[None, :]
    counted = tl.zeros((PADDED,), tl.int32)
    for first in range(block * BLOCK, tl.minimum(rows, block * BLOCK + BLOCK), ROWS):
        row = first + tl.arange(0, ROWS)
        real = _real(slots, row, rows, limit)
        at = partial + row[:, None] * COLUMNS + e[None, :]
        inside = (row < rows)[:, None] & exists
        logits = tl.zeros((ROWS, PADDED), tl.float32)
        gate = tl.zeros((ROWS,), tl.float32)
        for s in tl.static_range(SPANS):
            step = s * rows * COLUMNS
            logits += tl.load(at + step, mask=inside, other=0.0, cache_modifier=".cg")
            if COLUMNS > EXPERTS:
                last = partial + step + row * COLUMNS + EXPERTS
                gate += tl.load(last, mask=row < rows, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            logits += tl.load(bias + e, mask=e < EXPERTS, other=0.0)[None, :]
        logits = _comparable(logits)
        if SCORES == "sparsemixer":
            chosen, made = _sparsemixer(logits, e, exists, scale, closeness, CHOSEN, PADDED, HALVINGS)
        else:
            chosen, made = _best(
                logits, correction, e, exists, scale, EXPERTS, PADDED, CHOSEN, SCORES, CORRECTION, GROUPS, GROUPS_PADDED,
                CHOSEN_GROUPS, NORMALISED, HALVINGS,
            )  # fmt: skip
        place = row[:, None] * CHOSEN + tl.cumsum(chosen.to(tl.int32), 1) - 1  # in order of the experts' numbers
        stored = chosen & (row < rows)[:, None]
        tl.store(experts + place, tl.broadcast_to(e[None, :], (ROWS, PADDED)), mask=stored)
        tl.store(weights + place, made, mask=stored)
        if COLUMNS > EXPERTS:
            tl.store(gates + row, 1.0 / (1.0 + tl.exp(-gate)), mask=row < rows)
        counted += tl.sum((chosen & real[:, None]).to(tl.int32), 0)
    tl.store(counts + block * EXPERTS + e, counted, mask=e < EXPERTS)


@triton.jit
def _best(
    logits, correction, e, exists, scale, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    SCORES: tl.constexpr, CORRECTION: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, NORMALISED: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The experts with the best scores, and their weights."""
    if SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choosing = scores
    else:
        top = tl.max(tl.where(exists, logits, float("-inf")), 1)
        scores = tl.where(exists, tl.exp(logits - top[:, None]), 0.0)
        choosing = logits  # scores have the same order, but two of them may round to one
    if SCORES == "softmax" and (CORRECTION or not NORMALISED):
        scores = scores / _total(scores, HALVINGS)[:, None]
    if CORRECTION:
        choosing = scores + tl.load(correction + e, mask=e < EXPERTS, other=0.0)[None, :]
    choosing = tl.where(exists, _comparable(choosing), float("-inf"))
    if GROUPS > 1:
        choosing = _in_groups(choosing, e, exists, EXPERTS // GROUPS, GROUPS, GROUPS_PADDED, CHOSEN_GROUPS, PADDED)
    chosen = e[None, :] < tl.zeros(choosing.shape, tl.int32)
    total = tl.zeros((choosing.shape[0],), tl.float32)
    for _ in tl.static_range(CHOSEN):
        at = e[None, :] == _first_of_largest(choosing, e, PADDED)[:, None]
        chosen = chosen | at
        choosing = tl.where(at, float("-inf"), choosing)
        total += tl.sum(tl.where(at, scores, 0.0), 1)
    if NORMALISED:
        scores = scores / (total + 1e-20)[:, None]
    return chosen, scores * scale


@triton.jit
def _in_groups(
    choosing, e, exists, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """What chooses experts of the best groups, by the sum of each one's best two; the others come after all of these."""
    g = tl.arange(0, GROUPS_PADDED)
    best = tl.full((choosing.shape[0], GROUPS_PADDED), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where((e // SIZE == group)[None, :], choosing, float("-inf"))
        first = _first_of_largest(members, e, PADDED)
        second = tl.max(tl.where(e[None, :] == first[:, None], float("-inf"), members), 1)
        both = _comparable(tl.max(members, 1) + second)
        best = tl.where((g == group)[None, :], both[:, None], best)
    kept = e[None, :] < tl.zeros(choosing.shape, tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        group = _first_of_largest(best, g, GROUPS_PADDED)
        kept = kept | (e[None, :] // SIZE == group[:, None])
        best = tl.where(g[None, :] == group[:, None], float("-inf"), best)
    return tl.where(kept | (exists == 0), choosing, -3.4028234663852886e38)


@triton.jit
def _sparsemixer(
    logits, e, exists, scale, closeness, CHOSEN: tl.constexpr, PADDED: tl.constexpr, HALVINGS: tl.constexpr
):  # fmt: skip
    """The best experts; the weight of each is its softmax among those left that are close to it."""
    left = tl.where(exists, logits, float("-inf"))
    chosen = e[None, :] < tl.zeros(logits.shape, tl.int32)
    weights = tl.zeros(logits.shape, tl.float32)
    for _ in tl.static_range(CHOSEN):
        at = e[None, :] == _first_of_largest(left, e, PADDED)[:, None]
        top = tl.max(left, 1)[:, None]
        largest = tl.maximum(tl.abs(logits), top)
        far = (top - logits) / tl.where(largest == 0.0, 1.0, largest) > closeness
        close = tl.where(far | (left == float("-inf")), 0.0, tl.exp(logits - top))
        weights = tl.where(at, close / _total(close, HALVINGS)[:, None], weights)
        chosen = chosen | at
        left = tl.where(at, float("-inf"), left)
    return chosen, weights * scale


@triton.jit
def _first_of_largest(values, numbers, MANY: tl.constexpr):
    """The lowest number of the largest value of each row."""
    largest = tl.max(values, 1)[:, None]
    return tl.min(tl.where(values == largest, numbers[None, :], MANY), 1)


@triton.jit
def _comparable(x):
    """Values that are no numbers, and minus infinity, as the lowest number. Taken ones are minus infinity."""
    return tl.where(x > -3.4028234663852886e38, x, -3.4028234663852886e38)


@triton.jit
def _total(x, HALVINGS: tl.constexpr):
    """The sum of each row by halving: neighbours, neighbouring sums, and so on."""
    for _ in tl.static_range(HALVINGS):
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = a + b
    return tl.reshape(x, (x.shape[0],))


# --- the pairs ---------------------------------------------------------------------------------------------------------


@triton.jit
def _place(
    experts, counts, slots, order, items, touched, rows, limit, layer, item_rows, block, blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write order[place] = pair for the pairs of a block, row * CHOSEN + k for the k-th expert of a row; block 0 lists the work.

    items[0] is the number of items, items[1] that with padding; item i lies at [2 + 3 i]: expert, first place, pairs. It has
    at most `item_rows` pairs. Items of padding have the number after the last expert.
    """
    e = tl.arange(0, PADDED)
    total, before = tl.zeros((PADDED,), tl.int32), tl.zeros((PADDED,), tl.int32)
    for other in range(0, blocks):
        count = tl.load(counts + other * EXPERTS + e, mask=e < EXPERTS, other=0, cache_modifier=".cg")
        total += count
        before += tl.where(other < block, count, 0)
    start = tl.cumsum(total, 0) - total
    at = start + before
    k = tl.arange(0, CHOSEN_PADDED)
    pairs = tl.sum(total, 0)
    padded = block * BLOCK - tl.sum(before, 0) // CHOSEN  # rows of padding so far
    for first in range(block * BLOCK, tl.minimum(rows, block * BLOCK + BLOCK), ROWS):
        row = first + tl.arange(0, ROWS)
        real = _real(slots, row, rows, limit)
        chosen = tl.zeros((ROWS, PADDED), tl.int32)
        for i in tl.static_range(CHOSEN):
            one = tl.load(experts + row * CHOSEN + i, mask=real, other=-1, cache_modifier=".cg")
            chosen += (one[:, None] == e[None, :]).to(tl.int32)
        place = at[None, :] + tl.cumsum(chosen, 0) - chosen
        pair = row[:, None] * CHOSEN + tl.cumsum(chosen, 1) - chosen
        tl.store(order + place, pair, mask=chosen > 0)
        padding = ((row < rows) & (real == 0)).to(tl.int32)
        place = pairs + (padded + tl.cumsum(padding, 0) - padding)[:, None] * CHOSEN + k[None, :]
        tl.store(order + place, row[:, None] * CHOSEN + k[None, :], mask=(padding > 0)[:, None] & (k < CHOSEN)[None, :])
        at += tl.sum(chosen, 0)
        padded += tl.sum(padding, 0)
    if block == 0:
        needed = (total + item_rows - 1) // item_rows
        first_item = tl.cumsum(needed, 0) - needed
        for i in range(0, tl.max(needed, 0)):
            _list(items, first_item + i, e, start + i * item_rows, total - i * item_rows, item_rows, i < needed)
        count, one = tl.sum(needed, 0), tl.arange(0, 1)
        more = (rows * CHOSEN - pairs + item_rows - 1) // item_rows
        for i in range(0, more):
            at_item, left = count + i + one, rows * CHOSEN - pairs - i * item_rows + one
            _list(items, at_item, EXPERTS + one, pairs + i * item_rows + one, left, item_rows, one == 0)
        tl.store(items, count)
        tl.store(items + 1, count + more)
        tl.store(touched + layer, tl.sum((total > 0).to(tl.int32), 0))


@triton.jit
def _list(items, item, expert, first, left, item_rows, inside):
    at = items + 2 + 3 * item
    tl.store(at, expert, mask=inside)
    tl.store(at + 1, first, mask=inside)
    tl.store(at + 2, tl.minimum(left, item_rows), mask=inside)


@triton.jit
def _real(slots, row, rows, limit):
    """Which rows are no padding."""
    return (row < rows) & (tl.load(slots + row, mask=row < rows, other=0) < limit)
