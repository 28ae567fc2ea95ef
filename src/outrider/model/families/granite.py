"""Granite 3 and MiniCPM: Llama layers with multipliers of embedding, residual, attention and logits."""

from __future__ import annotations

import math

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import FeedForward, LayerSpec, ModelSpec, Norm

__all__ = ["GRANITE", "MINICPM", "granite_model"]


def _granite(sizes: Sizes) -> ModelSpec:
    return granite_model(sizes, "granite", sizes.mlp(bias=sizes.fields.boolean("mlp_bias", False)))


def granite_model(sizes: Sizes, family: str, mlp: FeedForward) -> ModelSpec:
    """Layers with Granite's multipliers around a feed-forward part."""
    norm, fields = Norm("rms", sizes.eps()), sizes.fields
    bias = fields.boolean("attention_bias", False)
    scale = fields.real("attention_multiplier", 0.0, 1e6, 1.0)
    attention = sizes.attention(rope=sizes.rope(), scale=scale, bias=bias, out_bias=bias)
    layer = LayerSpec(attention, mlp, norm, norm, residual_scale=fields.real("residual_multiplier", 0.0, 1e6, 1.0))
    scales = {
        "embedding_scale": fields.real("embedding_multiplier", 0.0, 1e6, 1.0),
        "logit_scale": 1.0 / fields.real("logits_scaling", 0.0, 1e6, 1.0),
    }
    return sizes.model(family, [layer] * sizes.layers, norm=norm, **scales)


def _minicpm(sizes: Sizes) -> ModelSpec:
    norm, fields = Norm("rms", sizes.eps()), sizes.fields
    depth_scale = fields.real("scale_depth", 0.0, 1e6, math.sqrt(sizes.layers))
    attention, mlp = sizes.attention(rope=sizes.rope()), sizes.mlp()
    layer = LayerSpec(attention, mlp, norm, norm, residual_scale=depth_scale / math.sqrt(sizes.layers))
    base = fields.integer("dim_model_base", 1, 2**17, sizes.hidden)
    scales = {"embedding_scale": fields.real("scale_emb", 0.0, 1e6, 1.0), "logit_scale": base / sizes.hidden}
    return sizes.model("minicpm", [layer] * sizes.layers, norm=norm, **scales)


GRANITE = Family("granite", "Granite 3", ("GraniteForCausalLM",), _granite)
MINICPM = Family("minicpm", "MiniCPM 1/2", ("MiniCPMForCausalLM",), _minicpm)
