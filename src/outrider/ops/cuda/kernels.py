"""Triton kernels of decoder layers. The bits of a row depend on that row alone.

A product sums the inner dimension in a fixed number of parts, each in order, and adds the parts in order (deterministic
split-K). Tiles change which elements are computed together, never the order of one element's additions. Attention is in
`attention`.

Weights of q, k, gate and up are stored with pairs side by side (`pair_rows`), so that rotary and silu(gate) * up need only
a neighbouring column. q and k stay in that order, which does not change their dot products.

Layers like Llama's need `linear` in its forms and `finish`. Norms of heads, tables by request and whatever else befalls
queries and keys is `place` (ops/cuda/place.py), after a product that was stored.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "embed", "finish", "finish_tile", "linear", "row_of", "store_codes"]


@triton.jit
def embed(
    tokens, future_tokens, embedding, positions, learned, weight, norm_bias, stream, read, vocab, scale, eps, table_rows, offset,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LEARNED: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr,
):  # fmt: skip
    """The float32 stream of each row's token, and its first norm. A token of -1 - i is read from future_tokens[i].

    LEARNED: position p has row p + offset of the table `learned`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    w, b = row_of(weight, column, inside, NORM != "none"), row_of(norm_bias, column, inside, NORM_BIAS)
    token = tl.load(tokens + row).to(tl.int64)
    drawn = tl.load(future_tokens + (-1 - token), mask=token < 0, other=0)
    token = tl.where(token < 0, tl.minimum(tl.maximum(drawn, 0), vocab - 1), token)
    x = tl.load(embedding + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    if LEARNED:
        place = tl.minimum(tl.load(positions + row) + offset, table_rows - 1).to(tl.int64)  # padding lies past the context
        x = x + tl.load(learned + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(stream + row * WIDTH + column, x, mask=inside)
    y = _normed(x, w, b, inside, eps, WIDTH, NORM, NORM_BIAS)
    tl.store(read + row * WIDTH + column, y.to(read.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    parts, bias, post_weight, post_bias, stream, weight, norm_bias, read, read_scale, rows, post_eps, scale, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, POST: tl.constexpr,
    POST_BIAS: tl.constexpr, NORM: tl.constexpr, NORM_BIAS: tl.constexpr, FILLED: tl.constexpr = 0, BLOCK: tl.constexpr = 0,
    LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """Join a product to the stream: stream += scale * post norm of (parts in order + bias). Then norm the stream.

    With PARTS = 0 there is no product, and float32 rows are only normed. Rows that were normed, or were not where NORM is
    "none", are rounded to the weights' dtype; with a LIMIT they become codes then, as `store_codes` says.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    # weights come first, because the store below holds later loads back
    w, b = row_of(weight, column, inside, NORM != "none"), row_of(norm_bias, column, inside, NORM_BIAS)
    x = tl.load(stream + row * WIDTH + column, mask=inside, other=0.0)
    if PARTS > 0:
        post_w, post_b = row_of(post_weight, column, inside, POST != "none"), row_of(post_bias, column, inside, POST_BIAS)
        product = tl.load(parts + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(1, PARTS):
            product = product + tl.load(parts + (k * rows + row) * WIDTH + column, mask=inside, other=0.0)
        if HAS_BIAS:
            product = product + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        product = _normed(product, post_w, post_b, inside, post_eps, WIDTH, POST, POST_BIAS)
        x = x + product * scale
        tl.store(stream + row * WIDTH + column, x, mask=inside)
    y = _normed(x, w, b, inside, eps, WIDTH, NORM, NORM_BIAS)
    if LIMIT == 0.0:
        tl.store(read + row * WIDTH + column, y.to(read.dtype.element_ty), mask=inside)
    else:
        store_codes(y.to(tl.bfloat16).to(tl.float32), read, read_scale, row, FILLED, PADDED, BLOCK, LIMIT)


@triton.jit
def store_codes(
    values, codes, scales, row, FILLED: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """A row (PADDED,) as FILLED codes of FP8 or int8, with a scale for all of it or for each BLOCK.

    The largest magnitude becomes LIMIT. A value that is not finite makes its scale NaN.
    """
    block = tl.arange(0, PADDED // BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.reshape(values, (PADDED // BLOCK, BLOCK))
    largest = tl.max(tl.abs(values), 1)
    sound = tl.sum(values * 0.0, 1)  # zero, or NaN
    unit = tl.where(largest > 0.0, largest, LIMIT)
    if LIMIT == 127.0:
        nearest = tl.full(values.shape, 12582912.0, tl.float32)  # to which an integer is added
        y = tl.fma(values, (LIMIT / unit)[:, None], nearest) - nearest
    else:
        y = values * (LIMIT / unit)[:, None]
    tl.store(codes + row * FILLED + column, y.to(codes.dtype.element_ty), mask=column < FILLED)
    count = FILLED // BLOCK if BLOCK < FILLED else 1
    tl.store(scales + row * count + block, unit / LIMIT + sound, mask=block < count)


@triton.jit
def row_of(at, column, inside, USED: tl.constexpr):
    """A row of weights in float32, where it is used."""
    if USED:
        return tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _normed(x, w, b, inside, eps, WIDTH: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A row after its norm: "rms", "layer", or "none"."""
    if NORM == "layer":
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    if NORM != "none":
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)) * w
        if HAS_BIAS:
            x = x + b
    return x


@triton.jit(do_not_specialize=["rows"])  # one compilation for all row counts of a tile
def linear(
    x, w, bias, out, keys, values, slots, positions, cos, sin, rows, columns,
    INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_K: tl.constexpr, IN_REGISTER: tl.constexpr, ACTIVATION: tl.constexpr = "",
    SCALE: tl.constexpr = 1.0, CAP: tl.constexpr = 0.0,
):  # fmt: skip
    """x (rows, INNER) times w (columns, INNER) transposed, and what follows it.

    The inner dimension is summed in SPLIT_K parts, each one chain of additions, and the parts are added in order. With
    IN_REGISTER one program runs the chains side by side, because a single chain would wait for the latency of the tensor
    cores; with many rows it runs them one by one. The bits are equal.

    FORM "store": out = SCALE * product, softly capped at CAP where that is not 0. "gated": pairs of columns become
    ACTIVATION(gate) * up; "ungated": ACTIVATION of each column. "qkv": rotary on q and k; q goes to out, k and v to the slots
    of their rows. "split_k": each part has programs of its own, and its partial sums go to out (SPLIT_K, rows, columns), for
    `finish` or `place`.
    """
    first = tl.program_id(1) * BN
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = first + tl.arange(0, BN)
    row_in, column_in = row < rows, column < columns
    x_at = x + row[:, None].to(tl.int64) * INNER
    w_at = w + column[None, :].to(tl.int64) * INNER
    SPAN: tl.constexpr = INNER // SPLIT_K
    if FORM == "split_k":
        part = tl.program_id(2)
        acc = _run(x_at + part * SPAN, w_at + part * SPAN, row_in, column_in, SPAN, 1, BM, BN, BK, PRECISION)
        at = out + (part * rows + row[:, None]).to(tl.int64) * columns + column[None, :]
        tl.store(at, acc, mask=row_in[:, None] & column_in[None, :])
    else:
        if SPLIT_K == 4 and IN_REGISTER:
            acc = _run_in_register(x_at, w_at, row_in, column_in, SPAN, BM, BN, BK, PRECISION)
        else:
            acc = _run(x_at, w_at, row_in, column_in, SPAN, SPLIT_K, BM, BN, BK, PRECISION)
        if HAS_BIAS:
            bias_row = tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)
            acc = _add(acc, tl.broadcast_to(bias_row[None, :], acc.shape))
        finish_tile(
            acc, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, columns,
            BM, BN, FORM, HEADS, KV_HEADS, HEAD, PAGE, ACTIVATION, SCALE, CAP,
        )  # fmt: skip


@triton.jit
def _run_in_register(
    x_at, w_at, row_in, column_in, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Four parts of the inner dimension side by side in registers, and their sum."""
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    acc_1 = tl.zeros((BM, BN), tl.float32)
    acc_2 = tl.zeros((BM, BN), tl.float32)
    acc_3 = tl.zeros((BM, BN), tl.float32)
    for start in range(0, SPAN, BK):
        at = start + k
        acc = _step(x_at, w_at, at, row_in, column_in, acc, SPAN, BK, PRECISION)
        acc_1 = _step(x_at + SPAN, w_at + SPAN, at, row_in, column_in, acc_1, SPAN, BK, PRECISION)
        acc_2 = _step(x_at + 2 * SPAN, w_at + 2 * SPAN, at, row_in, column_in, acc_2, SPAN, BK, PRECISION)
        acc_3 = _step(x_at + 3 * SPAN, w_at + 3 * SPAN, at, row_in, column_in, acc_3, SPAN, BK, PRECISION)
    return _add(_add(_add(acc, acc_1), acc_2), acc_3)


@triton.jit
def _run(
    x_at, w_at, row_in, column_in, SPAN: tl.constexpr, SPLIT_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts of the inner dimension one after the other, and their sum. One loop, so that loads continue across parts."""
    k = tl.arange(0, BK)
    STEPS: tl.constexpr = (SPAN + BK - 1) // BK
    acc = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, SPLIT_K * STEPS):
        if SPLIT_K == 1:
            acc = _step(x_at, w_at, step * BK + k, row_in, column_in, acc, SPAN, BK, PRECISION)
        else:
            before = step // STEPS * SPAN
            at = step % STEPS * BK + k
            acc = _step(x_at + before, w_at + before, at, row_in, column_in, acc, SPAN, BK, PRECISION)
            if (step + 1) % STEPS == 0:
                total = _add(total, acc)
                acc = tl.zeros((BM, BN), tl.float32)
    if SPLIT_K == 1:
        return acc
    return total


@triton.jit
def _step(
    x_at, w_at, at, row_in, column_in, acc, SPAN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """BK more terms of every element's sum."""
    if SPAN % BK == 0:
        a = tl.load(x_at + at[None, :], mask=row_in[:, None], other=0.0)
        b = tl.load(w_at + at[:, None], mask=column_in[None, :], other=0.0, eviction_policy="evict_first")
    else:
        a = tl.load(x_at + at[None, :], mask=row_in[:, None] & (at < SPAN)[None, :], other=0.0)
        b = tl.load(w_at + at[:, None], mask=column_in[None, :] & (at < SPAN)[:, None], other=0.0, eviction_policy="evict_first")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _add(a, b):
    """a + b as a fused multiply-add. From a plain sum the compiler would start b's product at a, which rounds differently."""
    return tl.fma(b, tl.full(b.shape, 1.0, tl.float32), a)


@triton.jit
def finish_tile(
    acc, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, columns,
    BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PAGE: tl.constexpr, ACTIVATION: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    long = row.to(tl.int64)
    inside = row_in[:, None] & (column < columns)[None, :]
    if FORM == "gated":
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        y = _activated(gate, ACTIVATION) * up
        half = first // 2 + tl.arange(0, BN // 2)
        at = out + long[:, None] * (columns // 2) + half[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=row_in[:, None] & (half < columns // 2)[None, :])
    elif FORM == "qkv":
        _rotate_and_place(acc, out, keys, values, slots, positions, cos, sin, long, column, first, row_in,
                          BM, BN, HEADS, KV_HEADS, HEAD, PAGE)  # fmt: skip
    else:
        if FORM == "ungated":
            acc = _activated(acc, ACTIVATION)
        if SCALE != 1.0:
            acc = acc * SCALE
        if CAP != 0.0:
            acc = _soft_capped(acc, CAP)
        tl.store(out + long[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """The activations of `model.spec.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 u)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            x = x * x
        return x


@triton.jit
def _soft_capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP)."""
    return CAP * (2.0 / (1.0 + tl.exp(x * (-2.0 / CAP))) - 1.0)


@triton.jit
def _rotate_and_place(
    acc, out, keys, values, slots, positions, cos, sin, row, column, first, row_in,
    BM: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Rotate q and k and store k and v in their slots. A tile lies inside q, k or v, because its width divides theirs."""
    Q: tl.constexpr = HEADS * HEAD
    KV: tl.constexpr = KV_HEADS * HEAD
    slot = tl.load(slots + row, mask=row_in, other=0).to(tl.int64)
    place = (slot // PAGE) * (KV_HEADS * PAGE * HEAD) + slot % PAGE * HEAD
    if first < Q + KV:
        position = tl.load(positions + row, mask=row_in, other=0).to(tl.int64)
        turn = (first // 2 + tl.arange(0, BN // 2)) % (HEAD // 2)
        angle = position[:, None] * (HEAD // 2) + turn[None, :]
        c = tl.load(cos + angle, mask=row_in[:, None], other=0.0)
        s = tl.load(sin + angle, mask=row_in[:, None], other=0.0)
        a, b = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        turned = tl.join(tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s))
        y = tl.reshape(turned, (BM, BN)).to(out.dtype.element_ty)
        if first < Q:
            tl.store(out + row[:, None] * Q + column[None, :], y, mask=row_in[:, None])
        else:
            in_k = column - Q
            tl.store(keys + place[:, None] + ((in_k // HEAD) * (PAGE * HEAD) + in_k % HEAD)[None, :], y, mask=row_in[:, None])
    else:
        in_v = column - Q - KV
        v_at = values + place[:, None] + ((in_v // HEAD) * (PAGE * HEAD) + in_v % HEAD)[None, :]
        tl.store(v_at, acc.to(values.dtype.element_ty), mask=row_in[:, None] & (in_v < KV)[None, :])


@triton.jit
def activate(fused, out, columns, BN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """The activation of a product that another library computed, in pairs of gate and up or of each column."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < columns
    if GATED:
        gate = tl.load(fused + row * 2 * columns + 2 * column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(fused + row * 2 * columns + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)
        y = _activated(gate, ACTIVATION) * up
    else:
        y = _activated(tl.load(fused + row * columns + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)
