"""Triton kernels that grow draft trees on the device, level by level. `draft/growth.py` is the reference.

Nodes of a sequence have fixed numbers: BRANCH children of the root first, then BRANCH children of each of the BEAM nodes that
a level expands. Numbers ascend in the order in which the reference adds nodes, so that ties fall alike; the survival of a
number without a node is -1. Rows of a level lie sequence by sequence, BEAM each.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.choice import best_of, score_of

__all__ = [
    "add_children", "keep_best", "next_level", "number_kept", "place_tree", "put_best", "put_tree", "rank_tiles",
]  # fmt: skip

_NONE = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["vocab", "tiles"])
def rank_tiles(
    logits, ids, temperatures, prefixes, positions, tops, tokens, masses, vocab, tiles,
    HAS_IDS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For each tile of a row's outputs: the K largest scores with their tokens, and the sum of exp(score - largest).

    ids[column] is the token of an output.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BN + tl.arange(0, BN)
    inside = column < vocab
    token = tl.load(ids + column, mask=inside, other=_NONE).to(tl.int32) if HAS_IDS else column
    x = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf"))
    prefix = tl.load(prefixes + row).to(tl.uint64)
    position = (tl.load(positions + row) + 1).to(tl.uint64)
    score = score_of(x, tl.load(temperatures + row), prefix, position, token)
    top = tl.max(score, 0)
    shift = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
    at = row * tiles + tile
    tl.store(masses + at, tl.sum(tl.exp((score - shift).to(tl.float32)), 0))
    for k in range(K):
        top, best = best_of(score, token)
        tl.store(tops + at * K + k, top)
        tl.store(tokens + at * K + k, best)
        score = tl.where(token == best, float("-inf"), score)


@triton.jit
def _ranked(
    tops, tokens, masses, row, tiles, K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    """The best scores of a row with their tokens, the largest one, whether there is one, and the sum of the exponentials."""
    tile, i = tl.arange(0, TILES), tl.arange(0, CANDIDATES)
    best = tl.load(tops + (row * tiles + tile) * K, mask=tile < tiles, other=float("-inf"))
    mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0.0)
    score = tl.load(tops + row * tiles * K + i, mask=i < tiles * K, other=float("-inf"))
    token = tl.load(tokens + row * tiles * K + i, mask=i < tiles * K, other=_NONE)
    top = tl.max(best, 0)
    sound = (top > float("-inf")) & (top < float("inf"))
    shift = tl.where(sound, top, 0.0)
    total = tl.where(sound, tl.sum(mass * tl.exp((best - shift).to(tl.float32)), 0), 1.0)
    return score, token, shift, sound, total


@triton.jit(do_not_specialize=["tiles"])
def put_best(
    tops, tokens, masses, chosen, chances, tiles, K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    """The K best tokens of a row and their shares of the exponentials; -1 where the logits leave no choice."""
    row = tl.program_id(0).to(tl.int64)
    score, token, shift, sound, total = _ranked(tops, tokens, masses, row, tiles, K, TILES, CANDIDATES)
    for k in range(K):
        highest, best = best_of(score, token)
        chance = tl.exp((highest - shift).to(tl.float32)) / total
        tl.store(chosen + row * K + k, tl.where(sound, best, -1))
        tl.store(chances + row * K + k, tl.where(sound, chance, 0.0))
        score = tl.where(token == best, float("-inf"), score)


@triton.jit(do_not_specialize=["tiles", "nodes", "first"])
def add_children(
    tops, tokens, masses, frontier, node_tokens, node_parents, survival, faults, tiles, nodes, first,
    BEAM: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The K best tokens of a row become the children of its node. BEAM 0: rows are roots.

    A child's survival is its chance, the share of the exponentials, times its parent's. Logits that leave no choice are a fault.
    """
    row = tl.program_id(0).to(tl.int64)
    score, token, shift, sound, total = _ranked(tops, tokens, masses, row, tiles, K, TILES, CANDIDATES)
    if BEAM == 0:
        sequence, parent, above = row, -1, (row * 0 + 1).to(tl.float64)
        at = sequence * nodes
    else:
        sequence, parent = row // BEAM, tl.load(frontier + row)
        above = tl.load(survival + sequence * nodes + parent, mask=parent >= 0, other=-1.0)
        at = sequence * nodes + first + row % BEAM * K
    expanded = above >= 0.0
    tl.store(faults + sequence, 1, mask=expanded & (sound == 0))
    for k in range(K):
        highest, chosen = best_of(score, token)
        chance = tl.exp((highest - shift).to(tl.float32)) / total
        alive = expanded & sound & (chance > 0.0)
        tl.store(node_tokens + at + k, tl.where(alive, chosen, 0))
        tl.store(node_parents + at + k, parent)
        tl.store(survival + at + k, tl.where(alive, above * chance.to(tl.float64), -1.0))
        score = tl.where(token == chosen, float("-inf"), score)


