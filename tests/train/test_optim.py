"""Muon and who gets it; the attention that training uses."""

from __future__ import annotations

import pytest
import torch

from outrider.train.attention import causal_attend
from outrider.train.optim import Muon, OptimOptions, build_optimizers, orthogonalise, scale_rates
from outrider.train.shapes import DecoderShape, new_decoder

SHAPE = DecoderShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, context=16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 40, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(stack))
    assert values.max() < 1.25
    assert values.median() > 0.6


def test_fused_parts_are_orthogonalised_apart() -> None:
    decoder = new_decoder(SHAPE.config(0), 0, CPU)
    generator = torch.Generator().manual_seed(1)
    muon = build_optimizers(decoder, OptimOptions(weight_decay=0.0, lr=1.0))[1]
    assert isinstance(muon, Muon)
    before = decoder.layers[0].qkv.detach().clone()
    for param in decoder.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    muon.step()
    moved = before - decoder.layers[0].qkv.detach()
    for part in moved.split([32, 16, 16]):
        assert torch.linalg.svdvals(part).max() < 1.25
    assert torch.linalg.svdvals(moved).max() > 1.25


def test_every_parameter_has_one_optimiser() -> None:
    decoder = new_decoder(SHAPE.config(0), 0, CPU)
    for kind in ("muon", "adamw"):
        optimizers = build_optimizers(decoder, OptimOptions(kind))
        owned = [id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]
        assert sorted(owned) == sorted(id(param) for param in decoder.parameters())


def test_rates_scale_from_their_peak() -> None:
    optimizers = build_optimizers(new_decoder(SHAPE.config(0), 0, CPU), OptimOptions(lr=0.1, adam_lr=0.01))
    for factor in (0.5, 0.25):
        scale_rates(optimizers, factor)
        assert [o.param_groups[0]["lr"] for o in optimizers] == [0.01 * factor, 0.1 * factor]


def test_training_attention_is_causal_within_each_row() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, context, heads, kv_heads, width = 3, 7, 4, 2, 8
    q = torch.randn(rows * context, heads, width, generator=generator)
    k, v = (torch.randn(rows * context, kv_heads, width, generator=generator) for _ in range(2))
    out = causal_attend(rows, context)(0, q, k, v)
    for row in range(rows):
        for t in range(context):
            at = row * context + t
            seen = slice(row * context, at + 1)
            for head in range(heads):
                weights = torch.softmax(k[seen, head // 2] @ q[at, head] / width**0.5, 0)
                torch.testing.assert_close(out[at, head], weights @ v[seen, head // 2], atol=1e-5, rtol=1e-5)
