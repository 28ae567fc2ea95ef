"""GGUF files of tiny models, written with the `gguf` package as llama.cpp's converter writes them.

The model that is written becomes the dequantised one, so that it is the oracle of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["K_QUANTS", "GgufOptions", "random_blocks", "write_gguf", "write_metadata"]

_ARCHITECTURES = {
    "mistral": "llama", "gemma3_text": "gemma3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # stacked tensors of Transformers -> those of llama.cpp
# Types that the package cannot quantise to: the float16 fields of a block, and values that give weights of a usual size.
K_QUANTS = {
    "Q2_K": {80: 0.01, 82: 0.01}, "Q3_K": {108: 0.001}, "Q4_K": {0: 0.0004, 2: 0.003}, "Q5_K": {0: 0.0002, 2: 0.003},
    "Q6_K": {208: 0.00005}, "IQ4_NL": {0: 0.001}, "IQ4_XS": {0: 0.00003},
}  # fmt: skip

GgufOptions = Callable[[Any], None]  # what else is written, given the writer


def write_gguf(path: Path, model: Any, kind: str = "F32", more: GgufOptions | None = None, **writing: Any) -> None:
    """Write a Transformers model. Matrices become `kind`, vectors float32; the model's weights become what was written."""
    import gguf

    config = model.config.get_text_config()
    arch = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch, **writing)
    write_metadata(writer, config)
    if more is not None:
        more(writer)
    names = gguf.get_tensor_name_map(_arch(arch), 99)
    for factors, values in _rope_tensors(config).items():
        writer.add_tensor(factors, values)
    state = model.state_dict()
    for i, (name, tensor) in enumerate(state.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            for stored, part in _experts(name, tensor, config):
                part.copy_(_add(writer, stored, part, kind, seed=i, bias=name.endswith("_bias")))
            continue
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.model_type == "mixtral" else name
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        stored += ".weight" if name.endswith("sinks") else ""
        written = _permuted(tensor, name, config) if arch == "llama" else tensor
        plus = 1.0 if arch.startswith("gemma") and stored.endswith("norm.weight") else 0.0
        values = _add(writer, stored, written + plus, kind, seed=i)
        values = values - plus
        tensor.copy_(_unpermuted(values, name, config) if arch == "llama" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: Any, config: Any) -> None:
    """Sizes and settings of a config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    by_kind = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        small = config.model_type in ("qwen2_moe", "qwen3_moe")
        writer.add_expert_feed_forward_length(config.moe_intermediate_size if small else config.intermediate_size)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * (by_kind.get("partial_rotary_factor") or 1.0)))
    writer.add_rope_freq_base(by_kind["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if by_kind.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(_scaling(by_kind["rope_type"]))
        writer.add_rope_scaling_factor(by_kind["factor"])
        if "original_max_position_embeddings" in by_kind:
            writer.add_rope_scaling_orig_ctx_len(by_kind["original_max_position_embeddings"])
    if by_kind.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_vocab_size(config.vocab_size)


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bits whose scales are finite and of a usual size."""
    import gguf

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    for at, value in K_QUANTS[kind].items():
        scales = (value * np.random.default_rng(seed + 1).uniform(0.5, 1.5, count)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks


def _experts(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Parts of a stacked tensor as llama.cpp names them, (experts, out, in), as views."""
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    kinds, bias = _EXPERTS[part.removesuffix("_bias")], part.endswith("_bias")
    rows = tensor.mT if config.model_type == "gpt_oss" and not bias else tensor
    for i, kind in enumerate(kinds):
        half = rows.shape[1] // 2
        step = slice(i, None, 2) if config.model_type == "gpt_oss" else slice(i * half, (i + 1) * half)
        yield f"blk.{layer}.ffn_{kind}_exps.{'bias' if bias else 'weight'}", rows[:, step] if len(kinds) > 1 else rows


def _add(writer: Any, name: str, tensor: Tensor, kind: str, seed: int, bias: bool = False) -> Tensor:
    """Write a tensor; what it is after it was quantised."""
    import gguf

    values = tensor.float().contiguous().numpy()
    kind = kind if values.ndim > 1 and not bias and "ffn_gate_inp" not in name else "F32"
    quantised = gguf.GGMLQuantizationType[kind]
    if kind in K_QUANTS:
        raw = random_blocks(kind, values.size // gguf.GGML_QUANT_SIZES[quantised][0], seed).reshape(len(values), -1)
    else:
        raw = gguf.quants.quantize(values, quantised)
    writer.add_tensor(name, raw, raw_dtype=quantised)
    return torch.from_numpy(np.array(gguf.quants.dequantize(raw, quantised))).view(tensor.shape)


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """Factors of rotary frequencies, which Llama 3 and Phi-3 files have as tensors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        both = (("short", rope["short_factor"]), ("long", rope["long_factor"]))
        return {f"rope_factors_{which}.weight": np.array(factors, np.float32) for which, factors in both}
    if rope.get("rope_type") != "llama3":
        return {}
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    plain = rope["rope_theta"] ** -(torch.arange(len(frequencies)).double() / len(frequencies))
    return {"rope_freqs.weight": (plain / frequencies).float().numpy()}


def _permuted(tensor: Tensor, name: str, config: Any) -> Tensor:
    """Rows of q and k in the order of llama.cpp: dimensions that turn together beside each other."""
    heads = _heads(name, config)
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _unpermuted(tensor: Tensor, name: str, config: Any) -> Tensor:
    heads = _heads(name, config)
    return tensor if heads is None else tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _heads(name: str, config: Any) -> int | None:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else None


def _arch(name: str) -> Any:
    import gguf

    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _scaling(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType(name)