@triton.jit(do_not_specialize=["table_width", "nodes", "first", "count", "depth", "scratch"])
def next_level(
    survival, node_tokens, rooms, limits, fed, root_positions, root_firsts, root_sequences, table, ancestors_in,
    frontier, sources, tokens, sequences, positions, roots, firsts, slots, ancestors,
    table_width, nodes, first, count, depth, scratch,
    GROUP: tl.constexpr, BEAM: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, LEVELS: tl.constexpr,
    BEAM_PADDED: tl.constexpr, CHILDREN: tl.constexpr, LEVELS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose which of the children just added are expanded next, and lay out their rows. One program for each sequence.

    They are the BEAM best of those that are among the `room` best nodes so far; all nodes expanded take at most `room` slots.
    Rows of a level come from GROUP rows of the level before for each sequence. A row without a node reads slot 0 of its
    sequence and writes to the scratch slot.
    """
    b = tl.program_id(0).to(tl.int64)
    room, known = tl.load(rooms + b), tl.load(fed + b)
    c = tl.arange(0, CHILDREN)
    child = first + c
    mine = tl.load(survival + b * nodes + child, mask=c < count, other=-1.0)
    ahead, rank = tl.zeros((CHILDREN,), tl.int32), tl.zeros((CHILDREN,), tl.int32)
    added = 0
    for start in range(0, first + count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(survival + b * nodes + other, mask=other < first + count, other=-1.0)
        better = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < child[:, None]))
        better = better & (theirs[None, :] >= 0.0)
        ahead += tl.sum(better.to(tl.int32), 1)
        rank += tl.sum((better & (other[None, :] >= first)).to(tl.int32), 1)
        added += tl.sum((theirs >= 0.0).to(tl.int32), 0)
    width = tl.minimum(BEAM, room - known)
    width = tl.where(depth >= tl.load(limits + b), 0, width)
    if BEAM == 1:
        width = tl.where(added == room, 0, width)
    chosen = (mine >= 0.0) & (ahead < room) & (rank < width)
    d = tl.arange(0, BEAM_PADDED)
    placed = chosen[:, None] & (rank[:, None] == d[None, :])
    number = tl.sum(tl.where(placed, c[:, None], 0), 0)
    filled = tl.sum(placed.to(tl.int32), 0) > 0
    tl.store(fed + b, known + tl.sum(filled.to(tl.int32), 0))
    row, root = b * BEAM + d, tl.load(root_positions + b)
    real, sequence = d < BEAM, tl.load(root_sequences + b)
    place = root + 1 + known + d
    page = tl.load(table + sequence.to(tl.int64) * table_width + place // PAGE, mask=real & filled, other=0)
    slot = tl.where(filled, page * PAGE + place % PAGE, scratch)
    source = b * GROUP + number // K
    tl.store(frontier + row, tl.where(filled, first + number, -1), mask=real)
    tl.store(sources + row, source, mask=real)
    tl.store(tokens + row, tl.load(node_tokens + b * nodes + first + number, mask=filled, other=0), mask=real)
    tl.store(sequences + row, tl.zeros_like(d) + sequence, mask=real)
    tl.store(positions + row, tl.where(filled, root + depth, 0), mask=real)
    tl.store(roots + row, tl.where(filled, root, 0), mask=real)
    tl.store(firsts + row, tl.where(filled, tl.load(root_firsts + b), 0), mask=real)
    tl.store(slots + row, slot, mask=real)
    level = tl.arange(0, LEVELS_PADDED)
    above = (level < depth - 1)[None, :] & (real & filled)[:, None]
    path = tl.load(ancestors_in + source[:, None] * LEVELS + level[None, :], mask=above, other=0)
    path = tl.where(level[None, :] == depth - 1, slot[:, None], path)
    tl.store(ancestors + row[:, None] * LEVELS + level[None, :], path, mask=real[:, None] & (level < LEVELS)[None, :])


@triton.jit(do_not_specialize=["nodes"])
def keep_best(survival, rooms, kept, nodes, MINE: tl.constexpr, CHUNK: tl.constexpr):
    """kept[b, i]: whether node i is among the `room` best. A parent is never less likely than its child."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * MINE + tl.arange(0, MINE)
    mine = tl.load(survival + b * nodes + node, mask=node < nodes, other=-1.0)
    ahead = tl.zeros((MINE,), tl.int32)
    for start in range(0, nodes, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(survival + b * nodes + other, mask=other < nodes, other=-1.0)
        better = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < node[:, None]))
        ahead += tl.sum((better & (theirs[None, :] >= 0.0)).to(tl.int32), 1)
    is_kept = (mine >= 0.0) & (ahead < tl.load(rooms + b))
    tl.store(kept + b * nodes + node, is_kept.to(tl.int32), mask=node < nodes)


