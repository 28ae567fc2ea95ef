"""Blocks of GGUF types that the core packs from where they lie, against the same blocks as torch packs their integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.model.formats.gguf_blocks import INTEGERS
from outrider.ops import BLOCK_FORMS, Core, Grouped, PackedLinear, StoredBlocks, find_core
from outrider.ops.groups import packed
from tests.support.gguf_files import K_QUANTS, random_blocks

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])
INNER = 512


def raw_blocks(kind: str, columns: int, seed: int) -> Any:
    """The bytes of a random matrix, (columns, bytes of a column)."""
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the blocks")
    if kind in K_QUANTS:
        return random_blocks(kind, columns * INNER // 256, seed).reshape(columns, -1)
    values = np.random.default_rng(seed).standard_normal((columns, INNER), dtype=np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def matrices(kind: str, columns: int, seed: int = 0) -> tuple[StoredBlocks, Grouped]:
    """A matrix as its blocks, and as the integers that the definition reads."""
    import gguf

    raw, form = np.ascontiguousarray(raw_blocks(kind, columns, seed)), BLOCK_FORMS[kind]
    assert form.number == gguf.GGMLQuantizationType[kind]
    address = raw.ctypes.data + torch.arange(columns) * raw.shape[1]
    blocks = INTEGERS[kind](raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]))
    codes, scale = (torch.from_numpy(part.reshape(columns, -1)) for part in (blocks.codes, blocks.scale))
    least = None if blocks.least is None else torch.from_numpy(blocks.least.reshape(columns, -1))
    grouped = Grouped(codes, scale, least, blocks.offset, form.bits, INNER // scale.shape[1])
    return StoredBlocks(address, torch.full((columns,), form.number), INNER, (raw,)), grouped


def assert_packed_alike(core: Core, blocks: StoredBlocks, grouped: Grouped) -> None:
    linear = PackedLinear(core, "bfloat16", blocks)
    weights, power = packed(grouped, linear.columns_in_panels())
    assert (blocks.bits, blocks.size, blocks.offset, blocks.has_least) == (
        grouped.bits, grouped.size, grouped.offset, grouped.has_least
    )  # fmt: skip
    assert torch.equal(linear._packed.weights, weights)
    assert torch.equal(linear._packed.scale, power)


@pytest.mark.parametrize("kind", BLOCK_FORMS)
def test_every_type(core: Core, kind: str) -> None:
    blocks, grouped = matrices(kind, 37)
    assert_packed_alike(core, blocks, grouped)
    order = torch.randperm(37)
    assert_packed_alike(core, blocks.rows(order), grouped.rows(order))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q8_0", "Q6_K"), ("Q5_K", "Q8_0"), ("Q4_0", "Q4_0")]
)
def test_several_types_in_one_matrix(core: Core, kinds: tuple[str, ...]) -> None:
    """As of queries, keys and values."""
    parts = [matrices(kind, 20 + 4 * i, i) for i, kind in enumerate(kinds)]
    blocks, grouped = StoredBlocks.joined([part[0] for part in parts]), Grouped.joined([part[1] for part in parts])
    assert blocks is not None
    assert grouped is not None
    assert_packed_alike(core, blocks, grouped)
    assert StoredBlocks.joined([parts[0][0], parts[1][0]._replace(inner=256)]) is None
