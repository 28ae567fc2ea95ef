"""Triton kernels of recurrent layers: the gated delta rule (arXiv 2412.06464), short convolutions, and attention's output gate.

A row's bits depend on the rows before it in its path alone: one kernel walks the rows of a path in order, with a tile of a head's
memory in registers. The same kernel, with the same tiles, serves prompts, decoding, draft nodes and replay, so the order of
every sum is one. Taps of the convolution are added in order.

Rows of a forward are numbered: those that are replayed first, then those that are fed.
"""

# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gate_heads", "gated_norm", "prepare", "scan", "short_convolution"]


@triton.jit(do_not_specialize=["rows", "replays"])
def prepare(
    parts, stored, windows, conv, conv_bias, decay, step_bias, queries, keys, values, left, rate, replayed, taps, kept, saved,
    rows, replays, eps,
    PARTS: tl.constexpr, KERNEL: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What the recurrence reads of a row: its inputs after the convolution, by heads of queries, of keys and of values.

    `parts` (PARTS, rows, width) are the product of rows that are fed; inputs of replayed rows are in `stored`. A tap is a row
    before, -1 for nothing, or -2 - i for row i of the windows (states, KERNEL - 1). The inputs of a row go to row `kept` of
    `stored`, and the window after it to state `saved`, where those are not -1. `decay` is minus a rate.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + INNER
    place = tl.load(replayed + row, mask=row < replays, other=0)
    if place >= 0:
        is_key = block < 2 * KEY_HEADS
        head = block - 2 * KEY_HEADS
        d = tl.arange(0, PADDED)
        inside = d < tl.where(is_key, KEY_DIM, HEAD_DIM)
        channel = tl.where(is_key, block * KEY_DIM, 2 * KEYS + head * HEAD_DIM) + d
        state = tl.load(saved + row).to(tl.int64)
        window = windows + state * ((KERNEL - 1) * CHANNELS) + channel
        total = tl.zeros((PADDED,), tl.float32)
        for tap in tl.static_range(KERNEL - 1):
            code = tl.load(taps + row * (KERNEL - 1) + tap).to(tl.int64)
            x = _input(parts, stored, replayed, code, rows, replays, channel, channel, inside, CHANNELS, INNER, HEADS, PARTS)
            x += tl.load(windows + (-2 - code) * CHANNELS + channel, mask=inside & (code < -1), other=0.0)
            if tap > 0:
                tl.store(window + (tap - 1) * CHANNELS, x, mask=inside & (state >= 0))
            total = tl.fma(x, tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0), total)
        x = _input(parts, stored, replayed, row, rows, replays, channel, channel, inside, CHANNELS, INNER, HEADS, PARTS)
        tl.store(window + (KERNEL - 2) * CHANNELS, x, mask=inside & (state >= 0))
        node = tl.load(kept + row).to(tl.int64)
        tl.store(stored + node * (CHANNELS + 2 * HEADS) + channel, x, mask=inside & (node >= 0))
        total = tl.fma(x, tl.load(conv + (KERNEL - 1) * CHANNELS + channel, mask=inside, other=0.0), total)
        if HAS_BIAS:
            total += tl.load(conv_bias + channel, mask=inside, other=0.0)
        y = total / (1.0 + tl.exp(-total))
        if is_key:
            y = y * (1.0 / tl.sqrt(tl.sum(y * y, 0) + eps))
            if block < KEY_HEADS:
                tl.store(queries + row * KEYS + block * KEY_DIM + d, y * KEY_DIM**-0.5, mask=inside)
            else:
                tl.store(keys + row * KEYS + (block - KEY_HEADS) * KEY_DIM + d, y, mask=inside)
        else:
            tl.store(values + row * INNER + head * HEAD_DIM + d, y, mask=inside)
            b, a = CHANNELS + head, CHANNELS + HEADS + head  # columns of stored rows; the gate lies before them in a product
            b_in = _input(parts, stored, replayed, row, rows, replays, b + INNER, b, True, CHANNELS, INNER, HEADS, PARTS)
            a_in = _input(parts, stored, replayed, row, rows, replays, a + INNER, a, True, CHANNELS, INNER, HEADS, PARTS)
            tl.store(stored + node * (CHANNELS + 2 * HEADS) + b, b_in, mask=node >= 0)
            tl.store(stored + node * (CHANNELS + 2 * HEADS) + a, a_in, mask=node >= 0)
            step = a_in + tl.load(step_bias + head)
            step = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
            tl.store(left + row * HEADS + head, tl.exp(step * tl.load(decay + head)))
            tl.store(rate + row * HEADS + head, 1.0 / (1.0 + tl.exp(-b_in)))


