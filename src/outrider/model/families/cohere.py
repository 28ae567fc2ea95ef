"""Cohere Command R and R7B: attention and MLP in parallel, layer norms without bias, scaled logits, interleaved rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes, alternating
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["COHERE", "COHERE2"]


def _compile(sizes: Sizes) -> ModelSpec:
    """Full layers of Cohere2 have no rotary."""
    fields, second = sizes.fields, sizes.architecture == "Cohere2ForCausalLM"
    norm, rope = Norm("layer", sizes.eps("layer_norm_eps", 1e-5)), sizes.rope(interleaved=True)
    bias = fields.boolean("attention_bias", False)
    qk_norm = QKNorm(norm, shared=False) if fields.boolean("use_qk_norm", False) and not second else None
    every = fields.integer("sliding_window_pattern", 1, 1024, 4)
    kinds = (sizes.kinds() or alternating(sizes.layers, every)) if second else ["full_attention"] * sizes.layers
    layers = []
    for kind, window in zip(kinds, sizes.windows(kinds, 4096 if second else None), strict=True):
        turned = None if second and kind == "full_attention" else rope
        attention = sizes.attention(rope=turned, window=window, qk_norm=qk_norm, bias=bias, out_bias=bias)
        layers.append(LayerSpec(attention, sizes.mlp(), norm, None, parallel=True))
    scale, tied = fields.real("logit_scale", 0.0, 1e6, 0.0625), fields.boolean("tie_word_embeddings", True)
    return sizes.model("cohere2" if second else "cohere", layers, norm=norm, logit_scale=scale, tied=tied)


COHERE = Family("cohere", "Command R, R+, Aya 23", ("CohereForCausalLM",), _compile)
COHERE2 = Family("cohere2", "Command R7B, Command A", ("Cohere2ForCausalLM",), _compile)
