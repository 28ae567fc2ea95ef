"""Tiny random models of many architectures, as Transformers builds them, with weights that make lively texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.weights import export_model

__all__ = ["EXACT", "PLAIN", "VOCAB", "pyrite_in_transformers", "tiny_model"]

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
_MOE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_group": 2,
    "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 17, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 17, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "gpt2": ("GPT2", _GPT),
    "gpt-neox": ("GPTNeoX", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", _MOE | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}),
    "qwen3-moe": ("Qwen3Moe", _MOE | {"head_dim": 16, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 17, "num_hidden_layers": 4},
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2", _MLA | {"topk_method": "greedy"}),
    "deepseek-v3": ("DeepseekV3", _MLA),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}),
    "dots1": ("Dots1", _MLA | {"head_dim": 16, "num_key_value_heads": 2}),
    "apertus": ("Apertus", {}),
}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
_CHUNKED = {"attention_chunk_size": 16, "intermediate_size_mlp": 96, "head_dim": 16}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        _MOE | _LINEAR | {"head_dim": 16, "shared_expert_intermediate_size": 64, "num_hidden_layers": 4},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "jamba": ("Jamba", _MAMBA | {"num_experts": 2, "num_hidden_layers": 8}),
    "minimax": ("MiniMax", {"num_local_experts": 4, "layer_types": ["full_attention", "linear_attention", "full_attention"]}),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 8}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "llama4": ("Llama4Text", _CHUNKED | {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
}


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights in float32."""
    import transformers

    kind, settings = (EXACT | PLAIN)[name]
    config = getattr(transformers, f"{kind}Config")(**(_SIZES | settings | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
            elif "embed" not in key and "lm_head" not in key:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape))
    return model.eval()


def pyrite_in_transformers(folder: Path) -> tuple[Any, Any]:
    """Pyrite and its tokenizer as Transformers loads them, in float32, from files written to a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_model("pyrite", folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
