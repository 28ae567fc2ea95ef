"""Triton kernels of one decoder layer. The bits of a row depend on that row alone.

A product sums the inner dimension in a fixed number of parts, each in order, and adds the parts in order (deterministic
split-K). Tiles change which elements are computed together, never the order of one element's additions. Attention cuts
the keys into blocks of BLOCK by *logical* position, whatever slots they lie in, and merges the blocks in order. The tensor
cores sum over keys in an order that does not depend on how rows are laid out over warps. Maxima have no order.

Weights of q, k, gate and up are stored with pairs side by side (`pair_rows`), so that rotary and silu(gate) * up need only
a neighbouring column. q and k stay in that order, which does not change their dot products.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_norm", "embed_norm", "linear", "norm", "rope_store", "silu_pairs",
]  # fmt: skip


@triton.jit
def embed_norm(
    tokens, future_tokens, embedding, weight, stream, normed, vocab, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The float32 stream of each row's token, and its first norm. A token of -1 - i is read from future_tokens[i]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    token = tl.load(tokens + row).to(tl.int64)
    drawn = tl.load(future_tokens + (-1 - token), mask=token < 0, other=0)
    token = tl.where(token < 0, tl.minimum(tl.maximum(drawn, 0), vocab - 1), token)
    x = tl.load(embedding + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(stream + row * WIDTH + column, x, mask=inside)
    _store_normed(x, weight, normed, row, column, inside, eps, WIDTH)


@triton.jit
def norm(stream, weight, normed, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Root-mean-square norm of float32 rows, rounded to the weights' dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    x = tl.load(stream + row * WIDTH + column, mask=inside, other=0.0)
    _store_normed(x, weight, normed, row, column, inside, eps, WIDTH)


@triton.jit
def add_norm(
    partials, bias, stream, weight, normed, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the split-K partial sums of a product to the stream, in the order of `linear`, and norm the stream."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    x = tl.load(stream + row * WIDTH + column, mask=inside, other=0.0)
    product = tl.load(partials + row * WIDTH + column, mask=inside, other=0.0)
    for k in tl.static_range(1, SPLIT_K):
        product = product + tl.load(partials + (k * rows + row) * WIDTH + column, mask=inside, other=0.0)
    if HAS_BIAS:
        product = product + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    x = x + product
    tl.store(stream + row * WIDTH + column, x, mask=inside)
    _store_normed(x, weight, normed, row, column, inside, eps, WIDTH)


@triton.jit
def _store_normed(x, weight, normed, row, column, inside, eps, WIDTH: tl.constexpr):
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(normed + row * WIDTH + column, (x * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def linear(
    x, w, bias, out, keys, values, slots, positions, cos, sin, rows, columns,
    INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_K: tl.constexpr, IN_REGISTER: tl.constexpr,
):  # fmt: skip
    """x (rows, INNER) times w (columns, INNER) transposed, and what follows it.

    The inner dimension is summed in SPLIT_K parts, each one chain of additions, and the parts are added in order. With
    IN_REGISTER one program runs the chains side by side, because a single chain would wait for the latency of the tensor
    cores; with many rows it runs them one by one. The bits are equal.

    FORM "store": out = product. "add": out += product, the residual stream. "silu": pairs of columns become
    silu(gate) * up. "qkv": rotary on q and k; q goes to out, k and v to the slots of their rows. "split_k": each part has
    programs of its own, and its partial sums go to out (SPLIT_K, rows, columns) for `add_norm`.
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
        _finish(
            acc, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, columns,
            BM, BN, FORM, HEADS, KV_HEADS, HEAD, PAGE,
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
def _finish(
    acc, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, columns,
    BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    long = row.to(tl.int64)
    inside = row_in[:, None] & (column < columns)[None, :]
    if FORM == "store":
        tl.store(out + long[:, None] * columns + column[None, :], acc.to(out.dtype.element_ty), mask=inside)
    elif FORM == "add":
        at = out + long[:, None] * columns + column[None, :]
        tl.store(at, _add(tl.load(at, mask=inside, other=0.0), acc), mask=inside)
    elif FORM == "silu":
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        half = first // 2 + tl.arange(0, BN // 2)
        at = out + long[:, None] * (columns // 2) + half[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=row_in[:, None] & (half < columns // 2)[None, :])
    else:
        _rotate_and_place(acc, out, keys, values, slots, positions, cos, sin, long, column, first, row_in,
                          BM, BN, HEADS, KV_HEADS, HEAD, PAGE)  # fmt: skip


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
def rope_store(
    fused, out, keys, values, slots, positions, cos, sin, rows,
    BN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Rotate and store the result of a q, k and v product that another library computed."""
    first = tl.program_id(1) * BN
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = first + tl.arange(0, BN)
    at = fused + row[:, None].to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD) + column[None, :]
    acc = tl.load(at, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
    _rotate_and_place(acc, out, keys, values, slots, positions, cos, sin, row.to(tl.int64), column, first, row < rows,
                      16, BN, HEADS, KV_HEADS, HEAD, PAGE)  # fmt: skip


@triton.jit
def silu_pairs(fused, out, columns, BN: tl.constexpr):
    """silu(gate) * up of a product that another library computed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = column < columns
    gate = tl.load(fused + row * 2 * columns + 2 * column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * columns + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
