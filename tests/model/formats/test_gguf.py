"""GGUF models against Transformers with the same dequantised weights, and block types against the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.gguf.kinds import KINDS
from outrider.model import Feed, LoadOptions, Runner, load_decoder
from outrider.model.formats.gguf_blocks import FLOATS, INTEGERS, decoded, rounded_to_bfloat16
from outrider.ops import Blocked
from tests.support import make_pool
from tests.support.families import VOCAB, build_reference
from tests.support.gguf_files import K_QUANTS, write_gguf

gguf = pytest.importorskip("gguf", reason="the gguf package is the oracle")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = [
    "llama", "llama-3", "llama-biased", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen3", "qwen3-yarn", "gemma",
    "gemma2", "gemma3", "phi3", "phi3-longrope", "phi4-mini", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss",
]  # fmt: skip
OTHER_SIZES = {
    **{family: {"query_pre_attn_scalar": 16} for family in ("gemma2", "gemma3")},  # the head's width, but in the largest models
    "phi3-longrope": {"hidden_size": 40, "head_dim": 10},
    "phi4-mini": {"hidden_size": 80},
    "qwen2-moe": {"mlp_only_layers": []},
}
PAGES = list(range(20))


def expected(reference: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def served(path: Path, tokens: list[int]) -> Tensor:
    runner = Runner(decoder := load_decoder(path, LoadOptions("float32")), make_pool(decoder, pages=40), Blocked())
    feed = Feed(PAGES, 0, tokens, rotary_start=decoder.rotary_start(len(tokens)))
    return runner.logits(runner.forward([feed]).last, range(len(tokens)))


def test_block_sizes_are_those_of_the_package() -> None:
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in KINDS.items()} == {n: size for n, size in sizes.items() if n in KINDS}
    assert set(KINDS) <= set(sizes)


@pytest.mark.parametrize("kind", [*FLOATS, *INTEGERS])
def test_blocks_are_decoded_bit_for_bit(kind: str) -> None:
    """Random bits, so every scale, sign, infinity and NaN occurs."""
    size = next(k for k in KINDS.values() if k.name == kind)
    raw = np.random.default_rng(len(kind)).integers(0, 256, (3000, size.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(3000, -1)
        got = decoded(kind, raw)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert got.shape == (3000, size.values)
    assert same.all()


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 400_000, dtype=np.uint32)
    bits[:8] = [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x80000001]
    values = bits.view(np.float32)
    want = torch.from_numpy(values).bfloat16()
    got = torch.from_numpy(rounded_to_bfloat16(values)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    reference = build_reference(family, None, **SIZES | OTHER_SIZES.get(family, {}))
    write_gguf(tmp_path / "model.gguf", reference, "F32")
    text = [i * 37 % VOCAB for i in range(90)]
    torch.testing.assert_close(served(tmp_path / "model.gguf", text), expected(reference, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS])
def test_types_have_the_logits_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    reference = build_reference("llama", None, **(LARGE if kind in K_QUANTS else SIZES))
    write_gguf(tmp_path / "model.gguf", reference, kind)
    text = [i * 37 % VOCAB for i in range(40)]
    torch.testing.assert_close(served(tmp_path / "model.gguf", text), expected(reference, text), atol=1e-4, rtol=0)
