"""Row invariance: every operation, every row position, odd widths."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from outrider.bench.doctor import attention_is_invariant, linear_is_invariant
from outrider.model.spec import ACTIVATIONS
from outrider.ops import BLOCK, Blocked, Plain, Segment, attention, paged_attention, plan_attention, products
from outrider.ops.attention import _soft_capped
from outrider.ops.row_counts import agreeing_counts, in_counts

ROWS = (1, 2, 3, 5, 16, 17, 48, 112)
NARROW = range(1, 131)
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
        assert_same_bits_everywhere(lambda x: OPS.layer_norm(x, weight, weight + 1, 1e-5), (width,))
        assert_same_bits_everywhere(lambda x: _soft_capped(x, 20.0), (width,))
        for activation in ACTIVATIONS:
            for gated in (True, False):
                assert_same_bits_everywhere(partial(OPS.activate, activation=activation, gated=gated), (2 * width,))
        if width % 2 == 0 and width < 200:
            angle = torch.rand(width // 2)
            cos, sin = torch.cat((angle.cos(), angle.cos())), torch.cat((-angle.sin(), angle.sin()))
            turn = lambda x: OPS.rotary(x, cos.expand(len(x), 1, -1), sin.expand(len(x), 1, -1))  # noqa: E731
            assert_same_bits_everywhere(turn, (3, width))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 1024), (1408, 512), (60, 100), (77, 33), (512, 8192)])
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert linear_is_invariant(OPS, dtype, shape[::-1])


@pytest.mark.parametrize("cap", [None, "AVX512_CORE"])
@pytest.mark.parametrize("flags", [frozenset(), frozenset({"avx512_bf16"})], ids=["emulated", "bf16 instructions"])
def test_bf16_products_with_and_without_instructions(
    flags: frozenset[str], cap: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bf16 is emulated, rows are multiplied one by one; the bits do not depend on the row count either way."""
    monkeypatch.setattr(products, "cpu_flags", lambda: flags)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if cap is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    products._counts.cache_clear()
    try:
        assert linear_is_invariant(Blocked(), torch.bfloat16, (512, 1024))
        if (not flags or cap) and products._can_pack(torch.bfloat16):
            assert products._counts((512, 1024), torch.bfloat16, False, torch.get_num_threads()) == (1,)
    finally:
        products._counts.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", NARROW)
def test_every_width_in_and_out(inner: int, dtype: torch.dtype) -> None:
    """A row alone, and among others at every place, for an output width that goes through all of them too.

    Terms cancel, so that another order of additions shows in bf16 too.
    """
    generator = torch.Generator().manual_seed(inner)
    columns = (inner * 37) % 130 + 1
    x = torch.randn(21, inner, generator=generator) * torch.randint(0, 12, (inner,), generator=generator).exp2()
    weight, half = torch.randn(columns, inner, generator=generator), inner // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half].flip(1), -weight[:, :half].flip(1)
    x, weight = x.to(dtype), weight.to(dtype)
    alone = torch.cat([OPS.linear(row[None], weight) for row in x])
    for count in range(2, 21):
        for first in {0, 1, 21 - count}:
            assert torch.equal(OPS.linear(x[first : first + count], weight), alone[first : first + count]), (count, first)


