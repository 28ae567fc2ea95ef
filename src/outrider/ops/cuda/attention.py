"""Triton kernels of attention over paged KV, in two levels. The bits of a row depend on that row alone.

Keys are cut into blocks of BLOCK and segments of SEGMENT by *logical* position, whatever slots they lie in. The blocks of a
segment are merged in registers, in order; the segments of a row are merged in order too. Every kernel here uses `_block` and
`_fold` for these two steps. A block or a segment of which a row sees nothing leaves the row's sums as they are, bit for bit,
so rows that see different keys can share a tile, and a sliding window needs no other cuts.

Decode rows: `count_work` and `list_work` turn the rows of a forward into work items on the device, `attend_together` and
`attend_alone` compute the partial result of every segment, and `merge_segments` merges them. A segment that all rows of a
sequence in a tile of ROWS rows see whole is one item of the whole tile, read once; other segments are items of one row. The
grids have a fixed size, and their programs walk through the lists, so that one long sequence among short ones is spread
over the device too.

Partial results lie in a scratch of a fixed number of slots. Each row gets a slot for each of its segments while they fit.
If they do not, every row gets an equal share, and what exceeds it is folded, in the same order, by the program of the
row's first item. So the scratch does not grow with the longest possible context.

Prompts: `attend_chunks` merges blocks and segments in one pass.

Sinks are scores of keys without a value, one for each query head. A row's sink is merged last, after all its segments.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "attend_alone", "attend_chunks", "attend_together", "count_work", "list_work", "merge_segments",
]  # fmt: skip

_SIZES = ("rows", "table_width", "depth", "max_slots")  # compiled once for all


# --- the order of summation ------------------------------------------------------------------------------------------


@triton.jit
def _block(q, k, v, seen, top, total, mixed, factor, bend, MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Merge one block of keys into `top` (largest score), `total` (sum of weights, 16 equal columns) and `mixed`.

    Scores are scaled by `factor`, which makes the weights powers of two. The tensor cores add the weights, because their
    order of summation does not depend on how a tile is laid out over warps.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        scores = _tanh(scores, bend)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, factor, tl.broadcast_to(-shift[:, None], scores.shape))).to(v.dtype)
    old = tl.exp2(top - shift)
    ones = tl.full((k.shape[0], 16), 1.0, tl.float32).to(v.dtype)
    total = tl.dot(weights, ones, total * old[:, None], input_precision=PRECISION)
    mixed = tl.dot(weights, v, mixed * old[:, None], input_precision=PRECISION)
    return higher, total, mixed


@triton.jit
def _tanh(x, bend):
    """tanh of x * bend / (-2 log2(e))."""
    e = tl.exp2(tl.abs(x) * bend)
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _fold(top, total, mixed, top_b, total_b, mixed_b):
    """Merge a segment into the segments before it. Where one side is empty the other stays as it is."""
    higher = tl.maximum(top, top_b)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(top - shift), tl.exp2(top_b - shift)
    total = tl.fma(total_b, new, total * old)
    mixed = tl.fma(mixed_b, tl.broadcast_to(new[:, None], mixed_b.shape), mixed * old[:, None])
    return higher, total, mixed


@triton.jit
def _sink(sinks, head, inside, top, total, mixed):
    """Merge the sink of each row's head, a key without a value, after all segments."""
    top_b = tl.load(sinks + head, mask=inside, other=0.0) * 1.4426950408889634
    return _fold(top, total, mixed, top_b, tl.full(top.shape, 1.0, tl.float32), tl.zeros(mixed.shape, tl.float32))


@triton.jit
def _nothing(M: tl.constexpr, WIDTH: tl.constexpr):
    """The sums of a row that has seen no key."""
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M, 16), tl.float32), tl.zeros((M, WIDTH), tl.float32)


# --- the work of decode rows -------------------------------------------------------------------------------------------


