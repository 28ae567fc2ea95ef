"""ModelConfig: the Llama family as fields, read from a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model.fields import Fields, read_json
from outrider.model.files import refuse_quantised

__all__ = ["STORED_DTYPES", "ModelConfig", "Rope"]

# architecture -> (attention bias by default, q/k norm)
_ARCHITECTURES: dict[str, tuple[bool, bool]] = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
_REFUSED_KEYS = ("auto_map", "_attn_implementation_internal", "trust_remote_code")
STORED_DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")  # int8 has a scale per row beside each matrix
# Larger than any model known, and small enough that sizes and their products stay within the kernels' integers.
_MAX_VOCAB, _MAX_HIDDEN, _MAX_FFN = 2**22, 2**17, 2**20
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_CONTEXT = 1024, 4096, 1024, 2**24
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies: theta and, for Llama 3.1 and linear scaling, how they stretch."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def frequencies(self, head_dim: int) -> list[float]:
        """Inverse frequency of each of the head_dim / 2 pairs."""
        plain = [self.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        """Stretch long wavelengths by the factor, keep short ones, blend in between."""
        turns = self.original_context * frequency / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Families differ in fields, not in classes."""

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

    @property
    def parameters(self) -> int:
        """Number of weights in the matrices (norms and biases left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """From config.json in a model directory."""
        path = directory / "config.json"
        return cls.from_hf(read_json(path, "a model directory holds config.json and *.safetensors"), str(path))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From the fields of a Hugging Face configuration. Everything is checked here, before anything is allocated."""
        for key in _REFUSED_KEYS:
            if data.get(key):
                raise ModelError(f"{where} has {key!r}, which would run code from the model; Outrider never does")
        refuse_quantised(data, where)
        fields = Fields(data, where)
        architecture = next(iter(fields.items("architectures")), "?")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise fields.error(f"architecture {shown(architecture)} is not supported; known: {known}")
        if (act := fields.word("hidden_act", "silu")) not in ("silu", "swish"):
            raise fields.error(f"hidden_act {act!r} is not supported; known: silu")
        return cls._build(architecture, fields)

    @classmethod
    def _build(cls, architecture: str, fields: Fields) -> ModelConfig:
        bias, qk_norm = _ARCHITECTURES[architecture]
        layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
        heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
        hidden = fields.integer("hidden_size", 1, _MAX_HIDDEN)
        context = fields.integer("max_position_embeddings", 2, _MAX_CONTEXT, 2048)
        explicit = fields.boolean("attention_bias", False)
        return cls(
            architecture=architecture,
            vocab=fields.integer("vocab_size", 2, _MAX_VOCAB),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_kv_heads(fields, heads),
            head_dim=_head_dim(fields, hidden, heads),
            ffn=fields.integer("intermediate_size", 1, _MAX_FFN),
            context=context,
            rope=_rope(fields, context),
            norm_eps=fields.real("rms_norm_eps", 0.0, 1.0, 1e-6),
            tied=fields.boolean("tie_word_embeddings", False),
            attention_bias=explicit if "attention_bias" in fields else bias,
            output_bias=explicit and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
            mlp_bias=fields.boolean("mlp_bias", False),
            qk_norm=qk_norm,
            windows=_windows(fields, architecture, layers),
            dtype=_dtype(fields),
            eos_ids=fields.ids("eos_token_id"),
        )


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise fields.error(f"num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}")
    return kv_heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    head_dim = fields.integer("head_dim", 2, _MAX_HEAD_DIM, hidden // heads)
    if "head_dim" not in fields and hidden % heads:
        raise fields.error(f"hidden_size must be a multiple of num_attention_heads, got {hidden} and {heads}; or set head_dim")
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise fields.error(f"head_dim must be even (rotary pairs) and in [2, {_MAX_HEAD_DIM}], got {head_dim}")
    return head_dim


def _dtype(fields: Fields) -> str:
    """The dtype that config.json names for the stored weights."""
    name = fields.word("dtype", fields.word("torch_dtype", "float32")).removeprefix("torch.")
    if name not in STORED_DTYPES:
        raise fields.error(f"dtype {shown(name)} is not supported; known: {', '.join(STORED_DTYPES)}")
    return name


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    kinds = fields.items("layer_types")
    if kinds and (len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds)):
        known = " or ".join(_LAYER_TYPES)
        raise fields.error(f"layer_types must name {known} for each of the {layers} layers, got {shown(kinds)}")
    full = fields.integer("max_window_layers", 0, _MAX_LAYERS, 0)
    sliding = fields.boolean("use_sliding_window", False)
    if "sliding_window" not in fields:
        return (None,) * layers
    window = fields.integer("sliding_window", 1, _MAX_CONTEXT)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    return tuple(window if sliding and i >= full else None for i in range(layers))


def _rope(fields: Fields, context: int) -> Rope:
    scaling = fields.nested("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    kind = scaling.word("rope_type", scaling.word("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise fields.error(f"rope type {shown(kind)} is not supported; known: default, linear, llama3")
    low = scaling.real("low_freq_factor", 0.0, 1e6, 1.0)
    high = scaling.real("high_freq_factor", 0.0, 1e6, 4.0)
    if kind == "llama3" and low >= high:
        raise scaling.error(f"low_freq_factor must be below high_freq_factor, got {low:g} and {high:g}")
    return Rope(
        theta=scaling.real("rope_theta", 0.0, 1e30, fields.real("rope_theta", 0.0, 1e30, 10000.0)),
        kind=kind,
        factor=scaling.real("factor", 0.0, 1e9, 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=scaling.integer("original_max_position_embeddings", 1, _MAX_CONTEXT, context),
    )