@triton.jit(do_not_specialize=["nodes"])
def number_kept(kept, places, counts, faults, nodes, NODES: tl.constexpr):
    """places[b, i]: the number of node i among those that are kept. counts[b]: how many they are, -1 after a fault."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    is_kept = tl.load(kept + b * nodes + node, mask=node < nodes, other=0)
    tl.store(places + b * nodes + node, tl.cumsum(is_kept, 0) - 1, mask=node < nodes)
    tl.store(counts + b, tl.where(tl.load(faults + b) > 0, -1, tl.sum(is_kept, 0)))


@triton.jit(do_not_specialize=["nodes", "most"])
def put_tree(
    kept, places, node_tokens, node_parents, survival, tokens, parents, chances, nodes, most, MINE: tl.constexpr
):  # fmt: skip
    """The kept nodes side by side, at most `most` of a sequence."""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * MINE + tl.arange(0, MINE)
    at = b * nodes + node
    is_kept = tl.load(kept + at, mask=node < nodes, other=0) > 0
    place = tl.load(places + at, mask=is_kept, other=0)
    parent = tl.load(node_parents + at, mask=is_kept, other=-1)
    above = tl.load(places + b * nodes + parent, mask=is_kept & (parent >= 0), other=-1)
    put = b * most + place
    inside = is_kept & (place < most)
    tl.store(tokens + put, tl.load(node_tokens + at, mask=is_kept, other=0), mask=inside)
    tl.store(parents + put, above, mask=inside)
    tl.store(chances + put, tl.load(survival + at, mask=is_kept, other=0.0).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["most", "table_width", "depth", "scratch"])
def place_tree(
    tree_tokens, tree_parents, counts, limits, tokens, sequences, positions, roots, firsts, slots, table, ancestors,
    most, table_width, depth, scratch, PAGE: tl.constexpr, LEVELS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Lay finished trees out as rows of the target's forward: node i in row root + 1 + i and in the slot after that many.

    One program for each tree; `limits` are the nodes that each may keep, its levels, and its root's row, -1 for none. Its rows
    were filled for a chain of as many nodes as it may keep; those that it lacks read slot 0 of their sequence and write to the
    scratch slot.
    """
    b = tl.program_id(0).to(tl.int64)
    first, room = tl.load(limits + 2 * tl.num_programs(0) + b), tl.load(limits + b)
    if first >= 0:
        root, sequence = tl.load(positions + first), tl.load(sequences + first)
        node = tl.arange(0, NODES)
        real, filled = node < room, node < tl.minimum(tl.load(counts + b), room)
        row, pages = first + 1 + node, table + sequence.to(tl.int64) * table_width
        above, level = tl.where(filled, node, -1), tl.zeros((NODES,), tl.int32)
        for _ in range(LEVELS):
            level += (above >= 0).to(tl.int32)
            above = tl.load(tree_parents + b * most + above, mask=above >= 0, other=-1)
        above = tl.where(filled, node, -1)
        for step in range(LEVELS):
            place = root + 1 + above
            page = tl.load(pages + place // PAGE, mask=above >= 0, other=0)
            at = row.to(tl.int64) * depth + level - 1 - step
            tl.store(ancestors + at, page * PAGE + place % PAGE, mask=above >= 0)
            above = tl.load(tree_parents + b * most + above, mask=above >= 0, other=-1)
        tl.store(tokens + row, tl.load(tree_tokens + b * most + node, mask=filled, other=0), mask=real)
        tl.store(positions + row, tl.where(filled, root + level, 0), mask=real)
        tl.store(roots + row, tl.where(filled, root, 0), mask=real)
        lacking = real & (node >= tl.load(counts + b))
        tl.store(firsts + row, tl.zeros_like(node), mask=lacking)
        tl.store(slots + row, tl.zeros_like(node) + scratch, mask=lacking)
