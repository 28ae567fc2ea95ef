"""StarCoder2: layer norms, biases and an ungated MLP."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_PARTS = without(LLAMA_PARTS, "gate") | {"up": "mlp.c_fc", "down": "mlp.c_proj"}


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("layer", sizes.eps("norm_epsilon", 1e-5), bias=True)
    bias, rope = fields.boolean("use_bias", True), sizes.rope()
    activation = sizes.activation if "hidden_act" in fields else "gelu_tanh"
    mlp = sizes.mlp(activation=activation, gated=False, bias=bias)
    layers = [
        LayerSpec(sizes.attention(rope=rope, window=window, bias=bias, out_bias=bias), mlp, norm, norm)
        for window in sizes.windows(["sliding_attention"] * sizes.layers)
    ]
    return sizes.model("starcoder2", layers, norm=norm, tied=fields.boolean("tie_word_embeddings", True))


FAMILY = Family("starcoder2", "StarCoder2", ("Starcoder2ForCausalLM",), _compile, Names(_PARTS))
