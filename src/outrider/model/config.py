"""ModelConfig: the Llama family as fields, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ModelError

__all__ = ["ModelConfig", "Rope"]

# architecture -> (attention bias by default, q/k norm)
_ARCHITECTURES: dict[str, tuple[bool, bool]] = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
_REFUSED_KEYS = ("auto_map", "_attn_implementation_internal", "trust_remote_code")


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
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: a model directory holds config.json and *.safetensors") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        return cls.from_hf(data, str(path))

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From the fields of a Hugging Face configuration."""
        for key in _REFUSED_KEYS:
            if data.get(key):
                raise ModelError(f"{where} has {key!r}, which would run code from the model; Outrider never does")
        architecture = (data.get("architectures") or ["?"])[0]
        if architecture not in _ARCHITECTURES:
            raise ModelError(f"{where}: architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}")
        if data.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"{where}: hidden_act {data['hidden_act']!r} is not supported; known: silu")
        try:
            return cls._build(architecture, data, where)
        except KeyError as error:
            raise ModelError(f"{where} lacks the field {error.args[0]!r}") from None

    @classmethod
    def _build(cls, architecture: str, data: Mapping[str, Any], where: str) -> ModelConfig:
        bias, qk_norm = _ARCHITECTURES[architecture]
        heads, hidden, layers = data["num_attention_heads"], data["hidden_size"], data["num_hidden_layers"]
        explicit = data.get("attention_bias")
        eos = data.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab=data["vocab_size"],
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or hidden // heads,
            ffn=data["intermediate_size"],
            context=data.get("max_position_embeddings", 2048),
            rope=_rope(data, where),
            norm_eps=data.get("rms_norm_eps", 1e-6),
            tied=bool(data.get("tie_word_embeddings", False)),
            attention_bias=bias if explicit is None else bool(explicit),
            output_bias=bool(explicit) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
            mlp_bias=bool(data.get("mlp_bias", False)),
            qk_norm=qk_norm,
            windows=_windows(data, architecture, layers),
            dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32"),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _windows(data: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    window = data.get("sliding_window")
    if window is None:
        return (None,) * layers
    kinds = data.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not data.get("use_sliding_window", False):
        return (None,) * layers
    full = data.get("max_window_layers", 0)
    return tuple(None if i < full else window for i in range(layers))


def _rope(data: Mapping[str, Any], where: str) -> Rope:
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{where}: rope type {kind!r} is not supported; known: default, linear, llama3")
    return Rope(
        theta=float(scaling.get("rope_theta") or data.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", data.get("max_position_embeddings", 8192))),
    )
