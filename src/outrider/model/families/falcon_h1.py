"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a multiplier of nearly every part."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.mamba import MAMBA, mamba2
from outrider.model.families.names import LLAMA_PARTS, Names
from outrider.model.families.reading import Sizes
from outrider.model.fields import Fields
from outrider.model.recurrent import Recurrent
from outrider.model.spec import Attention, LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm = sizes.fields, Norm("rms", sizes.eps(default=1e-5))
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    mlp = sizes.mlp(bias=fields.boolean("mlp_bias", False), gate_scale=gate, out_scale=down)
    layer = LayerSpec(_attention(sizes), mlp, norm, norm, recurrent=_mamba(sizes))
    scales = {"embedding_scale": _multiplier(fields, "embedding"), "logit_scale": _multiplier(fields, "lm_head")}
    return sizes.model("falcon_h1", [layer] * sizes.layers, norm=norm, **scales)


def _attention(sizes: Sizes) -> Attention:
    """The multiplier of what attention reads reaches its scores twice, and its values."""
    fields, bias = sizes.fields, sizes.fields.boolean("attention_bias", False)
    read = _multiplier(fields, "attention_in")
    if bias and read != 1.0:
        raise fields.error("attention_in_multiplier beside attention_bias is not supported")
    scale = sizes.head_dim**-0.5 * read * read * _multiplier(fields, "key")
    out_scale = read * _multiplier(fields, "attention_out")
    return sizes.attention(rope=sizes.rope(), bias=bias, out_bias=bias, scale=scale, out_scale=out_scale)


def _mamba(sizes: Sizes) -> Recurrent:
    fields, read = sizes.fields, _multiplier(sizes.fields, "ssm_in")
    if read != 1.0 and fields.boolean("mamba_proj_bias", False):
        raise fields.error("ssm_in_multiplier beside mamba_proj_bias is not supported")
    scales = tuple(read * scale for scale in _multipliers(fields, "ssm_multipliers", 5))
    return mamba2(
        sizes,
        inner=None if fields.is_null("mamba_d_ssm") else fields.integer("mamba_d_ssm", 1, 2**20, 1024),
        out_bias=fields.boolean("projectors_bias", False),
        norm_eps=sizes.eps(default=1e-5) if fields.boolean("mamba_rms_norm", False) else None,
        norm_first=fields.boolean("mamba_norm_before_gate", True),
        scales=None if set(scales) == {1.0} else scales,
        out_scale=_multiplier(fields, "ssm_out"),
    )


def _multiplier(fields: Fields, name: str) -> float:
    return fields.real(f"{name}_multiplier", 0.0, 1e6, 1.0)


def _multipliers(fields: Fields, name: str, count: int) -> list[float]:
    numbers = fields.reals(name, 0.0, 1e6) or [1.0] * count
    if len(numbers) != count:
        raise fields.error(f"{name} must have {count} numbers, got {len(numbers)}")
    return numbers


_MLP = {part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_NAMES = Names(LLAMA_PARTS | _MLP | {"norm_mlp": "pre_ff_layernorm"}, norm="model.final_layernorm", recurrent=MAMBA)
FAMILY = Family("falcon_h1", "Falcon-H1 0.5B to 34B", ("FalconH1ForCausalLM",), _compile, _NAMES)
