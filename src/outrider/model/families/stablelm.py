"""StableLM: layer norms, a quarter of each head turns, optionally a parallel block and norms of every head."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]

_PARTS = LLAMA_PARTS | {"q_norm": "self_attn.q_layernorm.norms.{}", "k_norm": "self_attn.k_layernorm.norms.{}"}


def _compile(sizes: Sizes) -> ModelSpec:
    fields, eps = sizes.fields, sizes.eps("layer_norm_eps", 1e-5)
    norm, parallel = Norm("layer", eps, bias=True), fields.boolean("use_parallel_residual", False)
    qk_norm = QKNorm(Norm("layer", eps), shared=False) if fields.boolean("qk_layernorm", False) else None
    bias = fields.boolean("use_qkv_bias", False)
    attention = sizes.attention(rope=sizes.rope(default_share=0.25), bias=bias, qk_norm=qk_norm)
    layer = LayerSpec(attention, sizes.mlp(), norm, None if parallel else norm, parallel=parallel)
    return sizes.model("stablelm", [layer] * sizes.layers, norm=norm)


FAMILY = Family("stablelm", "StableLM 2, StableLM 3B", ("StableLmForCausalLM",), _compile, Names(_PARTS))
