"""Phi-3, 3.5 and 4: Llama layers with fused products, longrope and partial rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_PARTS = without(LLAMA_PARTS, "q", "k", "v", "gate", "up") | {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}


def _compile(sizes: Sizes) -> ModelSpec:
    norm, rope = Norm("rms", sizes.eps(default=1e-5)), sizes.rope()
    bias = sizes.fields.boolean("attention_bias", False)
    windows = sizes.windows(["sliding_attention"] * sizes.layers)
    layers = [LayerSpec(sizes.attention(rope=rope, window=w, bias=bias), sizes.mlp(), norm, norm) for w in windows]
    return sizes.model("phi3", layers, norm=norm)


FAMILY = Family("phi3", "Phi-3, Phi-3.5, Phi-4", ("Phi3ForCausalLM",), _compile, Names(_PARTS))
