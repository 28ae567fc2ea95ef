"""Embeddings that the core reads from packed matrices: the values of every kind of weights, on every build."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.model import Feed
from outrider.ops import Core, Grouped, PackedLinear, Stack, find_core
from tests.support.native import make_decoder, make_runner

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])
SIZES = [48, 250]  # values of a row: the last block is filled up, or not


def rows_of(core: Core, embedding: PackedLinear, scale: float = 1.0) -> Tensor:
    """Every row of an embedding as it enters the first layer."""
    tokens = list(range(embedding.columns))
    runner = make_runner(core, make_decoder("float32", vocab=len(tokens), hidden=embedding.inner))
    assert runner.stack is not None
    weights, pool = runner.stack._weights, runner.pool
    runner.stack = Stack(
        core, weights._replace(embedding=embedding, embedding_scale=scale), pool.keys, pool.values, pool.page_size
    )
    return runner.forward([Feed(range(14), 0, tokens)], taps=(0,)).taps[0]


@pytest.mark.parametrize("inner", SIZES)
@pytest.mark.parametrize("pack_12bit", [False, True])
def test_floats(core: Core, inner: int, pack_12bit: bool) -> None:
    weight = torch.randn(97, inner)
    assert torch.equal(rows_of(core, PackedLinear(core, "float32", weight)), weight)
    halves = weight.bfloat16()
    halves[::5, ::7] *= 2.0**-90  # blocks with other high bytes
    packed = PackedLinear(core, "bfloat16", halves, pack_12bit=pack_12bit)
    assert torch.equal(rows_of(core, packed), halves.float())
    assert torch.equal(rows_of(core, packed, 3.0), halves.float() * 3.0)


def test_blocks_that_escape(core: Core) -> None:
    """12-bit packing with a few blocks stored raw, at the ends of panels and inside."""
    weight = torch.randn(97, 512).bfloat16()
    for row, column in ((0, 0), (15, 511), (16, 0), (40, 255), (96, 511)):
        weight[row, column] = 1e30
    packed = PackedLinear(core, "bfloat16", weight)
    assert len(packed._packed.raw_blocks) > 0 or not core.packs_12bit
    assert torch.equal(rows_of(core, packed), weight.float())


@pytest.mark.parametrize("inner", SIZES)
def test_int8(core: Core, inner: int) -> None:
    weight = torch.randn(97, inner)
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert torch.equal(rows_of(core, PackedLinear(core, "int8", weight)), (weight / scale).round() * scale)


@pytest.mark.grid
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [16, 48, 4096])
@pytest.mark.parametrize("inner", SIZES)
def test_integers_in_groups(core: Core, inner: int, size: int, bits: int, least: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    shape = 97, -(-inner // size)
    scale = (torch.rand(shape, generator=generator) / 8).half().float()
    subtracted = (scale * 5).half().float() if least else None
    codes = torch.randint(0, 2**bits, (97, inner), generator=generator, dtype=torch.uint8)
    matrix = Grouped(codes, scale, subtracted, 0 if least else 2 ** (bits - 1), bits, size)
    assert torch.equal(rows_of(core, PackedLinear(core, "bfloat16", matrix)), matrix.values())
