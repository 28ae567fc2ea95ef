"""Phi-1, 1.5 and 2: attention and MLP in parallel behind one layer norm, biases everywhere, partial rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]

_PARTS = LLAMA_PARTS | {
    "out": "self_attn.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}


def _compile(sizes: Sizes) -> ModelSpec:
    norm = Norm("layer", sizes.eps("layer_norm_eps", 1e-5), bias=True)
    qk_norm = QKNorm(norm) if sizes.fields.boolean("qk_layernorm", False) else None
    attention = sizes.attention(rope=sizes.rope(default_share=0.5), bias=True, out_bias=True, qk_norm=qk_norm)
    layer = LayerSpec(attention, sizes.mlp(gated=False, bias=True), norm, None, parallel=True)
    return sizes.model("phi", [layer] * sizes.layers, norm=norm, output_bias=True)


FAMILY = Family("phi", "Phi-1, Phi-1.5, Phi-2", ("PhiForCausalLM",), _compile, Names(_PARTS, norm="model.final_layernorm"))
