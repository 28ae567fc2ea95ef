"""OPT: learned positions that start at row 2, layer norms before the parts, relu."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, LearnedPositions, ModelSpec, Norm

__all__ = ["FAMILY"]

_NAMES = Names(
    {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.out_proj",
        "up": "fc1", "down": "fc2", "norm_in": "self_attn_layer_norm", "norm_mlp": "final_layer_norm",
    },
    layer="model.decoder.layers.{}.", embedding="model.decoder.embed_tokens", positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
)  # fmt: skip
_FIELDS = (("ffn", "ffn_dim"), ("activation", "activation_function"))


def _compile(sizes: Sizes) -> ModelSpec:
    fields = sizes.fields
    if not fields.boolean("do_layer_norm_before", True) or fields.boolean("_remove_final_layer_norm", False):
        raise fields.error("do_layer_norm_before=false (norms after the residual sum, as in OPT-350M) is not supported")
    if fields.integer("word_embed_proj_dim", 1, 2**17, sizes.hidden) != sizes.hidden:
        raise fields.error("word_embed_proj_dim (a projection of the embedding, as in OPT-350M) is not supported")
    bias, affine = fields.boolean("enable_bias", True), fields.boolean("layer_norm_elementwise_affine", True)
    if not affine:
        raise fields.error("layer_norm_elementwise_affine=false is not supported")
    norm = Norm("layer", 1e-5, bias=True)
    activation = sizes.activation if "activation_function" in fields else "relu"
    mlp = sizes.mlp(activation=activation, gated=False, bias=bias)
    layer = LayerSpec(sizes.attention(kv_heads=sizes.heads, bias=bias, out_bias=bias), mlp, norm, norm)
    positions, tied = LearnedPositions(sizes.context + 2, 2), fields.boolean("tie_word_embeddings", True)
    return sizes.model("opt", [layer] * sizes.layers, norm=norm, tied=tied, positions=positions)


FAMILY = Family("opt", "OPT", ("OPTForCausalLM",), _compile, _NAMES, _FIELDS)
