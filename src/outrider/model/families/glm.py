"""GLM-4: half of each head turns, in interleaved pairs; later models have norms after both parts too."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import LayerSpec, ModelSpec, Norm

__all__ = ["GLM", "GLM4"]

_PARTS = without(LLAMA_PARTS, "gate", "up") | {"gate_up": "mlp.gate_up_proj"}
_SANDWICH = _PARTS | {"norm_attn_out": "post_self_attn_layernorm", "norm_mlp_out": "post_mlp_layernorm"}


def _compile(sizes: Sizes) -> ModelSpec:
    norm = Norm("rms", sizes.eps(default=1.5625e-07))
    fourth = sizes.architecture == "Glm4ForCausalLM"
    rope = sizes.rope(default_share=0.5, interleaved=True)
    attention = sizes.attention(rope=rope, bias=sizes.fields.boolean("attention_bias", False))
    after = norm if fourth else None
    layer = LayerSpec(attention, sizes.mlp(), norm, norm, after, after)
    return sizes.model("glm4" if fourth else "glm", [layer] * sizes.layers, norm=norm)


GLM = Family("glm", "GLM-4-9B", ("GlmForCausalLM",), _compile, Names(_PARTS))
GLM4 = Family("glm4", "GLM-4-0414", ("Glm4ForCausalLM",), _compile, Names(_SANDWICH))
