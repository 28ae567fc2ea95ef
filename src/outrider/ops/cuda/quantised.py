"""Triton kernels of products with quantised matrices. The bits of a row depend on that row alone.

A sum is cut into the same parts per matrix at every row count, as in `kernels.linear`; scales are applied at fixed places, to
each part or to each group of inputs. Matrices are filled up to whole steps, so that no step is cut. Few rows are the narrow
operand of the tensor cores and weights the wide one ("swapped"), because a tile of 16 rows would waste three quarters.

Kinds: "fp8" and "int8" multiply rows that were quantised too, with a scale for each row and column. "fp8_blocks" has a scale for
each row and 128 inputs, and for blocks of weights, applied to every 128 inputs. "fp8_weights" and "fp8_block_weights" decode FP8
to bf16. "int4" and "bytes" decode integers to bf16 and scale each group.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from outrider.ops.cuda.kernels import finish_tile, store_codes

__all__ = ["decoded_fp8", "decoded_int4", "decoded_mxfp4", "product", "quantise_rows"]


@triton.jit
def quantise_rows(
    x, codes, scales, INNER: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Rows of x (N, INNER) as codes (N, WIDTH), as `store_codes` says."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    values = tl.load(x + row * INNER + column, mask=column < INNER, other=0.0).to(tl.float32)
    store_codes(values, codes, scales, row, WIDTH, PADDED, BLOCK, LIMIT)


@triton.jit
def decoded_int4(packed, low, high, FAST: tl.constexpr):
    """The low and high four bits of bytes, plus `low` and `high`: -128 less the zero points, in bf16 like the results; exact."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, u0, u1, a, b, c, d, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 t0, $4, 0, 0x4140;
            prmt.b32 t1, $4, 0, 0x4342;
            shr.u32 u0, t0, 4;
            shr.u32 u1, t1, 4;
            lop3.b32 a, t0, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, t1, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, u0, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, u1, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, $5;
            fma.rn.bf16x2 $1, b, one, $6;
            fma.rn.bf16x2 $2, c, one, $7;
            fma.rn.bf16x2 $3, d, one, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [packed, low, high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        first = (packed & 15).to(tl.float32) + 128.0 + low.to(tl.float32)
        second = (packed >> 4).to(tl.float32) + 128.0 + high.to(tl.float32)
        return first.to(tl.bfloat16), second.to(tl.bfloat16)


@triton.jit
def decoded_mxfp4(packed, FAST: tl.constexpr):
    """The low and high four bits of bytes, e2m1 values, in bf16; exact."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, u0, u1, m, s, scale, zero;
            mov.b32 scale, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            prmt.b32 t0, $4, 0, 0x4140;
            prmt.b32 t1, $4, 0, 0x4342;
            shr.u32 u0, t0, 4;
            shr.u32 u1, t1, 4;
            shl.b32 m, t0, 6;
            shl.b32 s, t0, 12;
            and.b32 s, s, 0x80008000;
            lop3.b32 m, m, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $0, m, scale, zero;
            shl.b32 m, t1, 6;
            shl.b32 s, t1, 12;
            and.b32 s, s, 0x80008000;
            lop3.b32 m, m, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $1, m, scale, zero;
            shl.b32 m, u0, 6;
            shl.b32 s, u0, 12;
            and.b32 s, s, 0x80008000;
            lop3.b32 m, m, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $2, m, scale, zero;
            shl.b32 m, u1, 6;
            shl.b32 s, u1, 12;
            and.b32 s, s, 0x80008000;
            lop3.b32 m, m, 0x01C001C0, s, 0xEA;
            fma.rn.bf16x2 $3, m, scale, zero;
            }""",
            "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return _e2m1(packed & 15), _e2m1(packed >> 4)


@triton.jit
def _e2m1(code):
    """e2m1 values in bf16: without the sign 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    exponent, last = (code >> 1) & 3, (code & 1).to(tl.float32)
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    value = tl.where(exponent == 0, last * 0.5, (1.0 + last * 0.5) * power)
    return tl.where(code >= 8, -value, value).to(tl.bfloat16)


@triton.jit
def decoded_fp8(codes, FAST: tl.constexpr):
    """FP8 (e4m3) in bf16; exact, but that NaN becomes 480."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, u0, u1, s0, s1, scale, zero;
            mov.b32 scale, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 t0, $2, 0, 0x1404;
            prmt.b32 t1, $2, 0, 0x3424;
            shr.u32 u0, t0, 4;
            shr.u32 u1, t1, 4;
            and.b32 s0, t0, 0x80008000;
            and.b32 s1, t1, 0x80008000;
            lop3.b32 u0, u0, 0x07F007F0, s0, 0xEA;
            lop3.b32 u1, u1, 0x07F007F0, s1, 0xEA;
            fma.rn.bf16x2 $0, u0, scale, zero;
            fma.rn.bf16x2 $1, u1, scale, zero;
            }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float32).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, x_scale, w, w_scale, w_zero, bias, out, partial, counts, keys, values, slots, positions, cos, sin, rows, columns,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, JOIN: tl.constexpr, SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr,
    PAGE: tl.constexpr, ACTIVATION: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """x (rows, INNER) times w (columns, INNER) transposed, and what follows it in the FORMs of `kernels.linear`.

    The inner dimension, filled up to WIDTH, is summed in PARTS. With JOIN each part has a program of its own, and the last one
    to end adds the parts in order; so does one program by itself. The bits are equal.
    """
    first = tl.program_id(1) * BN
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = first + tl.arange(0, BN)
    row_in, column_in = row < rows, column < columns
    x_row = tl.minimum(row, rows - 1).to(tl.int64)  # what lies beyond is computed twice and not stored
    w_row = tl.minimum(column, columns - 1).to(tl.int64)
    if FORM == "split_k" or JOIN:
        part = tl.program_id(2)
        acc = _part(part, x, x_scale, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, KIND, ZERO, OFFSET, GROUP, PARTS,
                    SWAPPED, BM, BN, BK, WARPS, FAST)  # fmt: skip
        at = _by_row(row, SWAPPED).to(tl.int64) * columns + _by_column(column, SWAPPED)
        inside = _by_row(row_in, SWAPPED) & _by_column(column_in, SWAPPED)
        step = rows.to(tl.int64) * columns
        if FORM == "split_k":
            tl.store(out + part * step + at, acc, mask=inside)
        else:
            tl.store(partial + part * step + at, acc, mask=inside)
            tl.debug_barrier()
            count = counts + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1:
                total = _zeros(BM, BN, SWAPPED, tl.float32)
                for other in tl.static_range(0, PARTS):
                    total += tl.load(partial + other * step + at, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(count, 0)
                _close(
                    total, bias, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, column_in, columns,
                    SWAPPED, BM, BN, FORM, HAS_BIAS, HEADS, KV_HEADS, HEAD, PAGE, ACTIVATION, SCALE, CAP,
                )  # fmt: skip
    else:
        if PARTS == 1:
            total = _part(0, x, x_scale, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, KIND, ZERO, OFFSET, GROUP,
                          PARTS, SWAPPED, BM, BN, BK, WARPS, FAST)  # fmt: skip
        else:
            total = _zeros(BM, BN, SWAPPED, tl.float32)
            for part in range(0, PARTS):
                total += _part(part, x, x_scale, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, KIND, ZERO, OFFSET,
                               GROUP, PARTS, SWAPPED, BM, BN, BK, WARPS, FAST)  # fmt: skip
        _close(
            total, bias, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, column_in, columns,
            SWAPPED, BM, BN, FORM, HAS_BIAS, HEADS, KV_HEADS, HEAD, PAGE, ACTIVATION, SCALE, CAP,
        )  # fmt: skip


@triton.jit
def _close(
    total, bias, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, column_in, columns,
    SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr, HAS_BIAS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """What follows a sum."""
    if SWAPPED:
        total = tl.trans(total)
    if HAS_BIAS:
        total = total + tl.load(bias + column, mask=column_in, other=0.0).to(tl.float32)[None, :]
    finish_tile(
        total, out, keys, values, slots, positions, cos, sin, row, column, first, row_in, columns,
        BM, BN, FORM, HEADS, KV_HEADS, HEAD, PAGE, ACTIVATION, SCALE, CAP,
    )  # fmt: skip


@triton.jit
def _part(
    part, x, x_scale, w, w_scale, w_zero, x_row, w_row, columns, INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    ZERO: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, SWAPPED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sum of one part with its scales, (BN, BM) where operands are swapped and (BM, BN) otherwise."""
    SPAN: tl.constexpr = WIDTH // PARTS
    if KIND == "int4" and GROUP % 64 == 0:
        return _int4_part(part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, ZERO, OFFSET, GROUP, SPAN,
                          BM, BN, WARPS, FAST)  # fmt: skip
    elif KIND == "int4":
        return _small_groups_part(part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, ZERO, OFFSET, GROUP,
                                  SPAN // 2, SWAPPED, BM, BN, BK, FAST)  # fmt: skip
    elif KIND == "bytes":
        return _byte_part(part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER, WIDTH, ZERO, OFFSET, GROUP, SPAN,
                          SWAPPED, BM, BN, BK)  # fmt: skip
    elif KIND == "fp8_blocks" or KIND == "fp8_block_weights":
        return _block_part(part, x, x_scale, w, w_scale, w_zero, x_row, w_row, INNER, WIDTH, KIND == "fp8_block_weights", SPAN,
                           SWAPPED, BM, BN, FAST)  # fmt: skip
    else:
        k = part * SPAN + tl.arange(0, BK)
        x_at = x + _by_row(x_row * (INNER if KIND == "fp8_weights" else WIDTH), SWAPPED) + _by_input(k, SWAPPED)
        w_at = w + _by_column(w_row * WIDTH, SWAPPED) + _of_input(k, SWAPPED)
        acc = _zeros(BM, BN, SWAPPED, tl.int32 if KIND == "int8" else tl.float32)
        for start in range(0, SPAN, BK):
            if KIND == "fp8_weights":
                b = decoded_fp8(tl.load(w_at + start), FAST)
                acc = _dot(b, _rows(x_at, part * SPAN + start, start, INNER, WIDTH, SWAPPED, BK), acc, SWAPPED)
            else:
                acc = _dot(tl.load(w_at + start), tl.load(x_at + start), acc, SWAPPED)
        scaled = acc.to(tl.float32) * _by_column(tl.load(w_scale + w_row), SWAPPED)
        if KIND != "fp8_weights":
            scaled = scaled * _by_row(tl.load(x_scale + x_row), SWAPPED)
        return scaled


@triton.jit
def _block_part(
    part, x, x_scale, w, w_scale, block_of, x_row, w_row, INNER: tl.constexpr, WIDTH: tl.constexpr, DECODED: tl.constexpr,
    SPAN: tl.constexpr, SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """FP8 with scales for every 128 inputs; DECODED to bf16, or times rows in FP8."""
    BLOCKS: tl.constexpr = WIDTH // 128
    k = part * SPAN + tl.arange(0, 128)
    x_at = x + _by_row(x_row * (INNER if DECODED else WIDTH), SWAPPED) + _by_input(k, SWAPPED)
    w_at = w + _by_column(w_row * WIDTH, SWAPPED) + _of_input(k, SWAPPED)
    x_scales = x_scale + x_row * BLOCKS + part * (SPAN // 128)
    w_scales = w_scale + tl.load(block_of + w_row).to(tl.int64) * BLOCKS + part * (SPAN // 128)
    acc = _zeros(BM, BN, SWAPPED, tl.float32)
    none = _zeros(BM, BN, SWAPPED, tl.float32)
    STEPS: tl.constexpr = SPAN // 128
    scale = _by_column(tl.load(w_scales), SWAPPED)
    row_scale = scale if DECODED else _by_row(tl.load(x_scales), SWAPPED)
    for step in range(0, STEPS):
        ahead = tl.minimum(step + 1, STEPS - 1)  # so that no step waits for its scales
        next_scale = _by_column(tl.load(w_scales + ahead), SWAPPED)
        next_row_scale = next_scale if DECODED else _by_row(tl.load(x_scales + ahead), SWAPPED)
        b = tl.load(w_at + step * 128)
        if DECODED:
            a = _rows(x_at, part * SPAN + step * 128, step * 128, INNER, WIDTH, SWAPPED, 128)
            acc = tl.fma(_dot(decoded_fp8(b, FAST), a, none, SWAPPED), scale, acc)
        else:
            acc = tl.fma(_dot(b, tl.load(x_at + step * 128), none, SWAPPED), scale * row_scale, acc)
        scale, row_scale = next_scale, next_row_scale
    return acc


@triton.jit
def _int4_part(
    part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Four-bit integers in groups of 64 or of multiples of 128, weights as the wide operand.

    64 bytes hold 128 inputs, the first half in the low bits, in the order in which the threads of a warp hold an operand of
    the tensor cores (`quantised_matrix._in_fragments`): a thread's sixteen bytes lie side by side. Rows of the tile are taken in
    such an order too. Both are relabelled by `_as_fragments`, which moves nothing between threads.
    """
    row = tl.arange(0, BN)
    own = ((row // (16 * WARPS)) * 2 + row // 8 % 2) * (8 * WARPS) + row // 16 % WARPS * 8 + row % 8  # place in the tile
    w_own = tl.minimum(tl.program_id(1) * BN + own, columns - 1)
    k = tl.arange(0, 64)
    x_at = x + (x_row * INNER + part * SPAN)[None, :] + k[:, None]
    w_at = w + (w_row * (WIDTH // 2) + part * (SPAN // 2))[:, None] + k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    none = tl.zeros((BN, BM), tl.float32)
    scale, zero, high_scale, high_zero = _group_values(w_scale, w_zero, part * SPAN, columns, w_own, WIDTH, ZERO, GROUP)
    for start in range(0, SPAN, 128):
        packed = _as_fragments(tl.load(w_at + start // 2), BN, WARPS)
        at = part * SPAN + start
        # of the next step, so that no step waits for them
        ahead = _group_values(w_scale, w_zero, at + 128, columns, w_own, WIDTH, ZERO, GROUP)
        if ZERO == "integer":
            low = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], packed.shape)
            high = tl.broadcast_to((-128.0 - high_zero).to(tl.bfloat16)[:, None], packed.shape)
        else:
            low = tl.full(packed.shape, -128.0 - OFFSET, tl.float32).to(tl.bfloat16)
            high = low
        first, second = decoded_int4(packed, low, high, FAST)
        a = _rows(x_at, at, start, INNER, WIDTH, True, 64)
        b = _rows(x_at, at + 64, start + 64, INNER, WIDTH, True, 64)
        if GROUP == 64:
            acc = tl.fma(tl.dot(first, a, none), scale[:, None], acc)
            acc = tl.fma(tl.dot(second, b, none), high_scale[:, None], acc)
        else:
            acc = tl.fma(tl.dot(second, b, tl.dot(first, a, none)), scale[:, None], acc)
        if ZERO == "value":
            ones = tl.full(packed.shape, 1.0, tl.float32).to(tl.bfloat16)
            acc = tl.fma(tl.dot(ones, a, none), -zero[:, None], acc)
            acc = tl.fma(tl.dot(ones, b, none), -high_zero[:, None], acc)
        scale, zero, high_scale, high_zero = ahead
    acc = tl.reshape(acc, (BN // (16 * WARPS), WARPS, 2, 8, BM))
    return tl.reshape(tl.permute(acc, (0, 2, 1, 3, 4)), (BN, BM))


@triton.jit
def _as_fragments(packed, BN: tl.constexpr, WARPS: tl.constexpr):
    """Bytes (BN, 64) in the order of rows and inputs of an operand of the tensor cores."""
    packed = tl.reshape(packed, (BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(packed, (0, 2, 1, 3, 5, 6, 4, 7)), (BN, 64))


@triton.jit
def _group_values(
    w_scale, w_zero, at, columns, w_own, WIDTH: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Scales and zeros of the groups of inputs at .. at + 128: of the first half and of the second."""
    group = tl.minimum(at, WIDTH - 128) // GROUP * columns + w_own
    scale = tl.load(w_scale + group).to(tl.float32)
    zero, high_scale, high_zero = scale, scale, scale
    if ZERO != "":
        zero = tl.load(w_zero + group).to(tl.float32)
        high_zero = zero
    if GROUP == 64:
        high_scale = tl.load(w_scale + group + columns).to(tl.float32)
        if ZERO != "":
            high_zero = tl.load(w_zero + group + columns).to(tl.float32)
    return scale, zero, high_scale, high_zero


@triton.jit
def _small_groups_part(
    part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Four-bit integers in groups of 16 or 32: byte j of a row holds inputs j and j + WIDTH / 2. SPAN bytes make a part."""
    HALF: tl.constexpr = WIDTH // 2
    k = part * SPAN + tl.arange(0, BK)
    x_at = x + _by_row(x_row * INNER, SWAPPED) + _by_input(k, SWAPPED)
    w_at = w + _by_column(w_row * HALF, SWAPPED) + _of_input(k, SWAPPED)
    acc = _zeros(BM, BN, SWAPPED, tl.float32)
    none = _zeros(BM, BN, SWAPPED, tl.float32)
    for start in range(0, SPAN, BK):
        packed = tl.load(w_at + start)
        at = part * SPAN + start
        low_at = (at // GROUP) * columns + w_row
        high_at = ((HALF + at) // GROUP) * columns + w_row
        if ZERO == "integer":
            low = -128.0 - tl.load(w_zero + low_at).to(tl.float32)
            high = -128.0 - tl.load(w_zero + high_at).to(tl.float32)
            low = tl.broadcast_to(_by_column(low.to(tl.bfloat16), SWAPPED), packed.shape)
            high = tl.broadcast_to(_by_column(high.to(tl.bfloat16), SWAPPED), packed.shape)
        else:
            low = tl.full(packed.shape, -128.0 - OFFSET, tl.float32).to(tl.bfloat16)
            high = low
        first, second = decoded_int4(packed, low, high, FAST)
        a = _rows(x_at, at, start, INNER, WIDTH, SWAPPED, BK)
        b = _rows(x_at, HALF + at, HALF + start, INNER, WIDTH, SWAPPED, BK)
        acc = tl.fma(_dot(first, a, none, SWAPPED), _by_column(tl.load(w_scale + low_at).to(tl.float32), SWAPPED), acc)
        acc = tl.fma(_dot(second, b, none, SWAPPED), _by_column(tl.load(w_scale + high_at).to(tl.float32), SWAPPED), acc)
        if ZERO == "value":
            ones = tl.full(packed.shape, 1.0, tl.float32).to(tl.bfloat16)
            acc = tl.fma(_dot(ones, a, none, SWAPPED), -_by_column(tl.load(w_zero + low_at).to(tl.float32), SWAPPED), acc)
            acc = tl.fma(_dot(ones, b, none, SWAPPED), -_by_column(tl.load(w_zero + high_at).to(tl.float32), SWAPPED), acc)
    return acc


@triton.jit
def _byte_part(
    part, x, w, w_scale, w_zero, x_row, w_row, columns, INNER: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, SWAPPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Integers of a byte in groups."""
    k = part * SPAN + tl.arange(0, BK)
    x_at = x + _by_row(x_row * INNER, SWAPPED) + _by_input(k, SWAPPED)
    w_at = w + _by_column(w_row * WIDTH, SWAPPED) + _of_input(k, SWAPPED)
    acc = _zeros(BM, BN, SWAPPED, tl.float32)
    none = _zeros(BM, BN, SWAPPED, tl.float32)
    for start in range(0, SPAN, BK):
        codes = (tl.load(w_at + start).to(tl.float32) - OFFSET).to(tl.bfloat16)
        group = ((part * SPAN + start) // GROUP) * columns + w_row
        a = _rows(x_at, part * SPAN + start, start, INNER, WIDTH, SWAPPED, BK)
        acc = tl.fma(_dot(codes, a, none, SWAPPED), _by_column(tl.load(w_scale + group).to(tl.float32), SWAPPED), acc)
        if ZERO == "value":
            ones = tl.full(codes.shape, 1.0, tl.float32).to(tl.bfloat16)
            acc = tl.fma(_dot(ones, a, none, SWAPPED), -_by_column(tl.load(w_zero + group).to(tl.float32), SWAPPED), acc)
    return acc


@triton.jit
def _rows(at, first, start, INNER: tl.constexpr, WIDTH: tl.constexpr, SWAPPED: tl.constexpr, BK: tl.constexpr):
    """Inputs first .. first + BK of the rows; those past INNER are zero."""
    if INNER == WIDTH:
        return tl.load(at + start)
    else:
        return tl.load(at + start, mask=_by_input(first + tl.arange(0, BK) < INNER, SWAPPED), other=0.0)


@triton.jit
def _dot(weights, rows, acc, SWAPPED: tl.constexpr):
    if SWAPPED:
        return tl.dot(weights, rows, acc, out_dtype=acc.dtype)
    else:
        return tl.dot(rows, weights, acc, out_dtype=acc.dtype)


@triton.jit
def _zeros(BM: tl.constexpr, BN: tl.constexpr, SWAPPED: tl.constexpr, dtype: tl.constexpr):
    if SWAPPED:
        return tl.zeros((BN, BM), dtype)
    else:
        return tl.zeros((BM, BN), dtype)


@triton.jit
def _by_row(v, SWAPPED: tl.constexpr):
    """A value of each row along the dimension of rows."""
    if SWAPPED:
        return v[None, :]
    else:
        return v[:, None]


@triton.jit
def _by_column(v, SWAPPED: tl.constexpr):
    """A value of each column along the dimension of columns."""
    if SWAPPED:
        return v[:, None]
    else:
        return v[None, :]


@triton.jit
def _by_input(v, SWAPPED: tl.constexpr):
    """A value of each input, beside the rows."""
    if SWAPPED:
        return v[:, None]
    else:
        return v[None, :]


@triton.jit
def _of_input(v, SWAPPED: tl.constexpr):
    """A value of each input, beside the columns."""
    if SWAPPED:
        return v[None, :]
    else:
        return v[:, None]
