"""Mixtral: Mistral layers whose feed-forward part is one of eight experts, two for each row."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY", "MIXTRAL_EXPERTS"]

MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def _compile(sizes: Sizes) -> ModelSpec:
    norm, rope = Norm("rms", sizes.eps(default=1e-5)), sizes.rope(default_theta=1e6)
    mlp = replace(sizes.mlp(), router=sizes.router())
    windows = sizes.windows(["sliding_attention"] * sizes.layers)
    layers = [LayerSpec(sizes.attention(rope=rope, window=window), mlp, norm, norm) for window in windows]
    return sizes.model("mixtral", layers, norm=norm)


FAMILY = Family("mixtral", "Mixtral 8x7B, 8x22B", ("MixtralForCausalLM",), _compile, Names(experts=MIXTRAL_EXPERTS))
