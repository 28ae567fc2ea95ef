"""Seed-OSS: Llama layers with a bias on q, k and v."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps())
    biases = {"bias": fields.boolean("attention_bias", True), "out_bias": fields.boolean("attention_out_bias", False)}
    layer = LayerSpec(sizes.attention(rope=sizes.rope(), **biases), sizes.mlp(bias=fields.boolean("mlp_bias", False)), norm, norm)
    return sizes.model("seed_oss", [layer] * sizes.layers, norm=norm)


FAMILY = Family("seed_oss", "Seed-OSS", ("SeedOssForCausalLM",), _compile)