@triton.jit
def _tile(sequences, row, rows, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr):
    """The rows around `row`, and which of them are in its tile: those that belong to the same sequence."""
    t = tl.arange(0, ROWS_PADDED)
    near = row // ROWS * ROWS + t
    inside = (t < ROWS) & (near < rows)
    return near, inside & (tl.load(sequences + near, mask=inside, other=-1) == tl.load(sequences + row))


@triton.jit(do_not_specialize=_SIZES)
def count_work(
    sequences, positions, roots, firsts, work, rows, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr, SEGMENT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Which segments each row needs, and which of them its tile can share.

    work[:, row] is (its segments; the first of them; the first and the end of those that every row of the tile sees whole;
    whether the row leads its tile; the most segments of a row of the tile; whether all rows begin with the same shared one).
    """
    row = tl.program_id(0)
    near, ours = _tile(sequences, row, rows, ROWS, ROWS_PADDED)
    position, low = tl.load(positions + near, mask=ours, other=0), tl.load(firsts + near, mask=ours, other=0)
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    begin = low // SEGMENT
    count = tl.maximum(position // SEGMENT + 1 - begin, 0)
    known = (tl.load(roots + near, mask=ours, other=0) + 1) // SEGMENT
    shared = tl.max(tl.where(ours, (low + SEGMENT - 1) // SEGMENT, 0), 0)
    end = tl.min(tl.where(ours, known, 1 << 30), 0)
    at = ours & (near == row)
    tl.store(work + row, tl.sum(tl.where(at, count, 0), 0))
    tl.store(work + rows + row, tl.sum(tl.where(at, begin, 0), 0))
    tl.store(work + 2 * rows + row, shared)
    tl.store(work + 3 * rows + row, tl.where(tl.sum(ours.to(tl.int32), 0) > 1, end, shared))
    tl.store(work + 4 * rows + row, (tl.min(tl.where(ours, near, 1 << 30), 0) == row).to(tl.int32))
    tl.store(work + 5 * rows + row, tl.max(tl.where(ours, count, 0), 0))
    tl.store(work + 6 * rows + row, (tl.min(tl.where(ours, begin, 1 << 30), 0) == shared).to(tl.int32))


@triton.jit
def _divide(work, rows, at, share):
    """How rows divide their segments where each may have `share` slots.

    Returns (slots; segments folded into the first slot, less one; items of the row alone; items of its tile, if it leads it).
    """
    inside = at < rows
    count = tl.load(work + at, mask=inside, other=0)
    shared = tl.load(work + 2 * rows + at, mask=inside, other=0)
    end = tl.load(work + 3 * rows + at, mask=inside, other=0)
    leads = tl.load(work + 4 * rows + at, mask=inside, other=0)
    excess = tl.maximum(tl.load(work + 5 * rows + at, mask=inside, other=0) - share, 0)
    aligned = tl.load(work + 6 * rows + at, mask=inside, other=0) > 0
    sharing = (end > shared) & ((excess == 0) | (aligned & (shared + excess < end)))
    folded = tl.where(sharing, excess, tl.maximum(count - share, 0))
    alone = tl.where(sharing, count - (end - shared), count - folded)
    return count - folded, folded, alone, tl.where(sharing & (leads > 0), end - shared - folded, 0)


@triton.jit(do_not_specialize=_SIZES)
def list_work(work, slots, alone, together, rows, max_slots, PADDED_ROWS: tl.constexpr):
    """List the items of every row, and say where its partial results lie.

    slots[:, row] is (the first slot; the last segment in it; the number of slots). alone[0] and together[0] are the numbers of
    items of rows and of tiles, and item i lies at [1 + 4 i]: the row (of a tile, the first one); the first and the end of the
    segments of one slot; the slot (of a row).
    """
    row = tl.program_id(0)
    r = tl.arange(0, PADDED_ROWS)
    needed = tl.sum(tl.load(work + r, mask=r < rows, other=0), 0)
    share = tl.where(needed > max_slots, max_slots // rows, 1 << 30)
    counts, _, singles, tiles = _divide(work, rows, r, share)
    slot = tl.where(needed > max_slots, row * share, tl.sum(tl.where(r < row, counts, 0), 0))
    count, folded, single, tile = _divide(work, rows, row, share)
    begin, shared, end = tl.load(work + rows + row), tl.load(work + 2 * rows + row), tl.load(work + 3 * rows + row)
    tl.store(slots + row, slot)
    tl.store(slots + rows + row, begin + folded)
    tl.store(slots + 2 * rows + row, count)
    before = tl.sum(tl.where(r < row, singles, 0), 0)
    before_tile = tl.sum(tl.where(r < row, tiles, 0), 0)
    if row == rows - 1:
        tl.store(alone, before + single)
        tl.store(together, before_tile + tile)
    for start in range(0, single, 128):
        i = start + tl.arange(0, 128)
        around = tl.where(i < shared - begin, begin + i, end + i - (shared - begin))  # those that the tile does not share
        segment = tl.where(single < count, around, begin + folded + i)
        first = tl.where((i == 0) & (single == count), segment - folded, segment)
        _list(alone, before, i, single, row, first, segment + 1, slot + tl.maximum(segment - begin - folded, 0))
    for start in range(0, tile, 128):
        i = start + tl.arange(0, 128)
        segment = shared + folded + i
        _list(together, before_tile, i, tile, row, tl.where(i == 0, segment - folded, segment), segment + 1, i)


@triton.jit
def _list(items, before, i, count, row, first, end, slot):
    at = items + 1 + 4 * (before + i)
    tl.store(at, tl.zeros_like(i) + row, mask=i < count)
    tl.store(at + 1, first, mask=i < count)
    tl.store(at + 2, end, mask=i < count)
    tl.store(at + 3, slot, mask=i < count)


# --- decode rows -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SIZES)
def attend_alone(
    q, keys, values, table, sequences, positions, roots, firsts, ancestors, items, tops, totals, mixes,
    table_width, depth, factor, bend,
    TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial results of single rows, for one KV head and its GROUP query heads.

    Row r sees positions firsts[r]..positions[r] of its sequence, or the last WINDOW of them. Those up to roots[r] lie where
    the page table says; the ones after are its ancestors in the draft, whose slots are listed in ancestors[r]. Keys that the
    row does not see are not read.
    """
    head = tl.program_id(1)
    i = tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        entry = items + 1 + 4 * item
        row, segment, end, slot = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        position, root, low = tl.load(positions + row), tl.load(roots + row), tl.load(firsts + row)
        if WINDOW > 0:
            low = tl.maximum(low, position - WINDOW + 1)
        pages = table + tl.load(sequences + row).to(tl.int64) * table_width
        listed = ancestors + row.to(tl.int64) * depth - root - 1
        query_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + i
        query = tl.load(q + query_head[:, None] * HEAD + d[None, :], mask=(i < GROUP)[:, None] & (d < HEAD)[None, :], other=0.0)
        for number in range(segment, end):
            top, total, mixed = _nothing(TILE, PADDED)
            start, stop = tl.maximum(number * SEGMENT, low // BLOCK * BLOCK), tl.minimum((number + 1) * SEGMENT, position + 1)
            known = tl.maximum(tl.minimum(stop, root + 1) // BLOCK * BLOCK, start)  # blocks before lie whole in the page table
            known = tl.where(start < low, start, known)
            for first in range(start, known, BLOCK):
                k, v = _known_keys(keys, values, pages, first, head, d, KV_HEADS, HEAD, PADDED, PAGE, BLOCK)
                top, total, mixed = _block(query, k, v, None, top, total, mixed, factor, bend, False, CAPPED, PRECISION)
            for first in tl.range(known, stop, BLOCK, num_stages=1):  # one block or two
                j = first + tl.arange(0, BLOCK)
                seen = (j >= low) & (j <= position)
                page = tl.load(pages + j // PAGE, mask=seen & (j <= root), other=0).to(tl.int64)
                drafted = tl.load(listed + j, mask=seen & (j > root), other=0).to(tl.int64)
                place = tl.where(j > root, drafted, page * PAGE + j % PAGE)
                at = (place // PAGE * KV_HEADS + head) * (PAGE * HEAD) + place % PAGE * HEAD
                at = at[:, None] + d[None, :]
                loaded = seen[:, None] & (d < HEAD)[None, :]
                k, v = tl.load(keys + at, mask=loaded, other=0.0), tl.load(values + at, mask=loaded, other=0.0)
                visible = tl.broadcast_to(seen[None, :], (TILE, BLOCK))
                top, total, mixed = _block(query, k, v, visible, top, total, mixed, factor, bend, True, CAPPED, PRECISION)
            at = slot.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + i
            _put(tops, totals, mixes, at, i < GROUP, number > segment, top, total, mixed, HEAD, PADDED)


@triton.jit(do_not_specialize=_SIZES)
def attend_together(
    q, keys, values, table, sequences, slots, items, tops, totals, mixes, rows, table_width, factor, bend,
    ROWS: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial results of segments that every row of a tile sees whole, for one KV head and its GROUP query heads."""
    head = tl.program_id(1)
    i = tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    for item in range(tl.program_id(0), tl.load(items), tl.num_programs(0)):
        entry = items + 1 + 4 * item
        leader, segment, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        sequence = tl.load(sequences + leader)
        pages = table + sequence.to(tl.int64) * table_width
        row = leader // ROWS * ROWS + i // GROUP
        ours = (i < ROWS * GROUP) & (row < rows)
        ours = ours & (tl.load(sequences + row, mask=ours, other=-1) == sequence)
        query_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + i % GROUP
        query = tl.load(q + query_head[:, None] * HEAD + d[None, :], mask=ours[:, None] & (d < HEAD)[None, :], other=0.0)
        for number in range(segment, end):
            top, total, mixed = _nothing(TILE, PADDED)
            for first in range(number * SEGMENT, (number + 1) * SEGMENT, BLOCK):
                k, v = _known_keys(keys, values, pages, first, head, d, KV_HEADS, HEAD, PADDED, PAGE, BLOCK)
                top, total, mixed = _block(query, k, v, None, top, total, mixed, factor, bend, False, CAPPED, PRECISION)
            pivot = tl.load(slots + rows + row, mask=ours, other=0)
            slot = tl.load(slots + row, mask=ours, other=0) + tl.maximum(number - pivot, 0)
            at = slot.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + i % GROUP
            _put(tops, totals, mixes, at, ours, number > segment, top, total, mixed, HEAD, PADDED)


@triton.jit
def _known_keys(
    keys, values, pages, first, head, d, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of a block that lies whole where the page table says."""
    b = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:  # one page holds the block
        place = (tl.load(pages + first // PAGE).to(tl.int64) * KV_HEADS + head) * (PAGE * HEAD) + first % PAGE * HEAD
        at = b[:, None] * HEAD + d[None, :]
        keys += place
        values += place
    else:
        page = tl.load(pages + (first + b) // PAGE).to(tl.int64)
        at = ((page * KV_HEADS + head) * (PAGE * HEAD) + (first + b) % PAGE * HEAD)[:, None] + d[None, :]
    if HEAD == PADDED:
        return tl.load(keys + at), tl.load(values + at)
    inside = tl.broadcast_to((d < HEAD)[None, :], (BLOCK, PADDED))
    return tl.load(keys + at, mask=inside, other=0.0), tl.load(values + at, mask=inside, other=0.0)


@triton.jit
def _put(tops, totals, mixes, at, ours, more, top, total, mixed, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """Store the sums of a segment, or fold them into those of the segments before it where one slot takes `more`."""
    d = tl.arange(0, PADDED)
    total = tl.max(total, 1)
    places = at[:, None] * HEAD + d[None, :]
    inside = ours[:, None] & (d < HEAD)[None, :]
    if more:
        tl.debug_barrier()  # other threads may have stored what this one reads
        top_a, total_a = tl.load(tops + at, mask=ours, other=0.0), tl.load(totals + at, mask=ours, other=0.0)
        mixed_a = tl.load(mixes + places, mask=inside, other=0.0)
        top, total, mixed = _fold(top_a, total_a, mixed_a, top, total, mixed)
    tl.store(tops + at, top, mask=ours)
    tl.store(totals + at, total, mask=ours)
    tl.store(mixes + places, mixed, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def merge_segments(
    slots, tops, totals, mixes, sinks, out, rows, HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    TOGETHER: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the segments of one row and query head in order. TOGETHER of them are read at once."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, PADDED)
    one = tl.arange(0, 1)
    slot, count = tl.load(slots + row).to(tl.int64), tl.load(slots + 2 * rows + row)
    top, total, mixed = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, PADDED), tl.float32)
    for first in range(0, count, TOGETHER):
        for step in tl.static_range(TOGETHER):
            inside = (first + step + one) < count
            at = (slot + first + step + one) * HEADS + head
            top_b = tl.load(tops + at, mask=inside, other=float("-inf"))
            total_b = tl.load(totals + at, mask=inside, other=0.0)
            mixed_b = tl.load(mixes + at[:, None] * HEAD + d[None, :], mask=inside[:, None] & (d < HEAD)[None, :], other=0.0)
            top, total, mixed = _fold(top, total, mixed, top_b, total_b, mixed_b)
    if SINKS:
        top, total, mixed = _sink(sinks, head + tl.zeros((1,), tl.int32), one >= 0, top, total, mixed)
    y = (mixed / total[:, None]).to(out.dtype.element_ty)
    at = out + (row.to(tl.int64) * HEADS + head + one)[:, None] * HEAD + d[None, :]
    tl.store(at, y, mask=(one >= 0)[:, None] & (d < HEAD)[None, :])


# --- prompts -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SIZES)
def attend_chunks(
    q, keys, values, table, chunks, sinks, out, table_width, factor, bend,
    TILE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of runs of consecutive tokens of one sequence, TILE // GROUP of them at a time.

    chunks[t] is (first row, rows, position of the first row, sequence, first position that holds something).
    """
    chunk, head = chunks + tl.program_id(0) * 5, tl.program_id(1)
    first_row, rows, start = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    pages = table + tl.load(chunk + 3).to(tl.int64) * table_width
    i = tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    position = start + tl.minimum(i // GROUP, rows - 1)
    low = tl.zeros((TILE,), tl.int32) + tl.load(chunk + 4)
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    ours = (i // GROUP < rows)[:, None] & (d < HEAD)[None, :]
    at_row = ((first_row + i // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + i % GROUP)[:, None] * HEAD + d[None, :]
    query = tl.load(q + at_row, mask=ours, other=0.0)
    lowest, stop = tl.min(low, 0), start + rows  # of the keys that some row sees
    begin = lowest // BLOCK * BLOCK
    whole = tl.minimum((tl.max(low, 0) + BLOCK - 1) // BLOCK, (stop + BLOCK - 1) // BLOCK) * BLOCK  # blocks that all rows see
    end = tl.maximum((start + 1) // BLOCK * BLOCK, whole)
    top_a, total_a, mixed_a = (
        tl.full((TILE,), float("-inf"), tl.float32),
        tl.zeros((TILE,), tl.float32),
        tl.zeros((TILE, PADDED), tl.float32),
    )
    top, total, mixed = _nothing(TILE, PADDED)
    top_a, total_a, mixed_a, top, total, mixed = _run(
        query, keys, values, pages, head, position, low, lowest, stop, begin, whole, factor, bend, top_a, total_a, mixed_a,
        top, total, mixed, True, TILE, KV_HEADS, HEAD, PADDED, PAGE, BLOCK, SEGMENT, CAPPED, PRECISION,
    )  # fmt: skip
    top_a, total_a, mixed_a, top, total, mixed = _run(
        query, keys, values, pages, head, position, low, lowest, stop, whole, end, factor, bend, top_a, total_a, mixed_a,
        top, total, mixed, False, TILE, KV_HEADS, HEAD, PADDED, PAGE, BLOCK, SEGMENT, CAPPED, PRECISION,
    )  # fmt: skip
    top_a, total_a, mixed_a, top, total, mixed = _run(
        query, keys, values, pages, head, position, low, lowest, stop, end, stop, factor, bend, top_a, total_a, mixed_a,
        top, total, mixed, True, TILE, KV_HEADS, HEAD, PADDED, PAGE, BLOCK, SEGMENT, CAPPED, PRECISION,
    )  # fmt: skip
    top_a, total_a, mixed_a = _fold(top_a, total_a, mixed_a, top, tl.max(total, 1), mixed)
    if SINKS:
        top_a, total_a, mixed_a = _sink(sinks, head * GROUP + i % GROUP, i // GROUP < rows, top_a, total_a, mixed_a)
    tl.store(out + at_row, (mixed_a / total_a[:, None]).to(out.dtype.element_ty), mask=ours)


@triton.jit
def _run(
    query, keys, values, pages, head, position, low, lowest, stop, begin, end, factor, bend, top_a, total_a, mixed_a,
    top, total, mixed, MASKED: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the blocks from `begin` to `end` into the open segment, and segments that end into those before."""
    d = tl.arange(0, PADDED)
    for first in range(begin, end, BLOCK):
        if MASKED:
            k, v, seen = _masked_keys(
                keys, values, pages, first, head, d, position, low, lowest, stop, KV_HEADS, HEAD, PAGE, BLOCK
            )
        else:
            k, v = _known_keys(keys, values, pages, first, head, d, KV_HEADS, HEAD, PADDED, PAGE, BLOCK)
            seen = None
        top, total, mixed = _block(query, k, v, seen, top, total, mixed, factor, bend, MASKED, CAPPED, PRECISION)
        if (first + BLOCK) % SEGMENT == 0:
            top_a, total_a, mixed_a = _fold(top_a, total_a, mixed_a, top, tl.max(total, 1), mixed)
            top, total, mixed = _nothing(TILE, PADDED)
    return top_a, total_a, mixed_a, top, total, mixed


@triton.jit
def _masked_keys(
    keys, values, pages, first, head, d, position, low, lowest, stop, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of a block that not every row of a tile sees whole, and which row sees which.

    Keys that no row sees are not read. A value that is not finite becomes zero, because other rows multiply it by zero, and
    its key becomes NaN, which reaches the rows that see it.
    """
    j = first + tl.arange(0, BLOCK)
    readable = (j >= lowest) & (j < stop)
    page = tl.load(pages + j // PAGE, mask=readable, other=0).to(tl.int64)
    at = ((page * KV_HEADS + head) * (PAGE * HEAD) + j % PAGE * HEAD)[:, None] + d[None, :]
    loaded = readable[:, None] & (d < HEAD)[None, :]
    k, v = tl.load(keys + at, mask=loaded, other=0.0), tl.load(values + at, mask=loaded, other=0.0)
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    spoiled = tl.max(tl.where(finite, 0, 1), 1) > 0
    k = tl.where(spoiled[:, None], float("nan"), k.to(tl.float32)).to(k.dtype)
    v = tl.where(finite, v, 0.0).to(v.dtype)
    return k, v, (j[None, :] <= position[:, None]) & (j[None, :] >= low[:, None])