@pytest.mark.parametrize("columns", NARROW)
def test_every_output_width_has_a_bias(columns: int) -> None:
    weight, bias, x = torch.randn(columns, 24), torch.randn(columns), torch.randn(9, 24)
    alone = torch.cat([OPS.linear(row[None], weight, bias) for row in x])
    assert torch.equal(OPS.linear(x, weight, bias), alone)
    torch.testing.assert_close(alone, Plain().linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_row_counts_that_disagree_are_not_used() -> None:
    """A library whose kernels add in another order below four rows, or by a row's place in the block."""

    def by_count(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) + (len(x) < 4)

    def by_place(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) + torch.arange(len(x))[:, None] % 8

    x = torch.randn(64, 5)
    assert agreeing_counts(x, by_count) == (4, 8, 16, 32, 64)
    assert agreeing_counts(x, by_place) == (1,)
    for counts in ((4, 16), (1,), (2, 64)):
        got = in_counts(x[:37], counts, lambda part: part * 2.0)
        assert torch.equal(got, x[:37] * 2.0)


def test_the_check_can_fail() -> None:
    """Torch as it comes is not row-invariant in float32 on any processor seen; the check must say so."""
    assert not all(linear_is_invariant(Plain(), torch.float32, shape[::-1]) for shape in ((512, 512), (2048, 384), (100, 77)))


def test_blocked_is_plain_up_to_rounding() -> None:
    x, weight, bias = torch.randn(48, 100), torch.randn(77, 100), torch.randn(77)
    torch.testing.assert_close(OPS.linear(x, weight, bias), Plain().linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    for activation in ACTIVATIONS:
        for gated in (True, False):
            made, plain = (ops.activate(x, activation, gated) for ops in (OPS, Plain()))
            torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-6)


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


@pytest.mark.grid
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


def attended(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], segment: Segment, size: int) -> torch.Tensor:
    """Attention of a segment's rows over keys and values (T, KV, d), laid into the segment's pages."""
    pools = [torch.zeros(max(segment.pages) + 1, part.shape[1], size, part.shape[2]) for part in kv]
    for pool, part in zip(pools, kv, strict=True):
        for t, row in enumerate(part):
            pool[segment.pages[t // size], :, t % size] = row
    return paged_attention(q, *pools, plan_attention([segment], size, frozenset({None})))


@pytest.mark.parametrize("counts", [(1,), (2,), (4, 16)])
def test_attention_at_few_row_counts(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are filled up, or multiplied a few at a time, where few row counts of a library agree. Trees gather their rows."""
    kv, q = (torch.randn(37, 2, 32), torch.randn(37, 2, 32)), torch.randn(6, 4, 32)
    pages = list(range(1, 6))
    for segment in (Segment(0, 30, 6, pages), Segment(0, 30, 2, pages, parents=(-1, -1, 0, 1))):
        want = attended(q, kv, segment, 8)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "attention_counts", lambda *_: counts)
            torch.testing.assert_close(attended(q, kv, segment, 8), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kv_heads", "group", "width"), [(1, 1, 16), (1, 1, 32), (1, 3, 64), (2, 2, 32), (1, 2, 144)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
def test_where_pages_lie_does_not_matter(size: int, kv_heads: int, group: int, width: int) -> None:
    """Pages side by side are one product, a page by itself is another, and those of a tree are gathered: all bits are equal."""
    total = 37
    count = -(-total // size)
    kv = torch.randn(total, kv_heads, width), torch.randn(total, kv_heads, width)
    q = torch.randn(6, kv_heads * group, width)
    layouts = [range(1, count + 1), range(1, 2 * count + 1, 2), [*range(1, count), count + 3], range(count, 0, -1)]
    for rows in (1, 2, 6):
        outputs = [attended(q[:rows], kv, Segment(0, total - rows, rows, list(pages)), size) for pages in layouts]
        assert all(torch.equal(other, outputs[0]) for other in outputs[1:]), rows
        alone = attended(q[rows - 1 : rows], kv, Segment(0, total - 1, 1, list(layouts[0])), size)
        assert torch.equal(alone[0], outputs[0][-1])
    moved = [torch.cat((part[:-2], part[-1:])) for part in kv]  # the second of two siblings, where it lies when it is text
    for pages in layouts:
        tree = attended(q[:3], kv, Segment(0, total - 3, 1, list(pages), (-1, -1)), size)
        assert torch.equal(tree[2], attended(q[2:3], (moved[0], moved[1]), Segment(0, total - 2, 1, list(pages)), size)[0])


def test_tree_attention_gives_the_bits_of_decoding() -> None:
    assert attention_is_invariant()


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_garbage_beyond_a_row_does_not_matter(garbage: float) -> None:
    """Slots past a row's position may hold any keys, and any values that are finite, as all in a pool are."""
    size, pages = 16, [0, 1, 2]
    keys, values = torch.randn(3, 2, size, 16), torch.randn(3, 2, size, 16)
    q = torch.randn(BLOCK, 4, 16)
    plan = plan_attention([Segment(0, 20, 1, pages)], size, frozenset({None, 3}))
    for window in (None, 3):
        before = paged_attention(q, keys, values, plan, window)[0].clone()
        spoiled, weighed = keys.clone(), values.clone()
        spoiled[1, :, 5:] = garbage
        weighed[1, :, 5:] = -1e30
        if window is not None:
            spoiled[0] = garbage
        assert torch.equal(paged_attention(q, spoiled, weighed, plan, window)[0], before)
