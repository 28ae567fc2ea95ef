"""Builds for different instructions against each other, by results that were recorded once: x86-64 and ARM give the same bits.

Products of bf16 are left out: processors round them in their own ways.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.model import Feed
from outrider.ops import Core, Epilogue, Grouped, PackedLinear, find_core
from tests.support.native import PAGES, TREE, make_decoder, make_runner

pytestmark = pytest.mark.skipif(find_core()[0] is None, reason=find_core()[1])

RECORDED = {
    "float32 none": "2093a44520c1",
    "float32 silu": "7258fc7f3f72",
    "float32 gelu": "ba020a6a3f50",
    "float32 gelu_tanh": "3738376a3d6d",
    "int8 none": "46e0ece93361",
    "int8 silu": "e390881761bd",
    "int8 gelu": "927137cbae9f",
    "int8 gelu_tanh": "f9a3a1a592dd",
    "4 bits": "70d1c79673b9",
    "4 bits, least": "094f3893a435",
    "8 bits": "1ac4b4c35aa5",
    "8 bits, least": "a2322842c71d",
    "forwards": ["6d789fca1737", "6792b397cd72"],
}


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Float32 numbers between -1 and 1 that are the same on every machine."""
    steps = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(2862933555777941757 + 2 * seed)
    mixed = (steps ^ (steps >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(40)
    return torch.from_numpy((mixed.astype(np.float32) / 2**23 - 1.0).reshape(shape))


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:12]


def matrix(bits: int, least: bool) -> Grouped:
    """Groups of 32 with scales that float16 holds."""
    codes = ((numbers(96, 512, seed=bits) + 1.0) * 2 ** (bits - 1)).to(torch.uint8)
    scale = (numbers(96, 16, seed=9) * 0.01).half().float()
    return Grouped(codes, scale, (scale * 3).half().float() if least else None, 0 if least else 2 ** (bits - 1), bits, 32)


@pytest.mark.parametrize("then", ["none", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_products(core: Core, kind: str, then: str) -> None:
    weight, bias, x = numbers(96, 512), numbers(96, seed=2), numbers(19, 512, seed=3)
    epilogue = Epilogue() if then == "none" else Epilogue(then, paired=then == "silu")
    assert digest(PackedLinear(core, kind, weight, bias, epilogue)(x)) == RECORDED[f"{kind} {then}"]


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_groups(core: Core, bits: int, least: bool) -> None:
    got = PackedLinear(core, "int8", matrix(bits, least), numbers(96, seed=2))(numbers(19, 512, seed=3))
    assert digest(got) == RECORDED[f"{bits} bits{', least' if least else ''}"]


def test_forwards(core: Core) -> None:
    """A prompt and a tree. Rotary tables come from torch, whose cosines differ in their last bits."""
    decoder = make_decoder("float32", hidden=128, ffn=192, heads=4, head_dim=32)
    for seed, parameter in enumerate(decoder.parameters()):
        scale = 0.3 if parameter.dim() == 1 else 2 * parameter.shape[1] ** -0.5
        parameter.copy_(numbers(*parameter.shape, seed=seed) * scale + (parameter.dim() == 1))
    for table in decoder.ropes:
        table.cos.copy_((table.cos * 1024).round() / 1024)
        table.sin.copy_((table.sin * 1024).round() / 1024)
    runner = make_runner(core, decoder)
    tokens, parents = zip(*TREE, strict=True)
    prompt = runner.forward([Feed(PAGES, 0, [i * 37 % 97 for i in range(60)])], wanted=range(60)).logits
    tree = runner.forward([Feed(PAGES, 60, [5], tokens, parents)], wanted=range(11)).logits
    assert prompt is not None
    assert tree is not None
    assert [digest(prompt), digest(tree)] == RECORDED["forwards"]
