"""MiniMax-M2: q/k norm over the width, partial rotary, and sigmoid routing with a correction."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.mixtral import MIXTRAL_EXPERTS
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps())
    turned = fields.integer("rotary_dim", 2, sizes.head_dim, sizes.head_dim)
    rope = sizes.rope(default_theta=5e6, default_share=turned / sizes.head_dim)
    attention = sizes.attention(rope=rope, qk_norm=QKNorm(norm, over="width"))
    mlp = sizes.mlp(router=sizes.router(scores="sigmoid", correction=True))
    return sizes.model("minimax_m2", [LayerSpec(attention, mlp, norm, norm)] * sizes.layers, norm=norm)


FAMILY = Family("minimax_m2", "MiniMax-M2", ("MiniMaxM2ForCausalLM",), _compile, Names(experts=MIXTRAL_EXPERTS))
