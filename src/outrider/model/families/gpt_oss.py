"""gpt-oss: attention sinks, every other layer with a window, YaRN, and experts with biases and a clamped activation."""

from __future__ import annotations

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes, alternating
from outrider.model.fields import Fields
from outrider.model.rotary import Rope
from outrider.model.spec import Clamp, LayerSpec, ModelSpec, Norm

__all__ = ["FAMILY"]

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm, rope = sizes.fields, Norm("rms", sizes.eps(default=1e-5)), _rope(sizes)
    clamp = Clamp(fields.real("swiglu_limit", 0.0, 1e6, 7.0), fields.real("swiglu_alpha", 0.0, 1e6, 1.702))
    mlp = sizes.mlp(bias=True, clamp=clamp, router=sizes.router(bias=True))
    bias = fields.boolean("attention_bias", True)
    options = {"rope": rope, "bias": bias, "out_bias": bias, "sinks": True}
    windows = sizes.windows(alternating(sizes.layers, 2), 128)
    layers = [LayerSpec(sizes.attention(window=window, **options), mlp, norm, norm) for window in windows]
    return sizes.model("gpt_oss", layers, norm=norm)


def _rope(sizes: Sizes) -> Rope:
    given = "rope_parameters" in sizes.fields or "rope_scaling" in sizes.fields
    return sizes.rope(None if given else Fields(_YARN, "the default rotary scaling"), default_theta=150000.0)


_NAMES = Names(experts=ExpertNames(router="mlp.router", always_fused=True, transposed=True, interleaved=True))
FAMILY = Family("gpt_oss", "gpt-oss-20b, gpt-oss-120b", ("GptOssForCausalLM",), _compile, _NAMES)
