"""Phi-3.5-MoE: layer norms and biases, and two of sixteen experts chosen by sparsemixer."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.family import Family
from outrider.model.families.mixtral import MIXTRAL_EXPERTS
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.rotary import Rope
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("layer", sizes.eps(default=1e-5), bias=True)
    bias = fields.boolean("attention_bias", False)
    closeness = 2.0 * fields.real("router_jitter_noise", -1.0, 1e6, 0.01)
    router = sizes.router(scores="sparsemixer", normalised=False, closeness=closeness)
    if router.chosen != 2 or router.experts < 2:
        raise fields.error(f"num_experts_per_tok must be 2, as sparsemixer chooses, got {router.chosen} of {router.experts}")
    mlp, rope = sizes.mlp(router=router), _rope(sizes)
    layers = [
        LayerSpec(sizes.attention(rope=rope, window=window, bias=bias, out_bias=bias), mlp, norm, norm)
        for window in sizes.windows(["sliding_attention"] * sizes.layers)
    ]
    return sizes.model("phimoe", layers, norm=norm, output_bias=fields.boolean("lm_head_bias", False))


def _rope(sizes: Sizes) -> Rope:
    """Cosines and sines of longrope are scaled by factors of their own, one for short texts and one for long ones."""
    rope = sizes.rope(default_theta=1e6)
    scaling = sizes.fields.nested("rope_parameters" if "rope_parameters" in sizes.fields else "rope_scaling")
    short, long = (scaling.real(name, 0.0, 1e6, 1.0) for name in ("short_mscale", "long_mscale"))
    if rope.kind != "longrope":
        return rope
    if short != long:
        raise sizes.fields.error(f"short_mscale and long_mscale must be equal, got {short:g} and {long:g}")
    return replace(rope, attention_factor=short)


FAMILY = Family("phimoe", "Phi-3.5-MoE", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), _compile, Names(experts=MIXTRAL_EXPERTS))
