"""GPT-NeoX and Pythia: fused q, k and v head by head, partial rotary, a parallel block with two norms."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_NAMES = Names(
    {
        "qkv": "attention.query_key_value", "out": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
        "norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm",
    },
    layer="gpt_neox.layers.{}.", embedding="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm", output="embed_out",
    qkv_by_head=True, ignored=(".attention.bias", ".attention.masked_bias"),
)  # fmt: skip


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("layer", sizes.eps("layer_norm_eps", 1e-5), bias=True)
    theta = fields.real("rotary_emb_base", 0.0, 1e30, 1e4)
    rope = sizes.rope(default_theta=theta, default_share=fields.real("rotary_pct", 0.0, 1.0, 0.25))
    bias, activation = fields.boolean("attention_bias", True), sizes.activation if "hidden_act" in fields else "gelu"
    mlp = sizes.mlp(activation=activation, gated=False, bias=True)
    parallel = fields.boolean("use_parallel_residual", True)
    layer = LayerSpec(
        sizes.attention(kv_heads=sizes.heads, rope=rope, bias=bias, out_bias=bias), mlp, norm, norm, parallel=parallel
    )
    return sizes.model("gpt_neox", [layer] * sizes.layers, norm=norm)


FAMILY = Family("gpt_neox", "GPT-NeoX, Pythia", ("GPTNeoXForCausalLM",), _compile, _NAMES)
