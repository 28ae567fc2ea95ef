"""SmolLM3: Llama layers, some of them without rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm, rope = sizes.fields, Norm("rms", sizes.eps()), sizes.rope(default_theta=2e6)
    interval = fields.integer("no_rope_layer_interval", 1, 1024, 4)
    turns = fields.items("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(sizes.layers)]
    if len(turns) != sizes.layers or any(turn not in (0, 1) for turn in turns):
        raise fields.error(f"no_rope_layers must have 0 or 1 for each of the {sizes.layers} layers")
    bias, sliding = fields.boolean("attention_bias", False), fields.boolean("use_sliding_window", False)
    kinds = [("full_attention", "sliding_attention")[sliding and not turn] for turn in turns]
    layers = []
    for turn, window in zip(turns, sizes.windows(kinds), strict=True):
        attention = sizes.attention(rope=rope if turn else None, window=window, bias=bias, out_bias=bias)
        layers.append(LayerSpec(attention, sizes.mlp(bias=fields.boolean("mlp_bias", False)), norm, norm))
    return sizes.model("smollm3", layers, norm=norm)


FAMILY = Family("smollm3", "SmolLM3", ("SmolLM3ForCausalLM",), _compile)
