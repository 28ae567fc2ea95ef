"""The choice on the device for rows with penalties, biases, bans and filters. Other rows only test a flag.

The reference is `sampling.distribution`. min_p, top_k and top_p keep a prefix of the tokens in order of logit and id, so no
row is sorted: the best remaining token is tried, and where it is not kept, no token after it is either. Masses are sums of
integers, whose value does not depend on tiles or neighbouring rows.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.choice import best_of, score_of

__all__ = [
    "ADJUSTS", "BANS", "COUNTED", "FILTERS", "PENALTY", "ROW_PARAMS", "SEEN", "STOPS", "penalised_tiles", "penalised_winner",
]  # fmt: skip

# Words of a row's parameters: begin and end of its sequence's penalties, begin and end of its path's penalties, flags, top_k,
# min_p, repetition penalty, presence penalty, unused, top_p (float64).
ROW_PARAMS = tl.constexpr(12)
ADJUSTS, FILTERS, BANS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # flags of a row
# Words of a token penalty: token, flags, bias, frequency penalty times count.
PENALTY = tl.constexpr(4)
SEEN, COUNTED, STOPS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # flags of a token penalty
_UNIT = tl.constexpr(4398046511104.0)  # 2^42: weight of the most probable token; 2^17 of them stay below 2^63
_STEP = tl.constexpr(256)  # token penalties at a time


@triton.jit
def _real(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def penalised_tiles(
    logits, adjusted, temperatures, prefixes, positions, param_rows, row_params, penalties, tops, ids, peaks, vocab, tiles,
    BN: tl.constexpr,
):  # fmt: skip
    """For each tile of the vocabulary: the largest score, its lowest id, and the largest logit.

    Rows that adjust their logits write them to `adjusted`. param_rows[r] is the place of row r's parameters, or -1.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tile * BN
    token = first + tl.arange(0, BN)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
    place = tl.load(param_rows + row)
    if place >= 0:
        params = row_params + place * ROW_PARAMS
        if (tl.load(params + 4) & ADJUSTS) != 0:
            tl.store(adjusted + row * vocab + token, x, mask=inside)
            tl.debug_barrier()
            _adjust(logits + row * vocab, adjusted + row * vocab, params, penalties, 0, first, BN)
            tl.debug_barrier()
            _adjust(logits + row * vocab, adjusted + row * vocab, params, penalties, 2, first, BN)
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
def _adjust(logits, adjusted, params, penalties, list_at: tl.constexpr, first, BN: tl.constexpr):
    """Apply one list of penalties to this tile's raw logits. A later list overrides an earlier one."""
    begin, end = tl.load(params + list_at), tl.load(params + list_at + 1)
    bans = (tl.load(params + 4) & BANS) != 0
    repetition, presence = _real(params + 7), _real(params + 8)
    for at in range(begin, end, _STEP):
        i = at + tl.arange(0, _STEP)
        penalty = penalties + i * PENALTY
        token = tl.load(penalty, mask=i < end, other=-1)
        mine = (token >= first) & (token < first + BN)
        flags = tl.load(penalty + 1, mask=mine, other=0)
        x = tl.load(logits + token, mask=mine, other=0.0)
        x = tl.where(bans & ((flags & STOPS) != 0), float("-inf"), x)
        x += tl.load(penalty + 2, mask=mine, other=0).to(tl.float32, bitcast=True)
        divisor = tl.zeros_like(x) + repetition
        x = tl.where((flags & SEEN) != 0, tl.where(x > 0.0, tl.div_rn(x, divisor), x * repetition), x)
        frequency = tl.load(penalty + 3, mask=mine, other=0).to(tl.float32, bitcast=True)
        x = tl.where((flags & COUNTED) != 0, x - frequency - presence, x)
        tl.store(adjusted + token, x, mask=mine)


@triton.jit
def penalised_winner(
    logits, adjusted, temperatures, prefixes, positions, param_rows, row_params, reals, tops, ids, peaks, chosen, vocab, tiles,
    PADDED: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The chosen token of each row, -1 where there is none. `reals` are the parameters' words as float64."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    inside = tile < tiles
    top = tl.load(tops + row * tiles + tile, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * tiles + tile, mask=inside, other=2147483647)
    best, winner = best_of(top, token)
    sound = (best > float("-inf")) & (best < float("inf"))
    place = tl.load(param_rows + row)
    if (place >= 0) & sound:
        params = row_params + place * ROW_PARAMS
        flags = tl.load(params + 4)
        if (flags & FILTERS) != 0:
            source = logits + row * vocab
            if (flags & ADJUSTS) != 0:
                source = adjusted + row * vocab
            peak = tl.load(peaks + row * tiles + tile, mask=inside, other=float("-inf"))
            temperature = tl.load(temperatures + row)
            prefix = tl.load(prefixes + row).to(tl.uint64)
            position = (tl.load(positions + row) + 1).to(tl.uint64)
            top_p = tl.load(reals + place * (ROW_PARAMS // 2) + 5)
            winner = _kept_winner(
                source, top, token, winner, peak, temperature, prefix, position, tl.load(params + 5), top_p, _real(params + 6),
                vocab, tile, BN, WIDE,
            )  # fmt: skip
    tl.store(chosen + row, tl.where(sound, winner, -1))


@triton.jit
def _kept_winner(
    source, top, token, winner, peaks, temperature, prefix, position, top_k, top_p, min_p, vocab, tile,
    BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The kept token with the largest score. Kept tokens come before (value, last): a larger logit, or equal and a lower id.

    `top` and `token` are each tile's winner, of all its tokens at first. When a tile's winner turns out not to be kept, the
    tile is searched again.
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
            ids = index * BN + tl.arange(0, BN)
            y = tl.load(source + ids, mask=ids < vocab, other=float("-inf"))
            kept_ids = _is_before(y, ids, value, last) & (_weight(y, peak, temperature) >= min_p)
            score = tl.where(kept_ids, score_of(y, temperature, prefix, position, ids), float("-inf"))
            best, winner = best_of(score, ids)
            top = tl.where(tile == index, best, top)
            token = tl.where(tile == index, winner, token)
    return winner


@triton.jit
def _is_before(x, token, value, last):
    return (x > value) | ((x == value) & (token < last))


@triton.jit
def _weight(x, peak, temperature):
    """exp of the scaled logit, relative to the most probable token."""
    divisor = tl.zeros_like(x) + temperature
    return tl.exp(tl.div_rn(x, divisor) - tl.div_rn(tl.zeros_like(x) + peak, divisor))


@triton.jit
def _mass(source, value, last, peak, temperature, min_p, vocab, WIDE: tl.constexpr):
    """The mass of the tokens before (value, last), in units of 2^-42."""
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
    """(value, last) before which the first k tokens lie, by bisection of the floats and then of the ids of equal logits.

    The k-th largest of the tiles' peaks is a lower bound: k tiles reach it, so k tokens do.
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
    count_found = tl.zeros((), tl.int32) + vocab
    while (high - low > 1) & (count_found != top_k):
        middle = low + (high - low) // 2
        count = _count(source, _float(middle), vocab, vocab, WIDE)
        if count >= top_k:
            low, count_found = middle, count
        else:
            high = middle
    value = _float(low)
    few, many = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + vocab
    while (many - few > 1) & (count_found != top_k):
        last = few + (many - few) // 2
        if _count(source, value, last, vocab, WIDE) >= top_k:
            many = last
        else:
            few = last
    return value, many


@triton.jit
def _count(source, value, last, vocab, WIDE: tl.constexpr):
    """The number of tokens before (value, last)."""
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
