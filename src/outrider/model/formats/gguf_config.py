"""What a GGUF file's metadata says about its model, as the config.json that Transformers would have of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nextafter
from typing import Any

import numpy as np

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.gguf import Gguf, end_ids
from outrider.model.fields import Fields
from outrider.model.formats.gguf_blocks import decoded

__all__ = ["Architecture", "architecture_of", "config_of", "sampling_of"]

_PARTS = {
    "attn_norm": "norm_in", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "out",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "ffn_norm": "norm_mlp", "ffn_gate": "gate", "ffn_up": "up",
    "ffn_down": "down", "post_attention_norm": "norm_attn_out", "post_ffw_norm": "norm_mlp_out",
}  # fmt: skip
_SIZES = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
_SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Model:
    """A file with what its metadata says under the name of its architecture."""

    gguf: Gguf
    name: str
    values: Mapping[str, Any]  # without the name in front

    @property
    def where(self) -> str:
        return str(self.gguf.path)

    @property
    def head_dim(self) -> int:
        f = Fields(self.values, self.where)
        heads = f.integer("attention.head_count", 1, 2**16)
        return f.integer("attention.key_length", 1, 2**16, max(f.integer("embedding_length", 1, 2**20) // heads, 1))


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture as llama.cpp names it, and what is peculiar about its files."""

    name: str  # in config.json
    extra: Callable[[Model], dict[str, Any]] = field(default=lambda _: {})  # fields beyond the usual ones
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)  # names of a layer's tensors -> parts of the decoder
    mixes: bool = False  # its files may hold a mixture of experts
    paired: bool = False  # rows of queries and keys: the dimensions that turn together lie side by side


def config_of(gguf: Gguf) -> dict[str, Any]:
    """The config of a file's model."""
    architecture, model = architecture_of(gguf), _model(gguf)
    if model.values.get("expert_count") and not architecture.mixes:
        raise ModelError(f"{gguf.path} holds experts of a kind that is not read from GGUF; pass the original model")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path} lacks the matrix 'token_embd.weight'")
    config = {name: _size(model, key) for name, key in _SIZES.items() if key in model.values}
    config |= {
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "dtype": _stored_dtype(gguf),
        "eos_token_id": list(end_ids(gguf)),
        "rope_scaling": _rope_scaling(model),
    }
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    turned = model.values.get("rope.dimension_count")
    if turned is not None and isinstance(turned, int) and 0 < turned < model.head_dim:
        config["partial_rotary_factor"] = nextafter(turned / model.head_dim, 1.0)
    return config | architecture.extra(model)


def sampling_of(gguf: Gguf) -> dict[str, Any]:
    """Sampling defaults, as generation_config.json names them."""
    keys = {name: f"general.sampling.{key}" for name, key in _SAMPLING.items()}
    return {name: gguf.metadata[key] for name, key in keys.items() if key in gguf.metadata}


def architecture_of(gguf: Gguf) -> Architecture:
    """The architecture that the metadata names."""
    name = gguf.word("general.architecture", "?")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(
            f"{gguf.path}: the architecture {shown(name)} is not read from GGUF; known: {known}; pass the original model"
        )
    return _ARCHITECTURES[name]


def _model(gguf: Gguf) -> Model:
    name = gguf.word("general.architecture")
    values = {key.removeprefix(f"{name}."): value for key, value in gguf.metadata.items() if key.startswith(f"{name}.")}
    return Model(gguf, name, values)


def _size(model: Model, key: str) -> Any:
    """A number; a list of one for each layer must hold equal ones."""
    value = model.values[key]
    if not isinstance(value, np.ndarray):
        return value
    if not len(value) or (value != value[0]).any():
        raise ModelError(f"{model.where}: {model.name}.{key} differs between layers, which is not read from GGUF")
    return value[0].item()


