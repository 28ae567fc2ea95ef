"""The native core against plain torch, and its rows against themselves, on every build this processor runs."""

from __future__ import annotations

import platform
import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.model import Decoder, Feed
from outrider.model.load import DTYPES
from outrider.model.spec import ACTIVATIONS
from outrider.ops import Core, Epilogue, NormWeights, PackedLinear, Plain, find_core, serving_ops
from outrider.ops.native import Threads
from tests.support.native import LONG, PAGES, SERVED, TREE, assert_rows_agree, make_decoder, make_runner

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])

KINDS = ("float32", "bfloat16", "int8")
SHAPES = [(16, 16), (1, 1), (77, 33), (60, 100), (130, 257), (512, 704), (2048, 96)]  # inner, columns


def test_the_core_is_built_where_it_can_be() -> None:
    """Otherwise every test here would be skipped unseen."""
    if platform.machine() == "x86_64" and shutil.which("c++"):
        assert serving_ops("native").core is not None


# Plain torch twins


def rounded_rows(x: Tensor, kind: str) -> Tensor:
    """Activations as the core multiplies them, in float64."""
    if kind != "int8":
        return x.to(DTYPES[kind]).double()
    scale = (x.abs().amax(1, keepdim=True) / 127.0).clamp_min(1e-30)
    return (x / scale).round().double() * scale.double()


def rounded_weight(weight: Tensor, kind: str) -> Tensor:
    return rounded_rows(weight, kind)  # per output channel: a row of the stored matrix


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_the_product(core: Core, kind: str, shape: tuple[int, int], with_bias: bool) -> None:
    """Float32 sums of exact products: the error is a few roundings of the sum of magnitudes."""
    inner, columns = shape
    generator = torch.Generator().manual_seed(inner)
    weight, bias = torch.randn(columns, inner, generator=generator), torch.randn(columns, generator=generator)
    x = torch.randn(19, inner, generator=generator)
    got = PackedLinear(core, kind, weight, bias if with_bias else None)(x)
    exact, w = rounded_rows(x, kind), rounded_weight(weight, kind)
    want = exact @ w.T + (bias.double() if with_bias else 0.0)
    allowed = 4e-7 * (exact.abs() @ w.abs().T + 1.0)
    if kind == "int8":  # a quotient on a tie may round to either side
        allowed += (x.abs().amax(1, keepdim=True) / 127.0) * w.abs().amax(1) * 1.01
    assert bool(((got.double() - want).abs() <= allowed).all())


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("columns", [32, 74])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_follows_the_product(core: Core, activation: str, columns: int, paired: bool) -> None:
    weight, bias, x = torch.randn(columns, 40), torch.randn(columns), torch.randn(19, 40)
    got = PackedLinear(core, "float32", weight, bias, Epilogue(activation, paired))(x)
    torch.testing.assert_close(got, Plain().activate(x @ weight.T + bias, activation, paired), rtol=1e-5, atol=1e-5)


WIDE_RANGE = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, 1e-4, 90.0, -90.0, 1e18, -1e18])))


@pytest.mark.parametrize("function", [*ACTIVATIONS, "cap"])
def test_functions_are_exact_to_a_few_units(core: Core, function: str) -> None:
    """Against float64, over all magnitudes; NaN stays NaN, and a value has the same bits in every column and row."""
    then = Epilogue(cap=2.0, scale=3.0) if function == "cap" else Epilogue(function)
    x, ones = WIDE_RANGE[:, None], torch.ones(37, 1)
    got = PackedLinear(core, "float32", ones, then=then)(x)
    assert torch.equal(got, got[:, :1].expand(-1, 37))
    assert torch.equal(PackedLinear(core, "float32", ones, then=then)(x[5:]), got[5:])
    wide = x.double()
    want = 2 * torch.tanh(3 * wide / 2) if function == "cap" else Float64().activate(wide, function, gated=False)
    torch.testing.assert_close(got[:, :1].double(), want, rtol=1e-6, atol=2.5e-7)
    assert bool(PackedLinear(core, "float32", ones, then=then)(torch.tensor([[float("nan")]])).isnan().all())


def test_bf16_weights_are_taken_as_they_are(core: Core) -> None:
    weight, x = torch.randn(50, 40).to(torch.bfloat16), torch.randn(3, 40)
    same = PackedLinear(core, "bfloat16", weight.float())
    assert torch.equal(PackedLinear(core, "bfloat16", weight)(x), same(x))


