"""OLMo 1: layer norms without weights. OLMo 2 and 3: norms after the parts, q/k norm over the width; 3 has windows."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import AFTER_PARTS, LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes, alternating
from outrider.model.rotary import Rope
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["OLMO", "OLMO2", "OLMO3"]


def _olmo(sizes: Sizes) -> ModelSpec:
    if "clip_qkv" in sizes.fields:
        raise sizes.fields.error("clip_qkv (queries, keys and values cut at a limit) is not supported")
    norm = Norm("layer", 1e-5)
    bias = sizes.fields.boolean("attention_bias", False)
    attention = sizes.attention(rope=sizes.rope(), bias=bias, out_bias=bias)
    layer = LayerSpec(attention, sizes.mlp(), norm, norm)
    return sizes.model("olmo", [layer] * sizes.layers, norm=norm)


def _after(sizes: Sizes) -> ModelSpec:
    """OLMo 2 and 3."""
    norm, third = Norm("rms", sizes.eps(default=1e-5)), sizes.architecture == "Olmo3ForCausalLM"
    kinds = (sizes.kinds() or alternating(sizes.layers, 4)) if third else ["full_attention"] * sizes.layers
    bias = sizes.fields.boolean("attention_bias", False)
    layers = []
    for kind, window in zip(kinds, sizes.windows(kinds, 4096 if third else None), strict=True):
        options = {"qk_norm": QKNorm(norm, over="width"), "bias": bias, "out_bias": bias}
        attention = sizes.attention(rope=_rope(sizes, kind), window=window, **options)
        layers.append(LayerSpec(attention, sizes.mlp(), None, None, norm, norm))
    return sizes.model("olmo3" if third else "olmo2", layers, norm=norm)


def _rope(sizes: Sizes, kind: str) -> Rope:
    """OLMo 3 stretches the rotary of full layers alone."""
    by_kind = sizes.fields.nested("rope_parameters")
    if kind in by_kind:
        return sizes.rope(by_kind.nested(kind))
    rope = sizes.rope()
    return Rope(theta=rope.theta, context=rope.context) if kind == "sliding_attention" else rope


OLMO = Family("olmo", "OLMo 1", ("OlmoForCausalLM",), _olmo, Names(without(LLAMA_PARTS, "norm_in", "norm_mlp"), norm=""))
OLMO2 = Family("olmo2", "OLMo 2", ("Olmo2ForCausalLM",), _after, Names(AFTER_PARTS))
OLMO3 = Family("olmo3", "OLMo 3", ("Olmo3ForCausalLM",), _after, Names(AFTER_PARTS))
