"""The packed layout against its description in ops/packing.py, undone here in torch: every weight is where the core reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.ops.native import find_core
from outrider.ops.packing import Packed, pack

CORE = find_core()[0]
pytestmark = pytest.mark.skipif(CORE is None, reason="the native core is not built")
SHAPES = [(96, 64, False), (90, 50, True), (33, 7, False), (16, 1000, True), (256, 600, True), (130, 333, False)]


def matrix(columns: int, inner: int, dtype: torch.dtype, wild: bool) -> Tensor:
    """Random weights; wild ones have all exponents, so that many blocks escape."""
    generator = torch.Generator().manual_seed(columns + inner)
    weight = torch.randn(columns, inner, generator=generator)
    if wild:
        weight *= torch.exp(torch.randn(columns, inner, generator=generator) * 8)
        weight[3] = 0
    return weight.to(dtype)


def raw_blocks(packed: Packed) -> Tensor:
    """(panels, blocks, 256) bytes, decoded where they are packed to 12 bits."""
    panels, blocks = packed.panels, packed.steps // 4
    if not packed.high.numel():
        return packed.weights.view(panels, blocks, 256)
    stream = packed.weights.view(panels, blocks, 3, 64)
    codes = torch.stack((stream[:, :, 2] & 15, stream[:, :, 2] >> 4), 2)
    assert torch.equal(packed.high.view(4, 16), packed.high[:16].expand(4, 16))
    both = torch.stack((stream[:, :, :2], packed.high[codes.long()]), 4)  # low and high byte of each value
    values = both.view(panels, blocks, 2, 4, 2, 8, 2)  # halves of a block, lanes of 16 bytes, steps, values, bytes
    raw = values.transpose(3, 4).reshape(panels, blocks, 256).clone()
    escaped, raws = packed.escaped.tolist(), iter(packed.raw_blocks.view(-1, 256))
    for panel, first in enumerate(packed.first_escaped.tolist()):
        for block in escaped[first : escaped.index(-1, first)]:
            raw[panel, block] = next(raws)
    return raw


def columns_of(packed: Packed, dtype: torch.dtype, shape: tuple[int, int], paired: bool) -> Tensor:
    """The weights (columns, inner) that a packed matrix holds."""
    words = raw_blocks(packed).reshape(packed.panels, packed.steps, 16, 4).transpose(1, 2).contiguous()
    rows = words.view(dtype).view(packed.panels, 16, -1)
    if paired:
        rows = torch.cat((rows[::2], rows[1::2]))
        return torch.cat([half.reshape(-1, rows.shape[2])[: shape[0] // 2] for half in rows.chunk(2)])[:, : shape[1]]
    return rows.reshape(-1, rows.shape[2])[: shape[0], : shape[1]]


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("columns", "inner", "paired"), SHAPES)
@pytest.mark.parametrize("pack_12bit", [True, False])
def test_floats_keep_their_bits(
    kind: str, source: torch.dtype, columns: int, inner: int, paired: bool, wild: bool, pack_12bit: bool
) -> None:
    assert CORE is not None
    weight, dtype = matrix(columns, inner, source, wild), getattr(torch, kind)
    packed = pack(CORE, kind, weight, torch.arange(float(columns)), paired, pack_12bit)
    assert torch.equal(columns_of(packed, dtype, (columns, inner), paired), weight.to(dtype))
    if not pack_12bit or wild:
        assert not len(packed.high)
    elif kind == "bfloat16" and columns == 256:  # the others are too small for sixteen high bytes to be nearly all
        assert CORE.packs_12bit == bool(len(packed.high))
    biases = packed.bias.view(-1, 2 if paired else 1, 16).transpose(0, 1).flatten(1)
    assert torch.equal(biases[:, : columns // len(biases)].flatten(), torch.arange(float(columns)))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "inner", "paired"), SHAPES)
def test_int8_rounds_to_the_nearest_of_255_steps(source: torch.dtype, columns: int, inner: int, paired: bool) -> None:
    assert CORE is not None
    weight = matrix(columns, inner, source, wild=True)
    packed = pack(CORE, "int8", weight, None, paired, False)
    scale = weight.float().abs().amax(1) / 127
    steps = (weight.float() / scale.where(scale > 0, 1.0)[:, None]).round()
    assert torch.equal(columns_of(packed, torch.uint8, (columns, inner), paired).float() - 128, steps)
    by_panel = (
        packed.scale.view(-1, 2, 16).transpose(0, 1).flatten(1)[:, : columns // 2] if paired else packed.scale[None, :columns]
    )
    assert torch.equal(by_panel.flatten(), scale)


def test_rows_of_a_larger_matrix_and_threads_change_nothing() -> None:
    """The source is read where it lies, whatever its stride; threads share the panels."""
    assert CORE is not None
    whole = matrix(256, 600, torch.bfloat16, wild=False)
    part, threads = whole[:, :512], CORE.threads
    packed = []
    for CORE.threads in (1, 3):
        packed.append(pack(CORE, "bfloat16", part, None, False, True))
    CORE.threads = threads
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*packed, strict=True))
    assert torch.equal(columns_of(packed[0], torch.bfloat16, (256, 512), False), part)


def test_columns_in_another_order() -> None:
    assert CORE is not None
    weight, bias = matrix(96, 64, torch.bfloat16, wild=False), torch.arange(96.0)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    for pack_12bit in (True, False):
        ordered = pack(CORE, "bfloat16", weight, bias, True, pack_12bit, order)
        copied = pack(CORE, "bfloat16", weight[order], bias[order], True, pack_12bit)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(ordered, copied, strict=True))


def test_a_value_that_is_not_finite_spoils_its_column_alone() -> None:
    assert CORE is not None
    weight = matrix(32, 64, torch.float32, wild=False)
    weight[5, 3] = float("nan")
    scale = pack(CORE, "int8", weight, None, False, False).scale
    assert [i for i, value in enumerate(scale.tolist()) if value != value] == [5]