RARE = (0.0, -0.0, 1e-40, -1e-38, 3e38, -77.0, 2.0**-100, float("inf"))  # high bytes that the sixteen of a panel leave out


@pytest.mark.parametrize("shape", [(512, 704), (77, 34), (1408, 48), (16, 16)])
def test_12_bit_packed_weights_are_lossless(core: Core, shape: tuple[int, int]) -> None:
    """Products are equal bit for bit, with and without escaped blocks, at row counts of one and of several blocks."""
    inner, columns = shape
    generator = torch.Generator().manual_seed(columns)
    weight, x = torch.randn(columns, inner, generator=generator), torch.randn(35, inner, generator=generator)
    for i, value in enumerate(RARE[: columns // 8]):
        weight[i * 7 % columns, (i * 311 + 5) % inner] = value
    weight = weight.to(torch.bfloat16)
    packed12, plain = (PackedLinear(core, "bfloat16", weight, pack_12bit=packed12) for packed12 in (True, False))
    for rows in (1, 2, 7, 16, 35):
        assert torch.equal(packed12(x[:rows]).view(torch.int32), plain(x[:rows]).view(torch.int32))
    assert core.name == "amx" or shape == (16, 16) or packed12.bytes < 0.85 * plain.bytes


def test_weights_with_many_high_bytes_are_not_packed(core: Core) -> None:
    weight = torch.randint(-(2**14), 2**14, (64, 256), dtype=torch.int16).view(torch.bfloat16)  # exponents of all sizes
    packed12, plain = (PackedLinear(core, "bfloat16", weight, pack_12bit=packed12) for packed12 in (True, False))
    x = torch.randn(3, 256)
    assert packed12.bytes == plain.bytes == weight.numel() * 2
    assert torch.equal(packed12(x).view(torch.int32), plain(x).view(torch.int32))


def test_norm_before_a_product_is_the_norm(core: Core) -> None:
    for width in (1, 15, 16, 60, 512):
        x, norm, bias = torch.randn(5, width) + 3.0, torch.randn(width), torch.randn(width)
        product = PackedLinear(core, "float32", torch.eye(width))
        got = product(x, NormWeights(norm, eps=1e-5))
        torch.testing.assert_close(got, Plain().rms_norm(x, norm, 1e-5), rtol=2e-6, atol=1e-6)
        for b in (None, bias):
            got = product(x, NormWeights(norm, b, True, 1e-5))
            torch.testing.assert_close(got, Plain().layer_norm(x, norm, b, 1e-5), rtol=2e-5, atol=1e-5)


class Float64(Plain):
    """Activations in float64."""

    def activate(self, x: Tensor, activation: str, gated: bool) -> Tensor:
        return self._activation(x, activation)


class Rounding(Plain):
    """Products of rounded rows and rounded weights with float32 results, as the core computes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = rounded_rows(x.float(), self.kind) @ rounded_weight(weight.float(), self.kind).T
        return (y if bias is None else y + bias.double()).float()


def dense_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """The definition: dense attention over the whole text."""
    windows, caps = decoder.spec.windows, [layer.attention.soft_cap for layer in decoder.spec.layers]
    kept = torch.float32 if decoder.spec.dtype == "float32" else torch.bfloat16  # q, k, v and the weights

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, n = q.shape[1] // k.shape[1], q.shape[0]
        q, k, v = ((x.to(kept).double()) for x in (q * q.shape[-1] ** -0.5, k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1))
        if (cap := caps[layer]) is not None:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        window = windows[layer]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        sinks = decoder.layers[layer].sinks
        sink = torch.full((q.shape[1],), -torch.inf).double() if sinks is None else sinks.double()
        top = scores.amax(-1, keepdim=True).maximum(sink[:, None, None])
        weights = (scores - top).exp()
        mixed = torch.einsum("hnm,mhd->nhd", weights.to(kept).double(), v.repeat_interleave(group, 1))
        total = weights.sum(-1) + (sink[:, None] - top[..., 0]).exp()
        return (mixed / total.T[..., None]).float()

    ops, where = Rounding(decoder.spec.dtype), torch.arange(len(tokens))
    x = decoder.embed(torch.tensor(tokens), where)
    if decoder.spec.dtype == "int8":  # rows of the embedding are columns of a packed matrix
        x = rounded_weight(x, "int8").float()
    rows = decoder(torch.tensor(tokens), where, attend, ops, x=x)
    return decoder.logits(rows.last, ops)


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "narrow heads": {"heads": 3, "kv_heads": 1, "head_dim": 10},
    "wide heads": {"head_dim": 80, "kv_heads": 4},
    "many queries per head": {"heads": 20, "kv_heads": 1, "head_dim": 6},
    "windows": {"windows": (21, None), "tied": True},
    "short window": {"windows": (3, 3)},
    "biases and norms": {"attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True},
    "odd widths": {"hidden": 50, "ffn": 37, "vocab": 53},
    "wide": {"hidden": 272, "ffn": 528, "heads": 8, "kv_heads": 2, "head_dim": 34},
}


def decoder_of(variant: str, kind: str) -> Decoder:
    return make_decoder(kind, **VARIANTS[variant]) if variant in VARIANTS else random_decoder(FEATURE_SPECS[variant], kind)


@pytest.mark.parametrize("page_size", [16, 64, 10])
@pytest.mark.parametrize("variant", [*VARIANTS, *SERVED])
def test_the_stack_is_the_decoder(core: Core, variant: str, page_size: int) -> None:
    """In float32 nothing but the order of additions differs."""
    decoder = decoder_of(variant, "float32")
    text = [i * 37 % decoder.spec.vocab for i in range(LONG)]
    runner = make_runner(core, decoder, page_size)
    got = runner.logits(runner.forward([Feed(PAGES, 0, text)]).last, range(LONG))
    want = dense_logits(decoder, text)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_the_stack_rounds_where_it_says(core: Core, kind: str) -> None:
    """Compares with a reference that rounds at the same places. A difference of an ulp before a rounding may become one step
    of bf16 (2^-8) or int8 (2^-7) in one value of a row: well below 1 % of the logits' norm.
    """
    decoder = make_decoder(kind, hidden=128, ffn=192, heads=4, head_dim=32)
    text = [i * 37 % 97 for i in range(LONG)]
    runner = make_runner(core, decoder)
    got = runner.logits(runner.forward([Feed(PAGES, 0, text)]).last, range(LONG))
    want = dense_logits(decoder, text)
    assert float((got - want).norm() / want.norm()) < 1e-2


def test_a_forward_has_the_same_bits_with_12_bit_packed_weights(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder("bfloat16", hidden=128, ffn=192, heads=4, head_dim=32, tied=True)
    text, results = [i * 37 % 97 for i in range(LONG)], []
    for pack_12bit in (True, False):
        monkeypatch.setattr("outrider.model.stack.PackedLinear", partial(PackedLinear, pack_12bit=pack_12bit))
        runner = make_runner(core, decoder)
        results.append((runner.logits(runner.forward([Feed(PAGES, 0, text)]).last, range(LONG)), runner.weight_bytes))
    assert torch.equal(results[0][0], results[1][0])
    assert core.name == "amx" or results[0][1] < 0.85 * results[1][1]


# Rows do not know their neighbours


@pytest.mark.parametrize("shape", [(512, 704), (77, 33), (1408, 48)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_at_every_place_and_count(core: Core, kind: str, shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape[1], shape[0]), torch.randn(80, shape[0])
    product = PackedLinear(core, kind, weight, torch.randn(shape[1]), Epilogue("gelu"))
    norm = NormWeights(torch.rand(shape[0]), torch.rand(shape[0]), layer=True, eps=1e-5)
    alone = torch.cat([product(x[i : i + 1], norm) for i in range(80)])
    for count in [*range(1, 34), 48, 63, 64, 65, 80]:
        for first in {0, 1, (80 - count) // 2, 80 - count} & set(range(80 - count + 1)):
            assert torch.equal(product(x[first : first + count], norm), alone[first : first + count]), (count, first)


@pytest.mark.parametrize("head_dim", [34, 16], ids=["heads that share panels", "heads with panels of their own"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_matter(core: Core, kind: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(kind, **VARIANTS["wide"] | {"head_dim": head_dim})
    text = [i * 37 % 97 for i in range(LONG)]
    seen = []
    for threads in (1, 2, 3, 7, 2):
        monkeypatch.setattr(core, "threads", threads)
        runner = make_runner(core, decoder)
        rows = [runner.forward([feed]).last for feed in (Feed(PAGES, 0, text), Feed(PAGES, LONG, [5]))]
        seen.append(runner.logits(torch.cat(rows), range(LONG + 1)))
    assert all(torch.equal(seen[0], other) for other in seen)


def test_the_quicker_number_of_threads_is_taken(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are tried, then one, then the quicker; after a while the other again. Time is a counter here."""
    monkeypatch.setattr(core, "threads", 4)
    clock, cost, seen = [0.0], {4: 3.0, 1: 2.0}, []
    monkeypatch.setattr("outrider.ops.native.time.perf_counter", lambda: clock[0])

    def call(threads: int) -> None:
        seen.append(threads)
        clock[0] += cost[threads]

    threads = Threads(core)
    for _ in range(20):
        threads.run(1, call)
    assert seen == [4] * 4 + [1] * 16
    cost[1] = 9.0
    for _ in range(400):
        threads.run(1, call)
    assert 3 <= seen[20:].index(4) < 6, "one thread has become slow"
    assert seen[-200:].count(1) <= 2
    assert seen[30:].count(1) >= 1, "one thread is tried again"
    seen.clear()
    for _ in range(40):
        threads.run(8, call)
    assert seen == [4] * 40, "who clearly wins at one row is not doubted at eight"
    cost[4] = 20.0  # somebody else is busy now
    for _ in range(600):
        threads.run(8, call)
    assert seen[-200:].count(4) <= 2


@pytest.mark.parametrize("page_size", [16, 64, 10])
@pytest.mark.parametrize("variant", [*VARIANTS, *SERVED])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_decode_chunks_and_trees_agree(core: Core, kind: str, variant: str, page_size: int) -> None:
    assert_rows_agree(make_runner(core, decoder_of(variant, kind), page_size))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_wanted_rows_are_those_of_all(core: Core, kind: str) -> None:
    """In any order and more than once, over more than one chunk of rows."""
    decoder = make_decoder(kind, tied=True)
    runner, feed = make_runner(core, decoder), Feed(PAGES, 0, [i * 37 % 97 for i in range(LONG)])
    every = runner.logits(runner.forward([feed]).last, range(LONG))
    for wanted in ([LONG - 1], [3, 66, 3, 0, 65], [*range(LONG), *range(LONG)]):
        outputs = runner.forward([feed], wanted=wanted).logits
        assert outputs is not None
        assert torch.equal(outputs, every[wanted])


def test_two_spans_of_layers_equal_one_forward(core: Core) -> None:
    from outrider.model.stack import lay_out_rows
    from outrider.ops import StackSpan

    decoder = make_decoder("bfloat16", layers=4)
    runner, resumed = make_runner(core, decoder), make_runner(core, decoder)
    rows = lay_out_rows([Feed(PAGES, 0, list(range(40)))])
    assert runner.stack is not None
    assert resumed.stack is not None
    full = runner.stack.forward(rows, torch.tensor([0, 3, 4], dtype=torch.int32))
    early = resumed.stack.forward(rows, span=StackSpan(0, 3))
    late = resumed.stack.forward(rows, span=StackSpan(3), features=early.stream)
    assert full.taps is not None
    assert late.last is not None
    assert torch.equal(full.taps[:, 1], early.stream)
    assert torch.equal(full.taps[:, 2], late.stream)
    assert torch.equal(full.stream, late.stream)
    assert torch.equal(full.last, late.last)  # type: ignore[arg-type]


def test_garbage_beyond_a_row_does_not_matter(core: Core) -> None:
    """Slots past a row's position may hold anything finite."""
    decoder = make_decoder("float32")
    runner, text = make_runner(core, decoder), list(range(40))
    before = runner.forward([Feed(PAGES, 0, text)]).last.clone()
    runner.forward([Feed(PAGES, 20, [96] * 30)])
    runner.pool.keys[:, 13] = 1e30
    assert torch.equal(runner.forward([Feed(PAGES, 0, text)]).last, before)


def test_a_tied_draft_moves_with_the_pool(core: Core) -> None:
    """Accepted nodes of a tree are moved to their positions; what follows sees them there."""
    decoder = make_decoder("float32")
    runner, text = make_runner(core, decoder), list(range(30))
    tokens, parents = zip(*TREE, strict=True)
    runner.forward([Feed(PAGES, 0, text, tokens, parents)])
    path = [0, 2, 4, 6]  # nodes of one branch
    pool = runner.pool
    pool.move(pool.slots(PAGES, [30 + node for node in path]), pool.slots(PAGES, range(30, 34)))
    moved = runner.forward([Feed(PAGES, 34, [50])]).last
    plain = make_runner(core, decoder)
    plain.forward([Feed(PAGES, 0, text + [tokens[node] for node in path])])
    assert torch.equal(moved, plain.forward([Feed(PAGES, 34, [50])]).last)
