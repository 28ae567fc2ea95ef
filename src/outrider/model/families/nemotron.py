"""Nemotron-4 and Minitron: layer norms stored as weight - 1, relu squared without a gate, half of each head turns."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("layer", sizes.eps("norm_eps", 1e-5), bias=True)
    bias, activation = fields.boolean("attention_bias", False), sizes.activation if "hidden_act" in fields else "relu2"
    attention = sizes.attention(rope=sizes.rope(default_share=0.5), bias=bias, out_bias=bias)
    mlp = sizes.mlp(activation=activation, gated=False, bias=fields.boolean("mlp_bias", False))
    return sizes.model("nemotron", [LayerSpec(attention, mlp, norm, norm)] * sizes.layers, norm=norm)


_NAMES = Names(without(LLAMA_PARTS, "gate"), norm_offset=1.0)
FAMILY = Family("nemotron", "Nemotron-4, Minitron", ("NemotronForCausalLM",), _compile, _NAMES)
