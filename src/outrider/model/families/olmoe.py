"""OLMoE: q/k norm over the width, and 64 small experts whose weights are not normalised."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps(default=1e-5))
    if "clip_qkv" in fields:
        raise fields.error("clip_qkv (queries, keys and values cut at a limit) is not supported")
    bias = fields.boolean("attention_bias", False)
    attention = sizes.attention(rope=sizes.rope(), qk_norm=QKNorm(norm, over="width"), bias=bias, out_bias=bias)
    mlp = sizes.mlp(router=sizes.router(normalised=fields.boolean("norm_topk_prob", False)))
    return sizes.model("olmoe", [LayerSpec(attention, mlp, norm, norm)] * sizes.layers, norm=norm)


FAMILY = Family("olmoe", "OLMoE-1B-7B", ("OlmoeForCausalLM",), _compile)
