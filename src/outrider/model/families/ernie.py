"""Ernie 4.5 (dense): Llama layers with interleaved rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    norm, bias = Norm("rms", sizes.eps(default=1e-5)), sizes.fields.boolean("use_bias", False)
    rope = sizes.rope(default_theta=5e5, interleaved=True)
    layer = LayerSpec(sizes.attention(rope=rope, bias=bias, out_bias=bias), sizes.mlp(bias=bias), norm, norm)
    return sizes.model("ernie4_5", [layer] * sizes.layers, norm=norm, tied=sizes.fields.boolean("tie_word_embeddings", True))


FAMILY = Family("ernie4_5", "Ernie 4.5 dense", ("Ernie4_5ForCausalLM",), _compile)
