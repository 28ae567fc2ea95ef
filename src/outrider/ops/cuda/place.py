"""The Triton kernel between a stored q, k and v product and attention, for what the product's own epilogue cannot do.

Norms of heads, rotary tables by request, scaled queries, layers without rotary, heads whose widths no tile divides.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.kernels import row_of

__all__ = ["place"]


@triton.jit(do_not_specialize=["rows"])
def place(
    parts, bias, q_norm, q_bias, k_norm, k_bias, out, keys, values, slots, positions, sequences, starts, cos, sin, growth,
    rows, scale, eps,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, SHARED: tl.constexpr,
    WIDE: tl.constexpr, TURN: tl.constexpr, GROWTH: tl.constexpr, VARIANTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """What follows a q, k and v product that was stored: parts in order, bias, norms of heads, rotary, scale; q goes to out,
    k and v to the slots of their rows. A program has TILE heads of q, of k or of v.

    A row of the product has ALL_HEADS heads; those after v are an output gate. WIDE: a norm over all heads together. VARIANTS:
    a sequence's rotary table begins at row starts[sequence]. GROWTH: queries are scaled by position.
    """
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    Q: tl.constexpr = (HEADS + TILE - 1) // TILE
    KV: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    d = tl.arange(0, PADDED)
    turn = tl.load(positions + row)
    if VARIANTS:
        turn = turn + tl.load(starts + tl.load(sequences + row))
    c, s = _angles(cos, sin, turn, HEAD, TURN, PADDED)
    slot = tl.load(slots + row).to(tl.int64)
    held = (slot // PAGE) * (KV_HEADS * PAGE * HEAD) + slot % PAGE * HEAD
    if program < Q:
        head = program * TILE + tl.arange(0, TILE)
        inside = (head < HEADS)[:, None] & (d < HEAD)[None, :]
        w, b = _head_weights(q_norm, q_bias, head, d, inside, HEAD, NORM, NORM_BIAS, SHARED)
        x = _heads(parts, bias, row, rows, head, d, inside, PARTS, HAS_BIAS, ALL_HEADS, HEAD)
        x = _normed_heads(x, w, b, inside, eps, HEADS * HEAD if WIDE else HEAD, NORM, NORM_BIAS, WIDE)
        x = _turned(x, c, s, TURN, TILE, PADDED) * scale
        if GROWTH:
            x = x * tl.load(growth + turn)
        q_at = out + row * (HEADS * HEAD) + head[:, None] * HEAD + d[None, :]
        tl.store(q_at, x.to(out.dtype.element_ty), mask=inside)
    else:
        head = (program - Q) % KV * TILE + tl.arange(0, TILE)
        inside = (head < KV_HEADS)[:, None] & (d < HEAD)[None, :]
        kv_at = held + head[:, None] * (PAGE * HEAD) + d[None, :]
        if program < Q + KV:
            w, b = _head_weights(k_norm, k_bias, head, d, inside, HEAD, NORM, NORM_BIAS, SHARED)
            x = _heads(parts, bias, row, rows, HEADS + head, d, inside, PARTS, HAS_BIAS, ALL_HEADS, HEAD)
            x = _normed_heads(x, w, b, inside, eps, KV_HEADS * HEAD if WIDE else HEAD, NORM, NORM_BIAS, WIDE)
            x = _turned(x, c, s, TURN, TILE, PADDED)
            tl.store(keys + kv_at, x.to(keys.dtype.element_ty), mask=inside)
        else:
            v = HEADS + KV_HEADS + head
            x = _heads(parts, bias, row, rows, v, d, inside, PARTS, HAS_BIAS, ALL_HEADS, HEAD)
            tl.store(values + kv_at, x.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _heads(
    parts, bias, row, rows, head, d, inside,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ALL_HEADS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Some heads of a product's row (heads, padded head width), with its bias."""
    at = head[:, None] * HEAD + d[None, :]
    x = tl.load(parts + row * (ALL_HEADS * HEAD) + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(1, PARTS):
        x = x + tl.load(parts + (k * rows + row) * (ALL_HEADS * HEAD) + at, mask=inside, other=0.0)
    if HAS_BIAS:
        x = x + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _head_weights(
    weight, bias, head, d, inside, HEAD: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Weight and bias of a norm of heads, one for all or one for each, where they are used."""
    at = tl.broadcast_to(d[None, :], inside.shape) if SHARED else head[:, None] * HEAD + d[None, :]
    return row_of(weight, at, inside, NORM != "none"), row_of(bias, at, inside, HAS_BIAS)


@triton.jit
def _normed_heads(
    x, w, b, inside, eps, COUNT: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Heads after a norm of each, or of all of them together; COUNT values are normed together."""
    if NORM == "layer":
        x = tl.where(inside, x - _over_heads(x, WIDE) / COUNT, 0.0)
    if NORM != "none":
        x = x * (1.0 / tl.sqrt(_over_heads(x * x, WIDE) / COUNT + eps)) * w
        if HAS_BIAS:
            x = x + b
    return x


@triton.jit
def _over_heads(x, WIDE: tl.constexpr):
    """The sum of each head's values, or of all values."""
    if WIDE:
        return tl.sum(tl.sum(x, 1), 0)
    else:
        return tl.sum(x, 1)[:, None]


@triton.jit
def _angles(cos, sin, turn, HEAD: tl.constexpr, TURN: tl.constexpr, PADDED: tl.constexpr):
    """Cosines and sines (1, pairs) of row `turn` of the tables, where heads are rotated."""
    if TURN:
        pair = tl.arange(0, PADDED // 2)
        at, inside = turn.to(tl.int64) * (HEAD // 2) + pair, pair < HEAD // 2
        return tl.load(cos + at, mask=inside, other=0.0)[None, :], tl.load(sin + at, mask=inside, other=0.0)[None, :]
    else:
        return 0.0, 0.0


@triton.jit
def _turned(x, c, s, TURN: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr):
    """Heads after rotary."""
    if TURN:
        a, b = tl.split(tl.reshape(x, (TILE, PADDED // 2, 2)))
        x = tl.reshape(tl.join(tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)), (TILE, PADDED))
    return x
