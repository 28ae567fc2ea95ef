"""Triton kernels of the products of experts with the rows that chose them. The bits of a (row, expert) pair depend on it alone.

Work items (ops/cuda/router.py) are an expert and up to BM of its pairs; only the weights of chosen experts are read. The inner
dimension is summed as in the product `linear`: in parts, each one chain, the parts in order.

A row's results lie in as many parts as it has experts, in order of their numbers, each with its weight in it. `finish` adds them
as it adds the parts of any product.
"""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.kernels import _activated, _add, _run, _run_in_register

__all__ = ["close_experts", "open_experts"]


@triton.jit
def open_experts(
    x, w, bias, order, items, out, COLUMNS: tl.constexpr, INNER: tl.constexpr, CHOSEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_SCALE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, PRECISION: tl.constexpr, SPLIT_K: tl.constexpr,
    IN_REGISTER: tl.constexpr,
):  # fmt: skip
    """The first product of every pair and its activation, to the pair's place (pairs, width).

    w is (experts * COLUMNS, INNER); where experts are gated its rows are pairs of gate and up. With ALPHA the activation is
    (up + 1) * gate * sigmoid(ALPHA * gate), both cut at LIMIT.
    """
    item = tl.program_id(0)
    if item < tl.load(items):
        expert, first, count = tl.load(items + 2 + 3 * item), tl.load(items + 3 + 3 * item), tl.load(items + 4 + 3 * item)
        i, column = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
        inside = i < count
        row = tl.load(order + first + i, mask=inside, other=0) // CHOSEN
        x_at = x + row.to(tl.int64)[:, None] * INNER
        w_at = w + (expert.to(tl.int64) * COLUMNS + column)[None, :] * INNER
        acc = _product(x_at, w_at, inside, column < COLUMNS, INNER, SPLIT_K, IN_REGISTER, BM, BN, BK, PRECISION)
        if HAS_BIAS:
            acc = _biased(acc, bias + expert * COLUMNS + column, column < COLUMNS)
        place = (first + i).to(tl.int64)[:, None]
        if GATED:
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            half = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
            y = _gated(gate if GATE_SCALE == 1.0 else gate * GATE_SCALE, up, ACTIVATION, LIMIT, ALPHA)
            at = out + place * (COLUMNS // 2) + half[None, :]
            tl.store(at, y.to(out.dtype.element_ty), mask=inside[:, None] & (half < COLUMNS // 2)[None, :])
        else:
            at, stored = out + place * COLUMNS + column[None, :], inside[:, None] & (column < COLUMNS)[None, :]
            tl.store(at, _activated(acc, ACTIVATION).to(out.dtype.element_ty), mask=stored)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA != 0.0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        return _activated(gate, ACTIVATION) * up


@triton.jit(do_not_specialize=["rows"])
def close_experts(
    x, w, bias, weights, order, items, out, rows, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT_K: tl.constexpr, IN_REGISTER: tl.constexpr,
):  # fmt: skip
    """The second product of every pair, times its weight, to out (CHOSEN, rows, COLUMNS): zeros for rows of padding."""
    item = tl.program_id(0)
    if item < tl.load(items + 1):
        expert, first, count = tl.load(items + 2 + 3 * item), tl.load(items + 3 + 3 * item), tl.load(items + 4 + 3 * item)
        i, column = tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
        inside, column_in = i < count, column < COLUMNS
        pair = tl.load(order + first + i, mask=inside, other=0)
        at = out + (pair % CHOSEN * rows + pair // CHOSEN).to(tl.int64)[:, None] * COLUMNS + column[None, :]
        stored = inside[:, None] & column_in[None, :]
        if expert < EXPERTS:
            w_at = w + (expert.to(tl.int64) * COLUMNS + column)[None, :] * INNER
            x_at = x + (first + i).to(tl.int64)[:, None] * INNER
            acc = _product(x_at, w_at, inside, column_in, INNER, SPLIT_K, IN_REGISTER, BM, BN, BK, PRECISION)
            if HAS_BIAS:
                acc = _biased(acc, bias + expert * COLUMNS + column, column_in)
            tl.store(at, acc * tl.load(weights + pair, mask=inside, other=0.0)[:, None], mask=stored)
        else:
            tl.store(at, tl.zeros((BM, BN), tl.float32), mask=stored)


@triton.jit
def _product(
    x_at, w_at, row_in, column_in, INNER: tl.constexpr, SPLIT_K: tl.constexpr, IN_REGISTER: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows times columns, (BM, BN)."""
    if SPLIT_K == 4 and IN_REGISTER:
        return _run_in_register(x_at, w_at, row_in, column_in, INNER // SPLIT_K, BM, BN, BK, PRECISION)
    else:
        return _run(x_at, w_at, row_in, column_in, INNER // SPLIT_K, SPLIT_K, BM, BN, BK, PRECISION)


@triton.jit
def _biased(acc, at, inside):
    return _add(acc, tl.broadcast_to(tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :], acc.shape))
