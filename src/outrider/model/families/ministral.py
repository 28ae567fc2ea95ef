"""Ministral 8B (windows) and Ministral 3 (YaRN, queries that grow with the position)."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import MAX_CONTEXT, Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["MINISTRAL", "MINISTRAL3"]


def _compile(sizes: Sizes) -> ModelSpec:
    third, scaling = sizes.architecture == "Ministral3ForCausalLM", sizes.fields.nested("rope_parameters")
    norm = Norm("rms", sizes.eps(default=1e-5))
    original = scaling.integer("original_max_position_embeddings", 1, MAX_CONTEXT, 16384)
    growth = (scaling.real("llama_4_scaling_beta", -1.0, 1e6, 0.1), original) if third else None
    rope = sizes.rope(default_theta=1e6 if third else 1e4, query_growth=growth)
    windows = sizes.windows(["sliding_attention"] * sizes.layers)
    layers = [LayerSpec(sizes.attention(rope=rope, window=window), sizes.mlp(), norm, norm) for window in windows]
    return sizes.model("ministral3" if third else "ministral", layers, norm=norm)


MINISTRAL = Family("ministral", "Ministral 8B", ("MinistralForCausalLM",), _compile)
MINISTRAL3 = Family("ministral3", "Ministral 3", ("Ministral3ForCausalLM",), _compile)
