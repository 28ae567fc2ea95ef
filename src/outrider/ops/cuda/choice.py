"""The choice on the device: Gumbel-max over logits, the next rows of a draft, KV moves.

The reference is `sampling.choice.draw`. Random bits are equal. Scores are float64, so a choice could differ from the
CPU's only where two scores agree to sixteen digits.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["VOCAB_TILE", "after_verdict", "best_of", "choose_tiles", "choose_winner", "move_slots", "next_rows", "score_of"]

VOCAB_TILE = 1024


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(prefix, position, token):
    """-log(-log1p(-v)) of 32 counter-based bits; see sampling/noise.py."""
    h = _mix64(prefix ^ position)
    key_a = (h & 0xFFFFFFFF).to(tl.uint32)
    key_b = (h >> 32).to(tl.uint32)
    word = token.to(tl.uint32) * 0x9E3779B9 + 0x85EBCA6B
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15)) * 0xD35A2D97
    word = word ^ (word >> 15)
    x = (key_a ^ word) * (key_b | 1)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    v = (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 1.0 - 5.9604644775390625e-08)
    small = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * (0.2 + v * (1.0 / 6.0))))))
    return -tl.log(tl.where(v < 0.0009765625, small, -tl.log(1.0 - v)))


@triton.jit
def score_of(x, temperature, prefix, position, token):
    """Float64 scores of a block of logits. Sampled rows are divided by the temperature and get noise. NaN counts as largest."""
    score = x.to(tl.float64)
    if temperature > 0.0:
        score = tl.div_rn(x, tl.zeros_like(x) + temperature).to(tl.float64) + _gumbel(prefix, position, token)
    return tl.where(x != x, float("inf"), score)


@triton.jit
def best_of(score, token):
    """The largest score of a block and its lowest token."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, token, 2147483647), 0)


@triton.jit
def choose_tiles(logits, temperatures, prefixes, positions, tops, ids, masses, vocab, tiles, BN: tl.constexpr):
    """For each tile of the vocabulary: the largest score, its lowest id, and the sum of exp(score - largest)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * BN + tl.arange(0, BN)
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    prefix = tl.load(prefixes + row).to(tl.uint64)
    position = (tl.load(positions + row) + 1).to(tl.uint64)
    score = score_of(x, tl.load(temperatures + row), prefix, position, token)
    top, best = best_of(score, token)
    shift = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
    mass = tl.sum(tl.exp((score - shift).to(tl.float32)), 0)
    at = row * tiles + tile
    tl.store(tops + at, top)
    tl.store(ids + at, best)
    tl.store(masses + at, mass)


@triton.jit
def choose_winner(tops, ids, masses, chosen, chances, tiles, PADDED: tl.constexpr):
    """The chosen token of each row, -1 where the logits leave none, and its share of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED)
    inside = tile < tiles
    top = tl.load(tops + row * tiles + tile, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * tiles + tile, mask=inside, other=2147483647)
    mass = tl.load(masses + row * tiles + tile, mask=inside, other=0.0)
    best = tl.max(top, 0)
    sound = (best > float("-inf")) & (best < float("inf"))
    winner = tl.min(tl.where(top == best, token, 2147483647), 0)
    shift = tl.where(sound, best, 0.0)
    share = 1.0 / tl.sum(mass * tl.exp((top - shift).to(tl.float32)), 0)
    tl.store(chosen + row, tl.where(sound, winner, -1))
    tl.store(chances + row, tl.where(sound, share, 0.0))


