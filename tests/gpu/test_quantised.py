"""Products with quantised matrices equal their plain reference; a row has the same bits at every row count, place and tile."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.ops import Grouped
from outrider.ops.floats import ScaledFloats

INTERPRETED = True
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if _INTERPRETED else "cuda")
COLUMNS, INNER = (80, 384) if _INTERPRETED else (704, 3040)
ROWS = (1, 5, 17, 40) if _INTERPRETED else (1, 2, 7, 16, 17, 31, 33, 64, 65, 127, 200, 512)
KINDS = (
    "fp8", "fp8_tensor", "fp8_weights", "fp8_blocks", "fp8_block_weights", "int8", "int4", "int4_zeros", "int4_least", "int4_32",
    "int4_order", "bytes_32", "bytes_16",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("products_of_fixed_order")


def stored_matrix(kind: str, columns: int, inner: int, seed: int = 0) -> Grouped | ScaledFloats:
    """A random matrix as a checkpoint stores it."""
    torch.manual_seed(seed)
    values = torch.randn(columns, inner) * inner**-0.5
    if kind.startswith("fp8_block"):
        scale = torch.rand(-(-columns // 128), -(-inner // 128)) / 100 + 0.001
        block = torch.arange(columns) // 128
        spread = scale[block].repeat_interleave(128, 1)[:, :inner]
        return ScaledFloats.stored((values / spread).to(torch.float8_e4m3fn), scale, (128, 128))
    if kind == "fp8_tensor":
        return ScaledFloats.stored((values * 2000).to(torch.float8_e4m3fn), torch.full((1, 1), 1 / 2000), (columns, inner))
    if kind.startswith("fp8"):
        return ScaledFloats.of(values)
    if kind == "int8":
        codes, scale = torch.randint(1, 256, (columns, inner), dtype=torch.uint8), torch.rand(columns, 1) / 1000
        return Grouped(codes, scale, None, 128, 8, inner)
    size = {"int4_32": 32, "bytes_32": 32, "bytes_16": 16}.get(kind, 128)
    bits = 8 if kind.startswith("bytes") else 4
    codes = torch.randint(0, 2**bits, (columns, inner), dtype=torch.uint8)
    groups = -(-inner // size)
    scale = (torch.rand(columns, groups) / 100).half().float()
    least = None
    if kind in ("int4_zeros", "int4_order"):
        least = scale * torch.randint(0, 17, (columns, groups))
    elif kind in ("int4_least", "bytes_32"):
        least = torch.rand(columns, groups) / 10
    inputs = torch.randperm(inner) if kind == "int4_order" else None
    return Grouped(codes, scale, least, 0 if least is not None else 2 ** (bits - 1), bits, size, inputs)


def on_device(kind: str, stored: Grouped | ScaledFloats) -> Any:
    from outrider.ops.cuda.quantised_matrix import fp8_matrix, grouped_matrix

    if isinstance(stored, ScaledFloats):
        return fp8_matrix(stored, DEVICE, not kind.endswith("weights"))
    return grouped_matrix(stored, DEVICE)


def kernels(heads: int = 2, kv_heads: int = 1, head: int = 64) -> Any:
    from outrider.ops.cuda.launch import Kernels, Shape

    return Kernels(Shape(heads, kv_heads, head, 64), torch.bfloat16)


def rounded_rows(x: Tensor, kind: str) -> Tensor:
    """Rows as the product of a kind reads them, in float64."""
    x = x.cpu().float()
    if kind == "int8":
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round().double() * scale
    if kind in ("fp8", "fp8_tensor"):
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).double() * scale
    if kind == "fp8_blocks":
        blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).view(len(x), -1, 128)
        scale = (blocks.abs().amax(2, keepdim=True) / 448).clamp(min=1e-30)
        return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).view(len(x), -1)[:, : x.shape[1]]
    return x.double()


def product(k: Any, x: Tensor, w: Any, tile: Any = None) -> Tensor:
    out = torch.full((len(x), w.shape[0]), float("nan"), device=DEVICE)
    k.linear(x, w, None, out, tile)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_equals_the_dequantised_one(kind: str) -> None:
    stored = stored_matrix(kind, COLUMNS, INNER)
    w, k = on_device(kind, stored), kernels()
    assert w is not None
    x = torch.randn(ROWS[-1], INNER, device=DEVICE).bfloat16()
    want = rounded_rows(x, kind) @ stored.values().double().T
    got = product(k, x, w).cpu()
    assert (got - want).norm() / want.norm() < (3e-3 if kind.startswith(("fp8", "int8")) else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_tile_and_row_count(kind: str) -> None:
    from outrider.ops.cuda.quantised_tiles import every_quantised_tile

    w, k = on_device(kind, stored_matrix(kind, COLUMNS, INNER)), kernels()
    assert w.parts > 1
    x = torch.randn(ROWS[-1], INNER, device=DEVICE).bfloat16()
    want = product(k, x, w)
    norm, stream = None, torch.randn(ROWS[-1], COLUMNS, device=DEVICE)
    joined = stream.clone()
    k.finish(k.parts(x, w), None, joined, norm)
    for count in ROWS:
        assert torch.equal(product(k, x[:count], w), want[:count]), count
        assert torch.equal(product(k, x[-count:], w), want[-count:]), count
        added = stream[:count].clone()
        k.finish(k.parts(x[:count], w), None, added, norm)
        assert torch.equal(added, joined[:count]), count
    for tile in every_quantised_tile(w.kind):
        for count in (1, 17) if _INTERPRETED else (1, 70):
            assert torch.equal(product(k, x[:count], w, tile), want[:count]), tile


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks", "int8", "int4_zeros"])
def test_gate_and_up_are_multiplied_in_the_kernel(kind: str) -> None:
    from functools import partial

    from outrider.ops.cuda.matrix import pair_rows

    stored = stored_matrix(kind, 256, 384)
    w, k = on_device(kind, stored).reordered(partial(pair_rows, groups=1)), kernels()
    x, bias = torch.randn(70, 384, device=DEVICE).bfloat16(), torch.randn(256, device=DEVICE).bfloat16()
    gate, up = (rounded_rows(x, kind) @ stored.values().double().T + bias.cpu().double()).chunk(2, 1)
    want, got = torch.nn.functional.silu(gate) * up, k.activated(x, w, pair_rows(bias, 1), "silu", True)
    assert (got.cpu() - want).norm() / want.norm() < 1e-2
    for count in (1, 16, 33):
        assert torch.equal(k.activated(x[:count], w, pair_rows(bias, 1), "silu", True), got[:count])


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks", "int8", "int4"])
def test_rows_may_come_in_the_form_that_a_product_reads(kind: str) -> None:
    w, k = on_device(kind, stored_matrix(kind, COLUMNS, INNER)), kernels()
    stream, parts = torch.randn(20, INNER, device=DEVICE), torch.randn(2, 20, INNER, device=DEVICE)
    read = k.finish(parts, None, stream.clone(), None)
    assert torch.equal(k.parts(k.finish_as(w.reads, parts, None, stream.clone(), None), w), k.parts(read, w))
    assert (w.reads is None) == (kind == "int4")


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks", "int4"])
def test_storage_may_be_replaced(kind: str) -> None:
    first, second = (on_device(kind, stored_matrix(kind, COLUMNS, INNER, seed)) for seed in (1, 2))
    k, x = kernels(), torch.randn(3, INNER, device=DEVICE).bfloat16()
    moved = first.over([tensor.clone() for tensor in second.tensors])
    assert torch.equal(product(k, x, moved), product(k, x, second))
    assert not torch.equal(product(k, x, moved), product(k, x, first))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_values_that_are_not_finite_stay_in_their_row() -> None:
    for kind in ("fp8", "fp8_blocks", "int8"):
        w, k = on_device(kind, stored_matrix(kind, COLUMNS, INNER)), kernels()
        x = torch.randn(4, INNER, device=DEVICE).bfloat16()
        want = product(k, x, w)
        x[1, 7], x[2, 200] = float("nan"), float("inf")
        got = product(k, x, w)
        assert torch.equal(got[[0, 3]], want[[0, 3]])
        assert got[1:3].isnan().all()


@pytest.mark.parametrize("make", ["int8_of", "int4_of"])
def test_matrices_rounded_on_the_device_keep_their_values(make: str) -> None:
    from outrider.ops.cuda import quantised_matrix

    weight = torch.randn(96, INNER, device=DEVICE) * INNER**-0.5
    w, x = getattr(quantised_matrix, make)(weight), torch.randn(4, INNER, device=DEVICE).bfloat16()
    want = x.double() @ weight.double().T
    assert (product(kernels(), x, w) - want).norm() / want.norm() < {"int8_of": 0.02, "int4_of": 0.12}[make]


def test_four_bit_floats_are_decoded_exactly() -> None:
    from outrider.model.formats.bits import E2M1
    from outrider.ops.cuda.quantised_matrix import interpreted
    from tests.gpu.decoding import decode_mxfp4

    packed = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    low, high = (torch.empty(256, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    decode_mxfp4[(1,)](packed, low, high, not interpreted())
    table = E2M1.bfloat16()
    assert torch.equal(low.cpu(), table[packed.cpu().int() & 15])
    assert torch.equal(high.cpu(), table[packed.cpu().int() >> 4])
