"""Exaone 4: norms after the parts, q/k norm, windows; where some layers slide, the others have no rotary."""

from __future__ import annotations

from outrider.model.families.family import Family
from outrider.model.families.names import AFTER_PARTS, Names
from outrider.model.families.reading import Sizes, alternating
from outrider.model.spec import LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY"]


def _compile(sizes: Sizes) -> ModelSpec:
    fields, norm, rope = sizes.fields, Norm("rms", sizes.eps(default=1e-5)), sizes.rope()
    slides = "sliding_window" in fields
    kinds = sizes.kinds()
    if not kinds:
        pattern = fields.word_or_integer("sliding_window_pattern", 4)
        every = len(pattern) if isinstance(pattern, str) else pattern
        kinds = alternating(sizes.layers, every) if slides and every else ["full_attention"] * sizes.layers
    layers = []
    for kind, window in zip(kinds, sizes.windows(kinds), strict=True):
        turned = rope if not slides or kind == "sliding_attention" else None
        attention = sizes.attention(rope=turned, window=window, qk_norm=QKNorm(norm))
        layers.append(LayerSpec(attention, sizes.mlp(), None, None, norm, norm))
    return sizes.model("exaone4", layers, norm=norm)


FAMILY = Family("exaone4", "Exaone 4", ("Exaone4ForCausalLM",), _compile, Names(AFTER_PARTS))
