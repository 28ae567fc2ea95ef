"""GLM-4.5: sigmoid routing with a correction, a shared expert, and dense layers first; half of each head turns."""

from __future__ import annotations

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]

_SHARED = {part: f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps(default=1e-5))
    qk_norm = QKNorm(norm) if fields.boolean("use_qk_norm", False) else None
    bias = fields.boolean("attention_bias", False)
    attention = sizes.attention(rope=sizes.rope(default_share=0.5), qk_norm=qk_norm, bias=bias)
    scale = fields.real("routed_scaling_factor", 0.0, 1e6, 1.0)
    normalised = fields.boolean("norm_topk_prob", True)
    router = sizes.router(scores="sigmoid", correction=True, normalised=normalised, scale=scale)
    width = fields.integer("moe_intermediate_size", 1, 2**20, 1408)
    mixture = sizes.mlp(width=width, router=router, shared=width * fields.integer("n_shared_experts", 0, 64, 1))
    dense = fields.integer("first_k_dense_replace", 0, 1024, 1)
    layers = [LayerSpec(attention, sizes.mlp() if i < dense else mixture, norm, norm) for i in range(sizes.layers)]
    return sizes.model("glm4_moe", layers, norm=norm)


def _names(spec: ModelSpec) -> Names:
    """The layers after the last one predict further tokens; they are not part of the decoder."""
    return Names(experts=ExpertNames(shared=_SHARED), ignored_layers=spec.depth)


FAMILY = Family("glm4_moe", "GLM-4.5, GLM-4.5-Air, GLM-4.6", ("Glm4MoeForCausalLM",), _compile, _names)