def _stored_dtype(gguf: Gguf) -> str:
    """The dtype of most of the values in matrices; quantised ones are decoded to bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        if len(tensor.shape) > 1:
            name = _FLOATS.get(tensor.kind.name, "bfloat16")
            sizes[name] = sizes.get(name, 0) + tensor.nbytes // tensor.kind.nbytes * tensor.kind.values
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    """Rotary scaling: a factor for every pair where the file has a tensor of them, else what the metadata names."""
    f, context = Fields(model.values, model.where), model.values.get("context_length")
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if any(name in model.gguf.tensors for name in names):
        short, long = (_factors(model.gguf, name) for name in names)
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return scaling | _of(model, "original_max_position_embeddings", "rope.scaling.original_context_length") | _of(
            model, "attention_factor", "rope.scaling.attn_factor"
        )  # fmt: skip
    if "rope_freqs.weight" in model.gguf.tensors:  # Llama 3.1, whose settings are not in the metadata
        factors = _factors(model.gguf, "rope_freqs.weight")
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": context} | both
    kind = f.word("rope.scaling.type", "linear")
    factor = f.real("rope.scaling.factor", 0.0, 1e9, f.real("rope.scale_linear", 0.0, 1e9, 1.0))
    if kind == "none" or factor == 1.0:
        return None
    return {"rope_type": kind, "factor": factor} | _of(
        model, "original_max_position_embeddings", "rope.scaling.original_context_length"
    )


def _of(model: Model, name: str, key: str) -> dict[str, Any]:
    return {name: model.values[key]} if key in model.values else {}


def _factors(gguf: Gguf, name: str) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**16:
        raise ModelError(f"{gguf.path}: {name!r} must be a list of F32 factors, one for each pair of rotated dimensions")
    return decoded("F32", np.frombuffer(gguf.read(name, 0, tensor.nbytes), np.uint8)).tolist()  # type: ignore[no-any-return]


def _llama(model: Model) -> dict[str, Any]:
    """Mistral and Mixtral are stored as Llama; with a window, or with experts, they must be compiled as what they are."""
    if model.values.get("expert_count"):
        return {"architectures": ["MixtralForCausalLM"]}
    return {"architectures": ["MistralForCausalLM"]} if model.values.get("attention.sliding_window") else {}


def _gemma2(model: Model) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": model.values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.values.get("final_logit_softcapping", 30.0),
    }
    return caps | {"query_pre_attn_scalar": _query_scalar(model, 46)}


def _gemma3(model: Model) -> dict[str, Any]:
    local = model.values.get("rope.freq_base_swa", 1e4)
    return {"rope_local_base_freq": local, "query_pre_attn_scalar": _query_scalar(model, 62)} | _of(
        model, "final_logit_softcapping", "final_logit_softcapping"
    )


def _qwen2_moe(model: Model) -> dict[str, Any]:
    shared = model.gguf.tensors.get("blk.0.ffn_up_shexp.weight")
    width = model.values.get("expert_shared_feed_forward_length", 0 if shared is None else shared.shape[0])
    bias = "blk.0.attn_q.bias" in model.gguf.tensors
    return {"sliding_window": None, "qkv_bias": bias, "norm_topk_prob": False, "shared_expert_intermediate_size": width}


def _gpt_oss(model: Model) -> dict[str, Any]:
    scaling = _rope_scaling(model)
    return {"rope_scaling": None if scaling is None else scaling | {"truncate": False}} | _of(
        model, "intermediate_size", "expert_feed_forward_length"
    )


def _query_scalar(model: Model, depth_of_largest: int) -> float:
    """Queries are scaled by the root of a head's width; in the largest models, whose depth tells them, of another width."""
    f = Fields(model.values, model.where)
    if "attention.scale" in f:
        return f.real("attention.scale", 0.0, 1e9, 1.0) ** -2
    if model.values.get("block_count") == depth_of_largest:
        return f.integer("embedding_length", 1, 2**20) / f.integer("attention.head_count", 1, 2**16)
    return float(model.head_dim)


_ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _llama, mixes=True, paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM", lambda _: {"attention_bias": None, "sliding_window": None}),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda _: {"sliding_window": None}),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2_moe, mixes=True),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", lambda _: {"sliding_window": None, "norm_topk_prob": True}, mixes=True),
    "olmoe": Architecture("OlmoeForCausalLM", lambda _: {"norm_topk_prob": False}, mixes=True),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", _gpt_oss, _PARTS | {"post_attention_norm": "norm_mlp", "attn_sinks": "sinks"}, mixes=True
    ),
    "phi3": Architecture("Phi3ForCausalLM", parts=_PARTS | {"ffn_up": "gate_up"}),
}
