"""GPT-2 (transposed matrices) and GPT-BigCode, the first StarCoder (one head of keys): learned positions."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, LearnedPositions, ModelSpec, Norm

__all__ = ["BIGCODE", "GPT2"]

_FIELDS = (
    ("hidden", "n_embd"), ("layers", "n_layer"), ("heads", "n_head"), ("ffn", "n_inner"), ("context", "n_positions"),
    ("activation", "activation_function"),
)  # fmt: skip
_PARTS = {
    "qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj", "norm_in": "ln_1", "norm_mlp": "ln_2",
}  # fmt: skip
_PLACES = {
    "layer": "transformer.h.{}.", "embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f",
    "ignored": (".attn.bias", ".attn.masked_bias"),
}  # fmt: skip


def _compile(sizes: Sizes) -> ModelSpec:
    fields, bigcode = sizes.fields, sizes.architecture == "GPTBigCodeForCausalLM"
    if fields.boolean("add_cross_attention", False):
        raise fields.error("add_cross_attention is not supported: the model is one half of an encoder-decoder")
    norm = Norm("layer", sizes.eps("layer_norm_epsilon", 1e-5), bias=True)
    kv_heads = 1 if bigcode and fields.boolean("multi_query", True) else sizes.heads
    scaled = fields.boolean("scale_attn_weights", True)
    by_layer = fields.boolean("scale_attn_by_inverse_layer_idx", False) and not bigcode
    activation = sizes.activation if "activation_function" in fields else "gelu_tanh"
    layers = []
    for i in range(sizes.layers):
        scale = (sizes.head_dim**-0.5 if scaled else 1.0) / (i + 1 if by_layer else 1)
        attention = sizes.attention(kv_heads=kv_heads, scale=scale, bias=True, out_bias=True)
        layers.append(LayerSpec(attention, sizes.mlp(activation=activation, gated=False, bias=True), norm, norm))
    tied = fields.boolean("tie_word_embeddings", True)
    return sizes.model(
        "gpt_bigcode" if bigcode else "gpt2", layers, norm=norm, tied=tied, positions=LearnedPositions(sizes.context)
    )


def _bigcode_names(spec: ModelSpec) -> Names:
    """With many heads of keys, rows of q, k and v lie head by head."""
    return Names(_PARTS, qkv_by_head=spec.kv_heads > 1, **_PLACES)  # type: ignore[arg-type]


GPT2 = Family("gpt2", "GPT-2", ("GPT2LMHeadModel",), _compile, Names(_PARTS, transposed=True, **_PLACES), _FIELDS, 4)  # type: ignore[arg-type]
BIGCODE = Family("gpt_bigcode", "StarCoder, SantaCoder", ("GPTBigCodeForCausalLM",), _compile, _bigcode_names, _FIELDS, 4)
