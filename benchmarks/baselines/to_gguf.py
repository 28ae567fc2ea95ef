"""GGUF from a Hugging Face directory, for llama.cpp and OpenVINO: every matrix in one kind, norms and biases in float32.

Engines read token ids, so the vocabulary is written for its size and for reading the file, not for tokenizing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError, OutriderError
from outrider.model import ModelSpec, read_spec
from outrider.model.files import read_tensors
from outrider.text import Tokenizer

__all__ = ["KINDS", "write_gguf"]

KINDS = {"BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}  # as the package names files of each
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # token types


def write_gguf(directory: Path, path: Path, kind: str) -> None:
    """Write the model in `directory` with its matrices in one of KINDS."""
    gguf = _package()
    config = read_spec(directory)
    if any(config.windows):
        raise ModelError(f"{directory}: GGUF of a model with sliding windows is not written here")
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config.architecture])
    _write_fields(writer, config, directory.name)
    _write_tokens(writer, directory, config)
    writer.add_file_type(gguf.LlamaFileType[KINDS[kind]])
    wanted = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in _tensors(directory, config):
        dtype = wanted if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.float().numpy(), dtype)
        writer.add_tensor(name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise OutriderError("writing GGUF needs the package gguf: pip install 'outrider[baselines]'") from None
    return gguf


def _write_fields(writer: Any, c: ModelSpec, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.depth)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    assert c.attention.rope is not None
    writer.add_rope_freq_base(c.attention.rope.theta)
    writer.add_layer_norm_rms_eps(c.norm.eps)
    writer.add_vocab_size(c.vocab)


def _write_tokens(writer: Any, directory: Path, config: ModelSpec) -> None:
    tokenizer = Tokenizer.load(directory)
    tokens, kinds = [f"<{i}>" for i in range(config.vocab)], [_UNUSED] * config.vocab
    if tokenizer is not None:
        added = {i for i, (special, _) in tokenizer.spellings().items() if special}
        for token, i in tokenizer.table().items():
            if i < config.vocab:
                tokens[i], kinds[i] = token, _CONTROL if i in added else _NORMAL
    end = config.eos_ids[0] if config.eos_ids else 0
    kinds[end] = _CONTROL  # OpenVINO reads no vocabulary without one
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_merges(directory))
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)


def _merges(directory: Path) -> list[str]:
    path = directory / "tokenizer.json"
    merges = json.loads(path.read_text(encoding="utf-8"))["model"].get("merges", []) if path.exists() else []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges] or ["a b"]


def _tensors(directory: Path, config: ModelSpec) -> list[tuple[str, Tensor]]:
    """GGUF names and tensors; Llama's queries and keys in the order of its interleaved rotation."""
    tensors = [_tensor(name, tensor, config) for name, tensor, _ in read_tensors(directory)]
    rope = config.attention.rope
    assert rope is not None
    plain = torch.tensor([rope.theta ** (-2.0 * i / config.head_dim) for i in range(config.head_dim // 2)])
    factors = plain / torch.tensor(rope.variants(config.head_dim)[0].frequencies)
    if rope.kind != "default":
        if _ARCHITECTURES[config.architecture] != "llama":
            raise ModelError(f"{directory}: GGUF of {config.architecture} with scaled rotary frequencies is not written here")
        tensors.append(("rope_freqs.weight", factors))
    return tensors


def _tensor(name: str, tensor: Tensor, config: ModelSpec) -> tuple[str, Tensor]:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name], tensor
    _, _, layer, suffix = name.split(".", 3)
    part, _, kind = suffix.rpartition(".")
    if _ARCHITECTURES[config.architecture] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
        tensor = interleave(tensor, config.heads if part.endswith("q_proj") else config.kv_heads)
    return f"blk.{layer}.{_NAMES[part]}.{kind}", tensor


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Rows of every head from halves to neighbouring pairs, as ggml rotates Llama's."""
    pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