@triton.jit
def next_rows(
    chosen, chances, source, tokens, sequences, positions, roots, slots, table, drawn, probs, sequences_in, positions_in,
    temperatures_in, prefixes_in, temperatures, prefixes, table_width, step, batch,
    PAGE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Between two tokens of a draft: store the chosen tokens and make them the next rows of their sequences.

    Sequence b's choice is that of row source[b]. The rows of the step before are the arguments `*_in`.
    """
    b = tl.arange(0, PADDED)
    inside = b < batch
    row = tl.load(source + b, mask=inside, other=0)
    token = tl.load(chosen + row, mask=inside, other=0)
    tl.store(drawn + step * batch + b, token, mask=inside)
    tl.store(probs + step * batch + b, tl.load(chances + row, mask=inside, other=0.0), mask=inside)
    sequence = tl.load(sequences_in + row, mask=inside, other=0)
    position = tl.load(positions_in + row, mask=inside, other=0) + 1
    temperature = tl.load(temperatures_in + row, mask=inside, other=0.0)
    prefix = tl.load(prefixes_in + row, mask=inside, other=0)
    page = tl.load(table + sequence.to(tl.int64) * table_width + position // PAGE, mask=inside, other=0)
    tl.debug_barrier()
    tl.store(tokens + b, tl.maximum(token, 0), mask=inside)
    tl.store(sequences + b, sequence, mask=inside)
    tl.store(positions + b, position, mask=inside)
    tl.store(roots + b, position, mask=inside)
    tl.store(slots + b, page * PAGE + position % PAGE, mask=inside)
    tl.store(temperatures + b, temperature, mask=inside)
    tl.store(prefixes + b, prefix, mask=inside)


@triton.jit
def after_verdict(
    tokens, positions, roots, slots, lengths, future_tokens, table, table_width, batch,
    PAGE: tl.constexpr, PADDED: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Work out where the verdict leaves sequences whose next draft was launched while they were still being verified.

    Such a row b has a token below zero: the future token of the choice at its root. The choices at its nodes follow that one
    in the future-token buffer. lengths[b] nodes are verified; the first is future_tokens[lengths[batch + b]], the others
    follow at a stride of slots[b]. tokens[batch + b] is the root and positions[b] its position. Rows b and batch + b become
    the newest token and the one before it.
    """
    b = tl.arange(0, PADDED)
    verified = (b < batch) & (tl.load(tokens + b, mask=b < batch, other=0) < 0)
    chosen = -1 - tl.load(tokens + b, mask=verified, other=-1)
    nodes = tl.load(lengths + b, mask=verified, other=0)
    first = tl.load(lengths + batch + b, mask=verified, other=0)
    stride = tl.load(slots + b, mask=verified, other=0)
    root = tl.load(tokens + batch + b, mask=verified, other=0)
    start = tl.load(positions + b, mask=verified, other=0)
    node = tl.arange(0, NODES)[None, :]
    inside = verified[:, None] & (node < nodes[:, None])
    draft = tl.load(future_tokens + first[:, None] + node * stride[:, None], mask=inside, other=-2)
    choice = tl.load(future_tokens + chosen[:, None] + node, mask=inside, other=-1)
    accepted = tl.min(tl.where(draft == choice, NODES, node), 1)
    newest = tl.load(future_tokens + chosen + accepted, mask=verified, other=0)
    guessed = tl.load(future_tokens + first + (accepted - 1) * stride, mask=verified & (accepted > 0), other=0)
    position = start + accepted + 1
    row = table + b.to(tl.int64) * table_width
    page = tl.load(row + position // PAGE, mask=verified, other=0)
    page_before = tl.load(row + (position - 1) // PAGE, mask=verified, other=0)
    tl.debug_barrier()
    tl.store(tokens + b, tl.maximum(newest, 0), mask=verified)
    tl.store(tokens + batch + b, tl.maximum(tl.where(accepted > 0, guessed, root), 0), mask=verified)
    tl.store(positions + b, position, mask=verified)
    tl.store(positions + batch + b, position - 1, mask=verified)
    tl.store(roots + b, position, mask=verified)
    tl.store(roots + batch + b, position - 1, mask=verified)
    tl.store(slots + b, page * PAGE + position % PAGE, mask=verified)
    tl.store(slots + batch + b, page_before * PAGE + (position - 1) % PAGE, mask=verified)


@triton.jit
def move_slots(
    pool, moves, count, layer_size,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copy slots to slots in one layer and head; all sources are read before any target is written."""
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, COUNT)
    d = tl.arange(0, PADDED)
    inside = (i < count)[:, None] & (d < HEAD)[None, :]
    source = tl.load(moves + i, mask=i < count, other=0).to(tl.int64)
    target = tl.load(moves + count + i, mask=i < count, other=0).to(tl.int64)
    base = pool + layer * layer_size + head * (PAGE * HEAD)
    from_ = (source // PAGE) * (KV_HEADS * PAGE * HEAD) + source % PAGE * HEAD
    to = (target // PAGE) * (KV_HEADS * PAGE * HEAD) + target % PAGE * HEAD
    held = tl.load(base + from_[:, None] + d[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(base + to[:, None] + d[None, :], held, mask=inside)
