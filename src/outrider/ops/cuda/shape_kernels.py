"""The choice on the device for rows with penalties, biases, bans and filters; rows without pay for a flag.

The twin is `sampling.distribution`. What min_p, top_k and top_p keep is a beginning of the tokens in order of logit and
id, so no row is sorted: the likeliest winner is tried, and where it is not kept, neither is anything behind it. Masses
are sums of integers, which have no order, and so neither tiles nor neighbours can change them.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.choice import best_of, score_of

__all__ = ["ADJUSTS", "BANS", "COUNTED", "ENTRY", "FILTERS", "HEAD", "SEEN", "STOPS", "shaped_tiles", "shaped_winner"]

# Words of a row's head: where its sequence's entries begin and end, where those of its path do, flags, top_k, min_p,
# repetition penalty, presence penalty, nothing, top_p (float64).
HEAD = tl.constexpr(12)
ADJUSTS, FILTERS, BANS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # of a head
# Words of an entry: token, marks, bias, frequency penalty times count.
ENTRY = tl.constexpr(4)
SEEN, COUNTED, STOPS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # of an entry
_UNIT = tl.constexpr(4398046511104.0)  # 2^42: what the likeliest token weighs; 2^17 of them stay below 2^63
_STEP = tl.constexpr(256)  # entries at a time


@triton.jit
def _real(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def shaped_tiles(
    logits, adjusted, temperatures, prefixes, positions, shaped, heads, entries, tops, ids, peaks, vocab, tiles,
    BN: tl.constexpr,
):  # fmt: skip
    """Of each tile of the vocabulary: the largest score, its lowest id, and the largest logit.

    Rows that adjust their logits leave them in `adjusted`. shaped[r] is the place of row r's head, or -1.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tile * BN
    token = first + tl.arange(0, BN)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
    place = tl.load(shaped + row)
    if place >= 0:
        head = heads + place * HEAD
        if (tl.load(head + 4) & ADJUSTS) != 0:
            tl.store(adjusted + row * vocab + token, x, mask=inside)
            tl.debug_barrier()
            _adjust(logits + row * vocab, adjusted + row * vocab, head, entries, 0, first, BN)
            tl.debug_barrier()
            _adjust(logits + row * vocab, adjusted + row * vocab, head, entries, 2, first, BN)
            tl.debug_barrier()
            x = tl.load(adjusted + row * vocab + token, mask=inside, other=float("-inf"))
    prefix = tl.load(prefixes + row).to(tl.uint64)
    position = (tl.load(positions + row) + 1).to(tl.uint64)
    top, best = best_of(score_of(x, tl.load(temperatures + row), prefix, position, token), token)
    at = row * tiles + tile
    tl.store(tops + at, top)
    tl.store(ids + at, best)
    tl.store(peaks + at, tl.max(x, 0))


@triton.jit
def _adjust(logits, adjusted, head, entries, list_at: tl.constexpr, first, BN: tl.constexpr):
    """Write this tile's tokens of one list, made from the raw logits: a later list overrules an earlier one."""
    begin, end = tl.load(head + list_at), tl.load(head + list_at + 1)
    bans = (tl.load(head + 4) & BANS) != 0
    repetition, presence = _real(head + 7), _real(head + 8)
    for at in range(begin, end, _STEP):
        i = at + tl.arange(0, _STEP)
        entry = entries + i * ENTRY
        token = tl.load(entry, mask=i < end, other=-1)
        mine = (token >= first) & (token < first + BN)
        marks = tl.load(entry + 1, mask=mine, other=0)
        x = tl.load(logits + token, mask=mine, other=0.0)
        x = tl.where(bans & ((marks & STOPS) != 0), float("-inf"), x)
        x += tl.load(entry + 2, mask=mine, other=0).to(tl.float32, bitcast=True)
        divisor = tl.zeros_like(x) + repetition
        x = tl.where((marks & SEEN) != 0, tl.where(x > 0.0, tl.div_rn(x, divisor), x * repetition), x)
        less = tl.load(entry + 3, mask=mine, other=0).to(tl.float32, bitcast=True)
        x = tl.where((marks & COUNTED) != 0, x - less - presence, x)
        tl.store(adjusted + token, x, mask=mine)


