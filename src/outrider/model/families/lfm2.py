"""LFM2: short convolutions, and attention with q/k norm in some layers; with experts behind dense layers in its mixtures."""

from __future__ import annotations

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.families.recurrent_names import RecurrentNames
from outrider.model.recurrent import Recurrent
from outrider.model.spec import NO_ATTENTION, FeedForward, LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["LFM2", "LFM2_MOE"]


def _lfm2(sizes: Sizes) -> ModelSpec:
    return _model(sizes, "lfm2", [FeedForward(_width(sizes))] * sizes.layers)


def _lfm2_moe(sizes: Sizes) -> ModelSpec:
    fields = sizes.fields
    router = sizes.router(
        scores="sigmoid",
        correction=fields.boolean("use_expert_bias", True),
        normalised=fields.boolean("norm_topk_prob", True),
        scale=fields.real("routed_scaling_factor", 0.0, 1e6, 1.0),
    )
    dense = fields.integer("num_dense_layers", 0, 1024, 2)
    mixture = FeedForward(fields.integer("moe_intermediate_size", 1, 2**20, 1792), router=router)
    return _model(sizes, "lfm2_moe", [FeedForward(sizes.ffn) if i < dense else mixture for i in range(sizes.layers)])


def _model(sizes: Sizes, family: str, mlps: list[FeedForward]) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps("norm_eps", 1e-5))
    bias = fields.boolean("conv_bias", False)
    conv = Recurrent(
        "short convolution", 1, sizes.hidden, fields.integer("conv_L_cache", 2, 64, 3), bias=bias, conv_bias=bias, out_bias=bias
    )
    attention = sizes.attention(rope=sizes.rope(default_theta=1e6), qk_norm=QKNorm(norm))
    layers = [
        LayerSpec(attention, mlp, norm, norm) if full else LayerSpec(NO_ATTENTION, mlp, norm, norm, recurrent=conv)
        for full, mlp in zip(_full(sizes), mlps, strict=True)
    ]
    tied = fields.boolean("tie_embedding", fields.boolean("tie_word_embeddings", True))
    return sizes.model(family, layers, norm=norm, tied=tied)


def _full(sizes: Sizes) -> list[bool]:
    """Whether each layer has attention."""
    fields, layers = sizes.fields, range(sizes.layers)
    if "full_attn_idxs" in fields and "layer_types" not in fields:
        listed = fields.items("full_attn_idxs")
        return [i in listed for i in layers]
    kinds = sizes.kinds(("full_attention", "conv"))
    return [kind == "full_attention" for kind in kinds] or [True for _ in layers]


def _width(sizes: Sizes) -> int:
    """Width of the feed-forward part, which older configs adjust."""
    fields = sizes.fields
    width = fields.integer("block_ff_dim", 1, 2**20, sizes.ffn if "intermediate_size" in fields else 12288)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    width, step = int(2 * width / 3), fields.integer("block_multiple_of", 1, 2**16, 256)
    width = int(fields.real("block_ffn_dim_multiplier", 0.0, 1e6, 1.0) * width)
    return -(-width // step) * step


_PARTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.out_proj",
    "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
    "norm_in": "operator_norm", "norm_mlp": "ffn_norm",
    "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm",
}  # fmt: skip
_EXPERTS = ExpertNames(
    router="feed_forward.gate", correction="feed_forward.expert_bias", gate="feed_forward.experts.{}.w1",
    up="feed_forward.experts.{}.w3", down="feed_forward.experts.{}.w2",
    fused=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
)  # fmt: skip
_NAMES = Names(
    _PARTS,
    norm="model.embedding_norm",
    experts=_EXPERTS,
    recurrent=RecurrentNames(read=(("conv.in_proj", (0, 1, 2)),), write="conv.out_proj", conv="conv.conv"),
)
LFM2 = Family("lfm2", "LFM2 350M to 2.6B", ("Lfm2ForCausalLM",), _lfm2, _NAMES)
LFM2_MOE = Family("lfm2_moe", "LFM2-8B-A1B", ("Lfm2MoeForCausalLM",), _lfm2_moe, _NAMES)
