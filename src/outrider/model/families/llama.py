"""Llama, and what differs from it in a field or two: Mistral, Qwen2 and Qwen3.

`LlamaShape` is a decoder of equal layers by its numbers. Draft models and heads that are trained here have this shape too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.model.families.family import Family
from outrider.model.families.reading import Sizes
from outrider.model.rotary import Rope
from outrider.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm, QKNorm

__all__ = ["FAMILY", "LlamaShape", "hf_config"]

# architecture -> (family, attention bias by default, q/k norm)
_KINDS = {
    "LlamaForCausalLM": ("llama", False, False),
    "MistralForCausalLM": ("mistral", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama decoder by its numbers."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    rope: Rope
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention output
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window per layer
    dtype: str = "float32"  # of the stored weights
    eos_ids: tuple[int, ...] = ()

    def spec(self) -> ModelSpec:
        """The spec of this shape."""
        windows, norm = self.windows or (None,) * self.layers, Norm("rms", self.norm_eps)
        mlp = FeedForward(self.ffn, bias=self.mlp_bias)
        layers = tuple(LayerSpec(self._attention(window), mlp, norm, norm) for window in windows)
        return ModelSpec(
            family=_KINDS[self.architecture][0],
            architecture=self.architecture,
            vocab=self.vocab,
            hidden=self.hidden,
            context=self.context,
            layers=layers,
            norm=norm,
            tied=self.tied,
            dtype=self.dtype,
            eos_ids=self.eos_ids,
        )

    def _attention(self, window: int | None) -> Attention:
        norm = QKNorm(Norm("rms", self.norm_eps)) if self.qk_norm else None
        sizes = (self.heads, self.kv_heads, self.head_dim)
        return Attention(*sizes, self.head_dim**-0.5, self.rope, window, norm, self.attention_bias, self.output_bias)


def _compile(sizes: Sizes) -> ModelSpec:
    fields, architecture = sizes.fields, sizes.architecture
    _, bias, qk_norm = _KINDS[architecture]
    explicit = fields.boolean("attention_bias", False)
    norm = Norm("rms", sizes.eps())
    attention = {
        "rope": sizes.rope(),
        "qk_norm": QKNorm(norm) if qk_norm else None,
        "bias": explicit if "attention_bias" in fields else bias,
        "out_bias": explicit and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
    }
    mlp = sizes.mlp(bias=fields.boolean("mlp_bias", False))
    layers = [LayerSpec(sizes.attention(window=w, **attention), mlp, norm, norm) for w in _windows(sizes)]
    return sizes.model(_KINDS[architecture][0], layers, norm=norm)


def _windows(sizes: Sizes) -> tuple[int | None, ...]:
    """Mistral's window is every layer's; Qwen's is of the layers from `max_window_layers` on, where it is switched on."""
    if sizes.architecture == "MistralForCausalLM":
        return sizes.windows(["sliding_attention"] * sizes.layers)
    full = sizes.fields.integer("max_window_layers", 0, 1024, 0)
    sliding = sizes.fields.boolean("use_sliding_window", False)
    return sizes.windows(["sliding_attention" if sliding and i >= full else "full_attention" for i in range(sizes.layers)])


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The fields of config.json for a spec that `LlamaShape` can describe."""
    layer, a = spec.layers[0], spec.attention
    assert layer.norm_in is not None
    assert a.rope is not None
    return {
        "architectures": [spec.architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": layer.mlp.width,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": layer.norm_in.eps,
        "rope_theta": a.rope.theta,
        "tie_word_embeddings": spec.tied,
        "attention_bias": a.bias,
        "hidden_act": "silu",
        "dtype": spec.dtype,
        "eos_token_id": list(spec.eos_ids),
    } | rope_fields(a.rope)


def rope_fields(rope: Rope) -> dict[str, Any]:
    """Rotary settings of the kinds that Llama models use, as config.json has them."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_context
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


FAMILY = Family(
    name="llama",
    models="Llama 2/3.x, CodeLlama, Vicuna, SmolLM 1/2, Mistral 7B, Qwen2/2.5, Qwen3",
    architectures=tuple(_KINDS),
    compile=_compile,
)