@triton.jit
def shaped_winner(
    logits, adjusted, temperatures, prefixes, positions, shaped, heads, reals, tops, ids, peaks, chosen, vocab, tiles,
    PADDED: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The chosen token of each row, -1 where the logits leave none. `reals` are the heads' words two by two."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    inside = tile < tiles
    top = tl.load(tops + row * tiles + tile, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * tiles + tile, mask=inside, other=2147483647)
    best, winner = best_of(top, token)
    sound = (best > float("-inf")) & (best < float("inf"))
    place = tl.load(shaped + row)
    if (place >= 0) & sound:
        head = heads + place * HEAD
        flags = tl.load(head + 4)
        if (flags & FILTERS) != 0:
            source = logits + row * vocab
            if (flags & ADJUSTS) != 0:
                source = adjusted + row * vocab
            peak = tl.load(peaks + row * tiles + tile, mask=inside, other=float("-inf"))
            temperature = tl.load(temperatures + row)
            prefix = tl.load(prefixes + row).to(tl.uint64)
            position = (tl.load(positions + row) + 1).to(tl.uint64)
            top_p = tl.load(reals + place * (HEAD // 2) + 5)
            winner = _kept_winner(
                source, top, token, winner, peak, temperature, prefix, position, tl.load(head + 5), top_p, _real(head + 6),
                vocab, tile, BN, WIDE,
            )  # fmt: skip
    tl.store(chosen + row, tl.where(sound, winner, -1))


@triton.jit
def _kept_winner(
    source, top, token, winner, peaks, temperature, prefix, position, top_k, top_p, min_p, vocab, tile,
    BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest score among the tokens kept. Those before (value, last) may be: larger, or equal with a lower id.

    top and token hold each tile's winner, of all its tokens at first; where that one is not kept, the tile is
    looked through again, but only if its turn comes.
    """
    value = tl.full((), float("-inf"), tl.float32)
    last = tl.zeros((), tl.int32) + vocab
    peak = tl.max(peaks, 0)
    if (top_k > 0) & (top_k < vocab):
        value, last = _first_k(source, top_k, peaks, vocab, WIDE)
    target = tl.full((), 0.0, tl.float64)
    if top_p < 1.0:
        target = top_p * _mass(source, value, last, peak, temperature, min_p, vocab, WIDE).to(tl.float64)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        best, winner = best_of(top, token)
        x = tl.load(source + winner)
        kept = _is_before(x, winner, value, last) & (_weight(x, peak, temperature) >= min_p)
        if kept & (top_p < 1.0):
            kept = _mass(source, x, winner, peak, temperature, min_p, vocab, WIDE).to(tl.float64) < target
            value, last = tl.where(kept, value, x), tl.where(kept, last, winner)
        if kept:
            searching = searching - 1
        else:
            index = winner // BN
            own = index * BN + tl.arange(0, BN)
            y = tl.load(source + own, mask=own < vocab, other=float("-inf"))
            left = _is_before(y, own, value, last) & (_weight(y, peak, temperature) >= min_p)
            score = tl.where(left, score_of(y, temperature, prefix, position, own), float("-inf"))
            best, winner = best_of(score, own)
            top = tl.where(tile == index, best, top)
            token = tl.where(tile == index, winner, token)
    return winner


@triton.jit
def _is_before(x, token, value, last):
    return (x > value) | ((x == value) & (token < last))


@triton.jit
def _weight(x, peak, temperature):
    """exp of the scaled logit, the likeliest token's 1."""
    divisor = tl.zeros_like(x) + temperature
    return tl.exp(tl.div_rn(x, divisor) - tl.div_rn(tl.zeros_like(x) + peak, divisor))


@triton.jit
def _mass(source, value, last, peak, temperature, min_p, vocab, WIDE: tl.constexpr):
    """What the tokens before (value, last) weigh together, in units of 2^-42."""
    total = tl.zeros((), tl.int64)
    for start in range(0, vocab, WIDE):
        token = start + tl.arange(0, WIDE)
        x = tl.load(source + token, mask=token < vocab, other=float("-inf"))
        weight = _weight(x, peak, temperature)
        counts = _is_before(x, token, value, last) & (weight >= min_p)
        total += tl.sum(tl.where(counts, weight * _UNIT, 0.0).to(tl.int64), 0)
    return total


@triton.jit
def _first_k(source, top_k, peaks, vocab, WIDE: tl.constexpr):
    """(value, last) before which lie the first k tokens: by halving, first the floats in order, then the ids of equals.

    The k-th largest of the tiles' peaks is a beginning: k tiles reach it, so k tokens do.
    """
    low = tl.full((), -2139095041, tl.int64)  # -inf: all tokens are at least that
    high = _key(tl.max(peaks, 0)).to(tl.int64) + 1
    above = high
    while above - low > 1:
        middle = low + (above - low) // 2
        if tl.sum((peaks >= _float(middle)).to(tl.int32), 0) >= top_k:
            low = middle
        else:
            above = middle
    found = tl.zeros((), tl.int32) + vocab
    while (high - low > 1) & (found != top_k):
        middle = low + (high - low) // 2
        count = _count(source, _float(middle), vocab, vocab, WIDE)
        if count >= top_k:
            low, found = middle, count
        else:
            high = middle
    value = _float(low)
    few, many = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab
    while (many - few > 1) & (found != top_k):
        last = few + (many - few) // 2
        if _count(source, value, last, vocab, WIDE) >= top_k:
            many = last
        else:
            few = last
    return value, many


@triton.jit
def _count(source, value, last, vocab, WIDE: tl.constexpr):
    """How many tokens lie before (value, last)."""
    total = tl.zeros((WIDE,), tl.int32)
    for start in range(0, vocab, WIDE):
        token = start + tl.arange(0, WIDE)
        x = tl.load(source + token, mask=token < vocab, other=float("-inf"))
        total += (_is_before(x, token, value, last) & (token < vocab)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _key(x):
    """Integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    short = key.to(tl.int32)
    return (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
