"""Arcee AFM: Llama attention and an ungated MLP with relu squared."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps(default=1e-5))
    bias, activation = fields.boolean("attention_bias", False), sizes.activation if "hidden_act" in fields else "relu2"
    mlp = sizes.mlp(activation=activation, gated=False, bias=fields.boolean("mlp_bias", False))
    layer = LayerSpec(sizes.attention(rope=sizes.rope(), bias=bias, out_bias=bias), mlp, norm, norm)
    return sizes.model("arcee", [layer] * sizes.layers, norm=norm)


FAMILY = Family("arcee", "Arcee AFM", ("ArceeForCausalLM",), _compile, Names(without(LLAMA_PARTS, "gate")))
