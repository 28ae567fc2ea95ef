"""Every kernel equals its plain reference, and a row has the same bits at every row count, place and tile."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling import Row, SamplingParams, choose
from outrider.sampling.noise import prefix_of

SHAPES = [(4096, 14336), (6144, 4096), (24576, 512), (1024, 512), (512, 1408)]  # compiling takes most of the time
EVERY_TILE = SHAPES[3:]
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 130, 257, 600)


@pytest.fixture(scope="module")
def launch():  # type: ignore[no-untyped-def]
    from outrider.ops.cuda import launch

    return launch


def kernels_of(launch, heads=8, kv_heads=4, head=64):  # type: ignore[no-untyped-def]
    return launch.Kernels(launch.Shape(heads, kv_heads, head, 64), torch.bfloat16)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_tile(launch, shape) -> None:  # type: ignore[no-untyped-def]
    from outrider.ops.cuda.tiles import every_tile

    torch.manual_seed(0)
    columns, inner = shape
    k, w, x = kernels_of(launch), random(columns, inner, scale=inner**-0.5), random(max(ROWS), inner)

    def product(rows: torch.Tensor, tile=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        out = torch.full((len(rows), columns), float("nan"), device="cuda")
        k.linear(rows, w, None, out, tile)
        return out

    want = product(x)
    reference = x.double() @ w.double().T
    assert (want - reference).norm() / reference.norm() < 1e-4
    for count in ROWS:  # the table's tile, at the start and at the end of the batch
        assert torch.equal(product(x[:count]), want[:count])
        assert torch.equal(product(x[-count:]), want[-count:])
    for tile in every_tile() if shape in EVERY_TILE else ():
        assert torch.equal(product(x[:70], tile), want[:70]), tile


def test_what_follows_a_product(launch) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    k, x, w, bias = kernels_of(launch), random(21, 512), random(2816, 512, scale=0.05), random(2816)
    product = x.double() @ w.double().T + bias.double()
    gate, up = product.chunk(2, -1)
    for form in ("silu", "gelu", "relu"):
        activation = getattr(torch.nn.functional, form)
        gated = k.activated(x, launch.pair_rows(w, 1), launch.pair_rows(bias, 1), form, True)
        assert (gated - activation(gate) * up).norm() / gated.norm() < 1e-2
        assert (k.activated(x, w, bias, form, False) - activation(product)).norm() / product.norm() < 1e-2
    capped = torch.full((21, 2816), float("nan"), device="cuda")
    k.linear(x, w, bias, capped, scale=0.5, cap=2.0)
    assert (capped - 2.0 * torch.tanh(product / 4.0)).norm() / capped.norm() < 1e-5
    stream, weight = random(21, 2816, dtype=torch.float32), torch.rand(2816, device="cuda")
    norm, post = launch.RowNorm("rms", 1e-5, weight), launch.RowNorm("layer", 1e-5, weight, bias.float())
    want = torch.nn.functional.layer_norm(product, (2816,), weight.double(), bias.double(), 1e-5) * 0.3 + stream.double()
    read = k.finish(k.parts(x, w), bias, stream, norm, post, 0.3)
    assert (stream - want).norm() / want.norm() < 1e-5
    assert torch.equal(read, k.norm(stream, norm))
    want = torch.nn.functional.rms_norm(want, (2816,), weight.double(), 1e-5)
    assert (read - want).norm() / want.norm() < 1e-2


@pytest.mark.parametrize("shape", [(4096, 4096), *EVERY_TILE])
def test_split_k_gives_the_same_bits(launch, shape) -> None:  # type: ignore[no-untyped-def]
    """Adding a product to the stream and norming it gives equal bits with and without split-K programs."""
    from outrider.ops.cuda.tiles import MAX_SPLIT_K_ROWS, every_split_tile

    torch.manual_seed(4)
    columns, inner = shape
    rows = MAX_SPLIT_K_ROWS + 1
    k, w, x = kernels_of(launch), random(columns, inner, scale=inner**-0.5), random(rows, inner)
    stream, bias, weight = random(rows, columns, dtype=torch.float32), random(columns), torch.rand(columns, device="cuda")
    norm = launch.RowNorm("rms", 1e-5, weight)

    def added(first: int, end: int, used_bias, tile=None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        rows_added = stream[first:end].clone()
        return rows_added, k.finish(k.parts(x[first:end], w, tile), used_bias, rows_added, norm)

    for used_bias in (None, bias):
        want, normed = added(0, rows, used_bias)
        for first, end in ((0, 1), (3, 8), (20, 36), (7, 37), (100, 160), (1, rows)):
            for tile in (None, *(every_split_tile() if shape in EVERY_TILE else ())):
                got, got_norm = added(first, end, used_bias, tile)
                assert torch.equal(got, want[first:end]), tile
                assert torch.equal(got_norm, normed[first:end]), tile


@pytest.mark.parametrize(("heads", "kv_heads", "head", "window"), [(32, 8, 128, None), (8, 4, 64, 100), (4, 4, 32, None)])
def test_attention_by_rows_and_by_chunks_is_the_same(launch, heads, kv_heads, head, window) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(2)
    k, length, pages = kernels_of(launch, heads, kv_heads, head), 500, 10
    pool = (random(pages, kv_heads, 64, head), random(pages, kv_heads, 64, head))
    order = torch.randperm(pages, device="cuda")
    q = random(length, heads * head)
    zero = torch.zeros(length, dtype=torch.int32, device="cuda")
    where = torch.arange(length, dtype=torch.int32, device="cuda")
    table, none = order.int()[None].contiguous(), torch.zeros(length, 4, dtype=torch.int32, device="cuda")
    meta = launch.AttentionMetadata(zero, zero, where, where, zero, zero, table, none, zero.float(), zero.long())
    single = torch.full_like(q, float("nan"))
    k.attend_rows(q, pool, meta, single, window)
    for step in (k.chunk_tokens, 7):
        chunks = [(i, min(step, length - i), i, 0, 0) for i in range(0, length, step)]
        runs = torch.full_like(q, float("nan"))
        k.attend_chunks(q, pool, table, torch.tensor(chunks, dtype=torch.int32, device="cuda"), runs, window)
        assert torch.equal(runs, single)
    keys, values = (
        part[order].permute(1, 0, 2, 3).reshape(kv_heads, -1, head)[:, :length].double().repeat_interleave(heads // kv_heads, 0)
        for part in pool
    )
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    if window:
        mask &= ~torch.ones_like(mask).tril(-window)
    rows = q.view(length, heads, head).transpose(0, 1).double()
    want = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    want = want.transpose(0, 1).reshape(length, -1)
    assert (single - want).norm() / want.norm() < 1e-2


def test_choices_equal_those_of_the_cpu(launch) -> None:  # type: ignore[no-untyped-def]
    rows = 64
    k, logits = kernels_of(launch), torch.randn(rows, 9001, generator=torch.Generator().manual_seed(3)) * 3
    all_params = [SamplingParams(temperature=[0.0, 0.7, 1.0, 1.6][i % 4]) for i in range(rows)]
    choice_rows = [Row(params, 100 + i, i % 3, 50 + i, 10, (), frozenset()) for i, params in enumerate(all_params)]
    prefixes = torch.tensor(
        [prefix_of(row.seed, row.sample) - (prefix_of(row.seed, row.sample) >> 63 << 64) for row in choice_rows]
    )
    zero = torch.zeros(rows, dtype=torch.int32, device="cuda")
    positions = torch.tensor([row.position - 1 for row in choice_rows], dtype=torch.int32, device="cuda")
    temperatures = torch.tensor([params.temperature for params in all_params], device="cuda")
    meta = launch.AttentionMetadata(
        zero, zero, positions, zero, zero, zero, zero[None], zero[:, None], temperatures, prefixes.cuda()
    )
    assert k.choose(logits.cuda(), meta)[0].tolist() == choose(logits, choice_rows)
    spoiled = logits.clone()
    spoiled[0, 17], spoiled[1] = float("nan"), float("-inf")
    assert k.choose(spoiled.cuda(), meta)[0].tolist()[:3] == choose(spoiled, choice_rows)[:3]
