"""Falcon: multi-query (7B) or grouped (40B, 180B, 2) attention in parallel with an ungated MLP."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_FIELDS = (("ffn", "ffn_hidden_size"), ("activation", "activation"), ("kv_heads", "num_kv_heads"))


def _compile(sizes: Sizes) -> ModelSpec:
    fields = sizes.fields
    if fields.boolean("alibi", False):
        raise fields.error("alibi (positions as a bias on the scores) is not supported")
    norm, grouped = Norm("layer", sizes.eps("layer_norm_epsilon", 1e-5), bias=True), _grouped(sizes)
    kv_heads = sizes.kv_heads if grouped else 1 if fields.boolean("multi_query", True) else sizes.heads
    bias, parallel = fields.boolean("bias", False), grouped or fields.boolean("parallel_attn", True)
    two_norms = not parallel or (grouped and fields.integer("num_ln_in_parallel_attn", 1, 2, 2) == 2)
    attention = sizes.attention(kv_heads=kv_heads, rope=sizes.rope(), bias=bias, out_bias=bias)
    activation = sizes.activation if "activation" in fields else "gelu"
    mlp = sizes.mlp(activation=activation, gated=False, bias=bias)
    layer = LayerSpec(attention, mlp, norm, norm if two_norms else None, parallel=parallel)
    tied = fields.boolean("tie_word_embeddings", True)
    return sizes.model("falcon", [layer] * sizes.layers, norm=norm, tied=tied)


def _grouped(sizes: Sizes) -> bool:
    return sizes.fields.boolean("new_decoder_architecture", False)


def _names(spec: ModelSpec) -> Names:
    """Rows of q, k and v lie by group of heads, unless one head of keys serves all; norms by where they stand."""
    layer = spec.layers[0]
    two_in_parallel = layer.parallel and layer.norm_mlp is not None
    norms = {"norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    if two_in_parallel:
        norms = {"norm_in": "ln_attn", "norm_mlp": "ln_mlp"}
    products = {
        "qkv": "self_attention.query_key_value", "out": "self_attention.dense",
        "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    return Names(
        products | norms, layer="transformer.h.{}.", embedding="transformer.word_embeddings", norm="transformer.ln_f",
        qkv_by_head=spec.kv_heads > 1,
    )  # fmt: skip


FAMILY = Family("falcon", "Falcon 7B, 40B, 180B, Falcon 2", ("FalconForCausalLM",), _compile, _names, _FIELDS, 4)
