"""Rows do not know their neighbours: every operation, every row position, odd widths."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.doctor import attention_is_invariant, linear_is_invariant
from outrider.ops import BLOCK, Blocked, Plain, Segment, paged_attention, plan_attention

ROWS = (16, 32, 48, 112)
WIDTHS = (10, 60, 77, 96, 512, 1408)
OPS = Blocked()


def assert_same_bits_everywhere(call, shape: tuple[int, ...], scale: float = 3.0) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(shape, generator=generator) * scale
    seen = None
    for rows in ROWS:
        for place in range(rows):
            x = torch.randn(rows, *shape, generator=generator) * scale
            x[place] = row
            out = call(x)[place]
            seen = out if seen is None else seen
            assert torch.equal(out, seen), f"row {place} of {rows}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_elementwise_operations(width: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight = torch.rand(width)
        assert_same_bits_everywhere(lambda x: OPS.rms_norm(x, weight, 1e-5), (width,))
        assert_same_bits_everywhere(OPS.gated, (2 * width,))
        if width % 2 == 0 and width < 200:
            angle = torch.rand(width // 2)
            turn = lambda x: OPS.rotary(x, angle.cos().expand(len(x), -1), angle.sin().expand(len(x), -1))  # noqa: E731
            assert_same_bits_everywhere(turn, (3, width))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 1024), (1408, 512), (60, 100), (77, 33), (512, 8192)])
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert linear_is_invariant(OPS, dtype, shape)


def test_the_check_can_fail() -> None:
    """Torch as it comes is not row-invariant in float32 on any processor seen; the check must say so."""
    assert not all(linear_is_invariant(Plain(), torch.float32, shape) for shape in ((512, 512), (2048, 384), (100, 77)))


def test_blocked_is_plain_up_to_rounding() -> None:
    x, weight, bias = torch.randn(48, 100), torch.randn(77, 100), torch.randn(77)
    torch.testing.assert_close(OPS.linear(x, weight, bias), Plain().linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(OPS.gated(x), Plain().gated(x), rtol=1e-5, atol=1e-6)


def reference_attention(q, keys, values, positions, window):  # type: ignore[no-untyped-def]
    """Dense attention in float64; keys (T, KV, d) by logical position."""
    group = q.shape[1] // keys.shape[1]
    k, v = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->nht", q.double(), k) * q.shape[-1] ** -0.5
    t = torch.arange(keys.shape[0])
    hidden = t > positions[:, None]
    if window:
        hidden |= t <= positions[:, None] - window
    return torch.einsum("nht,thd->nhd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v).float()


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 16), (2, 3, 64), (4, 2, 32)])
@pytest.mark.parametrize("fed", [1, 5, 16, 40])
def test_paged_attention_is_attention(fed: int, kv_heads: int, group: int, head_dim: int, window: int | None) -> None:
    size, start = 16, 37
    pages = [5, 2, 3, 0, 7, 6]
    total = start + fed
    keys, values = torch.randn(total, kv_heads, head_dim), torch.randn(total, kv_heads, head_dim)
    pools = [torch.zeros(8, kv_heads, size, head_dim) for _ in range(2)]
    for t in range(total):
        pools[0][pages[t // size], :, t % size] = keys[t]
        pools[1][pages[t // size], :, t % size] = values[t]
    q = torch.randn(-(-fed // BLOCK) * BLOCK, kv_heads * group, head_dim)
    plan = plan_attention([Segment(0, start, fed, pages)], size, frozenset({window}))
    got = paged_attention(q, pools[0], pools[1], plan, window)[:fed]
    want = reference_attention(q[:fed], keys, values, torch.arange(start, total), window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_tree_attention_gives_the_bits_of_decoding() -> None:
    assert attention_is_invariant()


def test_garbage_beyond_a_row_does_not_matter() -> None:
    """Slots past a row's position may hold anything finite."""
    size, pages = 16, [0, 1, 2]
    keys, values = torch.randn(3, 2, size, 16), torch.randn(3, 2, size, 16)
    q = torch.randn(BLOCK, 4, 16)
    plan = plan_attention([Segment(0, 20, 1, pages)], size, frozenset({None}))
    before = paged_attention(q, keys, values, plan)[0].clone()
    keys[1, :, 5:] = 1e30
    values[1, :, 5:] = -1e30
    assert torch.equal(paged_attention(q, keys, values, plan)[0], before)