@triton.jit
def _input(
    parts, stored, replayed, row, rows, replays, column, place, inside,
    CHANNELS: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Columns of a numbered row: of the product, its parts in order, or of a stored row, where they lie at `place`.

    They are zero below row 0.
    """
    WIDTH: tl.constexpr = CHANNELS + INNER + 2 * HEADS
    again = (row >= 0) & (row < replays)
    number = tl.load(replayed + row, mask=again, other=0).to(tl.int64)
    held = tl.load(stored + number * (CHANNELS + 2 * HEADS) + place, mask=inside & again, other=0.0)
    fed = row - replays
    x = tl.load(parts + fed * WIDTH + column, mask=inside & (row >= replays), other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x = x + tl.load(parts + (part * rows + fed) * WIDTH + column, mask=inside & (row >= replays), other=0.0).to(tl.float32)
    return tl.where(again, held, x)


@triton.jit(do_not_specialize=["replays"])
def scan(
    queries, keys, values, left, rate, memories, pasts, firsts, steps, out, replays,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, SPLIT: tl.constexpr,
    KEPT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The recurrence along paths of rows, by tiles of BV values of a head. Path p has steps firsts[p] up to firsts[p + 1].

    A step is a pair: twice a row's number, plus one where the row's result is wanted (at its place among rows that are fed); and
    the state that the memory after it goes to, or -1. A path begins with the memory of state pasts[p], or with zeros where that
    is -1. Memories are (states, HEADS, HEAD_DIM, KEY_DIM). Keys are tiled (SPLIT, KEPT), so that most of a sum over them stays
    within a thread.
    """
    path = tl.program_id(1)
    TILES: tl.constexpr = (HEAD_DIM + BV - 1) // BV
    head = tl.program_id(0) // TILES
    first = tl.load(firsts + path)
    last = tl.load(firsts + path + 1)
    if first < last:
        # values first: the compiler then gives a thread all SPLIT keys, and four threads the KEPT ones beside each other
        k = tl.arange(0, SPLIT)[None, :, None] * KEPT + tl.arange(0, KEPT)[None, None, :]
        k = tl.broadcast_to(k, (BV, SPLIT, KEPT))  # loads of keys have the memory's layout, and are not moved between threads
        v = tl.program_id(0) % TILES * BV + tl.arange(0, BV)
        in_k, in_v = k < KEY_DIM, v < HEAD_DIM
        at = head * (HEAD_DIM * KEY_DIM) + v[:, None, None] * KEY_DIM + k
        inside = in_k & in_v[:, None, None]
        key_at = head // (HEADS // KEY_HEADS) * KEY_DIM + k
        value_at = head * HEAD_DIM + v
        SIZE: tl.constexpr = HEADS * HEAD_DIM * KEY_DIM
        past = tl.load(pasts + path).to(tl.int64)
        memory = tl.load(memories + past * SIZE + at, mask=inside & (past >= 0), other=0.0)
        step = tl.load(steps + 2 * first)
        state = tl.load(steps + 2 * first + 1)
        row = (step >> 1).to(tl.int64)
        key = tl.load(keys + row * (KEY_HEADS * KEY_DIM) + key_at, mask=in_k, other=0.0)
        query = tl.load(queries + row * (KEY_HEADS * KEY_DIM) + key_at, mask=in_k, other=0.0)
        value = tl.load(values + row * (HEADS * HEAD_DIM) + value_at, mask=in_v, other=0.0)
        decay = tl.load(left + row * HEADS + head)
        share = tl.load(rate + row * HEADS + head)
        ahead = tl.load(steps + 2 * (first + 1), mask=first + 1 < last, other=0)
        ahead_state = tl.load(steps + 2 * (first + 1) + 1, mask=first + 1 < last, other=-1)
        for i in range(first, last):
            # what the next two steps need is asked for before this step's sums, which take about as long
            next_row = (ahead >> 1).to(tl.int64)
            next_key = tl.load(keys + next_row * (KEY_HEADS * KEY_DIM) + key_at, mask=in_k, other=0.0)
            next_query = tl.load(queries + next_row * (KEY_HEADS * KEY_DIM) + key_at, mask=in_k, other=0.0)
            next_value = tl.load(values + next_row * (HEADS * HEAD_DIM) + value_at, mask=in_v, other=0.0)
            next_decay = tl.load(left + next_row * HEADS + head)
            next_share = tl.load(rate + next_row * HEADS + head)
            later = tl.load(steps + 2 * (i + 2), mask=i + 2 < last, other=0)
            later_state = tl.load(steps + 2 * (i + 2) + 1, mask=i + 2 < last, other=-1)
            memory = memory * decay
            added = (value - tl.sum(tl.sum(memory * key, 1), 1)) * share
            memory = tl.fma(key, tl.broadcast_to(added[:, None, None], key.shape), memory)
            if step % 2 == 1:
                result = tl.sum(tl.sum(memory * query, 1), 1)
                tl.store(out + ((step >> 1) - replays).to(tl.int64) * (HEADS * HEAD_DIM) + value_at, result, mask=in_v)
            if state >= 0:
                tl.store(memories + state.to(tl.int64) * SIZE + at, memory, mask=inside)
            step, state, ahead, ahead_state = ahead, ahead_state, later, later_state
            key, query, value, decay, share = next_key, next_query, next_value, next_decay, next_share


@triton.jit(do_not_specialize=["rows"])
def gated_norm(
    x, parts, weight, out, rows, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The norm of each head's result, times silu of the gate: columns FIRST and after of the product `parts`."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    inside = d < HEAD_DIM
    at = tl.program_id(1) * HEAD_DIM + d
    y = tl.load(x + row * (HEADS * HEAD_DIM) + at, mask=inside, other=0.0)
    gate = tl.load(parts + row * WIDTH + FIRST + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate = gate + tl.load(parts + (part * rows + row) * WIDTH + FIRST + at, mask=inside, other=0.0).to(tl.float32)
    y = y * (1.0 / tl.sqrt(tl.sum(y * y, 0) / HEAD_DIM + eps)) * tl.load(weight + d, mask=inside, other=0.0)
    y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * (HEADS * HEAD_DIM) + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "replays"])
def short_convolution(
    parts, bias, stored, windows, conv, conv_bias, out, replayed, taps, kept, saved, rows, replays,
    PARTS: tl.constexpr, KERNEL: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CONV_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A convolution of the first gate times the values, times the second gate, (rows, WIDTH); arguments as those of `prepare`.

    `parts` (PARTS, rows, 3 * WIDTH) hold gate, gate and values, before their bias.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(replayed + row, mask=row < replays, other=0)
    if place >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < WIDTH
        state = tl.load(saved + row).to(tl.int64)
        window = windows + state * ((KERNEL - 1) * WIDTH) + channel
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(KERNEL - 1):
            code = tl.load(taps + row * (KERNEL - 1) + tap).to(tl.int64)
            x = _gated(parts, bias, stored, replayed, code, rows, replays, channel, inside, WIDTH, PARTS, HAS_BIAS)
            x += tl.load(windows + (-2 - code) * WIDTH + channel, mask=inside & (code < -1), other=0.0)
            if tap > 0:
                tl.store(window + (tap - 1) * WIDTH, x, mask=inside & (state >= 0))
            total = tl.fma(x, tl.load(conv + tap * WIDTH + channel, mask=inside, other=0.0), total)
        x = _gated(parts, bias, stored, replayed, row, rows, replays, channel, inside, WIDTH, PARTS, HAS_BIAS)
        tl.store(window + (KERNEL - 2) * WIDTH, x, mask=inside & (state >= 0))
        node = tl.load(kept + row).to(tl.int64)
        tl.store(stored + node * WIDTH + channel, x, mask=inside & (node >= 0))
        total = tl.fma(x, tl.load(conv + (KERNEL - 1) * WIDTH + channel, mask=inside, other=0.0), total)
        if HAS_CONV_BIAS:
            total += tl.load(conv_bias + channel, mask=inside, other=0.0)
        if row >= replays:
            fed = row - replays
            gate = _summed(parts, bias, fed, rows, WIDTH + channel, inside, WIDTH, PARTS, HAS_BIAS)
            tl.store(out + fed * WIDTH + channel, (gate * total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(
    parts, bias, stored, replayed, row, rows, replays, channel, inside,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What the convolution reads of a numbered row: of the product, or of a stored row. It is zero below row 0."""
    again = (row >= 0) & (row < replays)
    number = tl.load(replayed + row, mask=again, other=0).to(tl.int64)
    held = tl.load(stored + number * WIDTH + channel, mask=inside & again, other=0.0)
    fed, is_fed = row - replays, inside & (row >= replays)
    gate = _summed(parts, bias, fed, rows, channel, is_fed, WIDTH, PARTS, HAS_BIAS)
    value = _summed(parts, bias, fed, rows, 2 * WIDTH + channel, is_fed, WIDTH, PARTS, HAS_BIAS)
    return tl.where(again, held, gate * value)


@triton.jit
def _summed(parts, bias, row, rows, column, inside, WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Columns of a row of the product, its parts in order, with their bias."""
    x = tl.load(parts + row * (3 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x = x + tl.load(parts + (part * rows + row) * (3 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = x + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows"])
def gate_heads(
    mixed, parts, bias, rows, WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What attention gives (rows, WIDTH), in place, times the sigmoid of a product (PARTS, rows, WIDTH) and its bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(parts + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate = gate + tl.load(parts + (part * rows + row) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate = gate + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(mixed + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(mixed + row * WIDTH + column, (x / (1.0 + tl.exp(-gate))).to(mixed.dtype.element_ty), mask=inside)
