"""The text part of models that read images too: `text_config` of config.json as a config of its own.

Transformers leaves out of a nested config what equals the defaults of its class, so those are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULTS", "text_part"]

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_QWEN = _LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN_VL = _QWEN | {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip
_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip
_QWEN3_5_MOE = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_experts": 256, "num_experts_per_tok": 8,
}  # fmt: skip
_QWEN3_5 = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
# model_type of a text_config -> its architecture, and what its class of Transformers assumes
DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "ministral3": (
        "Ministral3ForCausalLM",
        _MISTRAL
        | {"vocab_size": 131072, "num_hidden_layers": 34, "sliding_window": None, "rope_parameters": _MINISTRAL3_ROPE}
        | {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128},
    ),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen3": ("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA3),
}
# Configs from before there was a text_config hold its fields themselves.
_FLAT = {"Qwen2VLForConditionalGeneration": "qwen2_vl_text", "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text"}
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")  # which the outer config may hold alone


def text_part(data: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    """The config of the text part; None where there is none that is known."""
    text = data.get("text_config")
    if text is None and architecture in _FLAT:
        text = {**data, "model_type": _FLAT[architecture]}
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or not isinstance(kind, str) or kind not in DEFAULTS:
        return None
    name, defaults = DEFAULTS[kind]
    shared = {key: data[key] for key in _SHARED if data.get(key) is not None}
    return {**defaults, **shared, **text, "architectures": [name]}
