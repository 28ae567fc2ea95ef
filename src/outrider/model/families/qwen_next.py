"""Qwen3-Next and Qwen3.5: three layers of the gated delta rule, then one of attention with an output gate; dense or with experts.

A quarter of each head turns. Norms are stored as weight - 1, but for those of the recurrent layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.families.recurrent_names import RecurrentNames
from outrider.model.recurrent import Recurrent
from outrider.model.spec import NO_ATTENTION, FeedForward, LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT"]

_KINDS = ("linear_attention", "full_attention")
_MAX_HEADS, _MAX_WIDTH = 4096, 1024


def _next(sizes: Sizes) -> ModelSpec:
    fields = sizes.fields
    step, dense = fields.integer("decoder_sparse_step", 1, 2**16, 1), fields.items("mlp_only_layers")
    mixture = _mixture(sizes, fields.boolean("norm_topk_prob", True))
    mlps = [sizes.mlp() if i in dense or (i + 1) % step else mixture for i in range(sizes.layers)]
    return _model(sizes, "qwen3_next", mlps)


def _dense(sizes: Sizes) -> ModelSpec:
    return _model(sizes, "qwen3_5", [sizes.mlp()] * sizes.layers)


def _moe(sizes: Sizes) -> ModelSpec:
    return _model(sizes, "qwen3_5_moe", [_mixture(sizes, normalised=True)] * sizes.layers)


def _mixture(sizes: Sizes, normalised: bool) -> FeedForward:
    fields = sizes.fields
    shared = fields.integer("shared_expert_intermediate_size", 1, 2**20, 512)
    width = fields.integer("moe_intermediate_size", 1, 2**20, 512)
    return FeedForward(width, sizes.activation, router=sizes.router(normalised=normalised), shared=shared, shared_gate=True)


def _model(sizes: Sizes, family: str, mlps: Sequence[FeedForward]) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps())
    bias = fields.boolean("attention_bias", False)
    rope = sizes.rope(default_share=0.25)
    attention = sizes.attention(rope=rope, qk_norm=QKNorm(norm), bias=bias, out_bias=bias, gate=True)
    delta = _delta(sizes)
    every = fields.integer("full_attention_interval", 1, 1024, 4)
    kinds = sizes.kinds(_KINDS) or ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(sizes.layers)]
    layers = [
        LayerSpec(attention, mlp, norm, norm)
        if kind == "full_attention"
        else LayerSpec(NO_ATTENTION, mlp, norm, norm, recurrent=delta)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return sizes.model(family, layers, norm=norm)


def _delta(sizes: Sizes) -> Recurrent:
    fields = sizes.fields
    heads = fields.integer("linear_num_value_heads", 1, _MAX_HEADS, 32)
    key_heads = fields.integer("linear_num_key_heads", 1, heads, 16)
    if heads % key_heads:
        raise fields.error(f"linear_num_key_heads must divide linear_num_value_heads, got {key_heads} and {heads}")
    if sizes.activation != "silu":
        raise fields.error(f"hidden_act {sizes.activation!r} is not supported in recurrent layers; only silu is")
    return Recurrent(
        "gated delta rule",
        heads,
        fields.integer("linear_value_head_dim", 1, _MAX_WIDTH, 128),
        fields.integer("linear_conv_kernel_dim", 2, 64, 4),
        key_heads,
        fields.integer("linear_key_head_dim", 1, _MAX_WIDTH, 128),
        norm_eps=sizes.eps(),
        norm_groups=heads,
        norm_first=True,
    )


def _by_key_head(s: Recurrent, widths: Sequence[int]) -> Tensor:
    """Rows of parts in order, where they are stored by heads of keys; `widths` are those of the parts within one head."""
    rows = torch.arange(s.key_heads * sum(widths)).view(s.key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split_with_sizes(list(widths), 1)])


def _qkvz(s: Recurrent) -> Tensor:
    values = s.inner // s.key_heads
    return _by_key_head(s, (s.key_dim, s.key_dim, values, values))


def _ba(s: Recurrent) -> Tensor:
    return _by_key_head(s, (s.heads // s.key_heads,) * 2)


_APART = RecurrentNames(
    read=(
        ("linear_attn.in_proj_qkv", (0, 1, 2)),
        ("linear_attn.in_proj_z", (3,)),
        ("linear_attn.in_proj_b", (4,)),
        ("linear_attn.in_proj_a", (5,)),
    ),
    write="linear_attn.out_proj",
    conv="linear_attn.conv1d",
    norm="linear_attn.norm",
    decay="linear_attn.A_log",
    step_bias="linear_attn.dt_bias",
)
_FUSED = replace(
    _APART, read=(("linear_attn.in_proj_qkvz", (0, 1, 2, 3)), ("linear_attn.in_proj_ba", (4, 5))), orders=(_qkvz, _ba)
)
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    ("Qwen3NextForCausalLM",),
    _next,
    Names(norm_offset=1.0, recurrent=_FUSED),
)
QWEN3_5 = Family(
    "qwen3_5", "Qwen3.5 0.8B to 27B, Qwen3.6-27B", ("Qwen3_5ForCausalLM",), _dense, Names(norm_offset=1.0, recurrent=_APART)
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe", "Qwen3.5 and 3.6 35B-A3B, Qwen3.5-122B-A10B", ("Qwen3_5MoeForCausalLM",), _moe,
    Names(norm_offset=1.0, recurrent=_APART),
)  # fmt: skip
