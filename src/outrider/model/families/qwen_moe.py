"""Qwen2-MoE and Qwen3-MoE: many small experts, in some layers or in all; the second has a shared expert behind a gate."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.spec import FeedForward, LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["QWEN2_MOE", "QWEN3_MOE"]


def _qwen2(sizes: Sizes) -> ModelSpec:
    norm, rope, fields = Norm("rms", sizes.eps()), sizes.rope(), sizes.fields
    bias = fields.boolean("qkv_bias", True)
    sliding = fields.boolean("use_sliding_window", False)
    most = fields.integer("max_window_layers", 0, 1024, 28)
    kinds = ["sliding_attention" if sliding and i % 2 == 0 and i < most else "full_attention" for i in range(sizes.layers)]
    windows = sizes.windows(kinds) if sliding else (None,) * sizes.layers
    shared = fields.integer("shared_expert_intermediate_size", 1, 2**20, 5632)
    layers = [
        LayerSpec(sizes.attention(rope=rope, window=window, bias=bias), mlp, norm, norm)
        for window, mlp in zip(windows, _mlps(sizes, shared), strict=True)
    ]
    return sizes.model("qwen2_moe", layers, norm=norm)


def _qwen3(sizes: Sizes) -> ModelSpec:
    norm, fields = Norm("rms", sizes.eps()), sizes.fields
    bias, sliding = fields.boolean("attention_bias", False), fields.boolean("use_sliding_window", False)
    options = {"rope": sizes.rope(), "qk_norm": QKNorm(norm), "bias": bias, "out_bias": bias}
    windows = sizes.windows(["sliding_attention"] * sizes.layers) if sliding else (None,) * sizes.layers
    layers = [
        LayerSpec(sizes.attention(window=window, **options), mlp, norm, norm)
        for window, mlp in zip(windows, _mlps(sizes), strict=True)
    ]
    return sizes.model("qwen3_moe", layers, norm=norm)


def _mlps(sizes: Sizes, shared: int = 0) -> list[FeedForward]:
    """The feed-forward part of each layer: dense where the config says so."""
    fields = sizes.fields
    step, dense_layers = fields.integer("decoder_sparse_step", 1, 2**16, 1), fields.items("mlp_only_layers")
    router = sizes.router(normalised=fields.boolean("norm_topk_prob", False))
    width = fields.integer("moe_intermediate_size", 1, 2**20)
    mixture = sizes.mlp(width=width, router=router, shared=shared, shared_gate=shared > 0)
    dense = [i in dense_layers or (i + 1) % step > 0 for i in range(sizes.layers)]
    return [sizes.mlp() if is_dense else mixture for is_dense in dense]


QWEN2_MOE = Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", ("Qwen2MoeForCausalLM",), _qwen2)
QWEN3_MOE = Family("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", ("Qwen3MoeForCausalLM",), _qwen3)
