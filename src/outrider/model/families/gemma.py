"""Gemma 1, 2 and 3 (text): norms stored as weight - 1, scaled embeddings; from 2 on norms around both parts and soft caps."""

from __future__ import annotations

import math

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names
from outrider.model.families.reading import Sizes, alternating
from outrider.model.rotary import Rope
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["GEMMA", "GEMMA2", "GEMMA3"]

_SANDWICH = LLAMA_PARTS | {
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}


def _gemma(sizes: Sizes) -> ModelSpec:
    norm, mlp = Norm("rms", sizes.eps()), sizes.mlp(activation="gelu_tanh")
    attention = sizes.attention(rope=sizes.rope(), bias=sizes.fields.boolean("attention_bias", False))
    layers = [LayerSpec(attention, mlp, norm, norm)] * sizes.layers
    return sizes.model("gemma", layers, norm=norm, tied=True, embedding_scale=math.sqrt(sizes.hidden))


def _sandwich(sizes: Sizes) -> ModelSpec:
    """Gemma 2 and 3."""
    fields, third = sizes.fields, sizes.architecture.startswith("Gemma3")
    norm = Norm("rms", sizes.eps())
    kinds = sizes.kinds() or alternating(sizes.layers, fields.integer("sliding_window_pattern", 1, 1024, 6 if third else 2))
    local, full = _ropes(sizes) if third else (sizes.rope(), sizes.rope())
    attention = {
        "scale": fields.real("query_pre_attn_scalar", 0.0, 1e9, 256.0) ** -0.5,
        "bias": fields.boolean("attention_bias", False),
        "qk_norm": QKNorm(norm) if third else None,
        "soft_cap": fields.optional_real("attn_logit_softcapping", None if third else 50.0),
    }
    mlp = sizes.mlp(activation="gelu_tanh")
    layers = []
    for kind, window in zip(kinds, sizes.windows(kinds, 4096), strict=True):
        rope = local if kind == "sliding_attention" else full
        layers.append(LayerSpec(sizes.attention(rope=rope, window=window, **attention), mlp, norm, norm, norm, norm))
    cap = fields.optional_real("final_logit_softcapping", None if third else 30.0)
    scale, family = math.sqrt(sizes.hidden), "gemma3" if third else "gemma2"
    return sizes.model(family, layers, norm=norm, tied=True, embedding_scale=scale, logit_cap=cap)


def _ropes(sizes: Sizes) -> tuple[Rope, Rope]:
    """Rotary settings of sliding and of full layers."""
    by_kind = sizes.fields.nested("rope_parameters")
    if "full_attention" in by_kind:
        parts = (by_kind.nested("sliding_attention"), by_kind.nested("full_attention"))
        return sizes.rope(parts[0], 1e4), sizes.rope(parts[1], 1e6)
    local = sizes.fields.real("rope_local_base_freq", 0.0, 1e30, 1e4)
    return Rope(theta=local, context=sizes.context), sizes.rope(default_theta=1e6)


GEMMA = Family("gemma", "Gemma 1", ("GemmaForCausalLM",), _gemma, Names(norm_offset=1.0))
GEMMA2 = Family("gemma2", "Gemma 2", ("Gemma2ForCausalLM",), _sandwich, Names(_SANDWICH, norm_offset=1.0))
GEMMA3 = Family("gemma3", "Gemma 3", ("Gemma3ForCausalLM",), _sandwich, Names(_SANDWICH, norm_offset=1.0))
