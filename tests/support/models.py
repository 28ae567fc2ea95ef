"""Small random models of every family, and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from outrider.cache import KVPool
from outrider.model import Decoder, LoadOptions, ModelSpec, compile_spec, load_decoder
from outrider.model.memory import kv_pool

VOCAB = 199
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 500000.0,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 6, "hidden_size": 60},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 20, "num_hidden_layers": 4},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
HYBRIDS: dict[str, dict[str, Any]] = {  # with recurrent layers
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "head_dim": 16,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "ssm_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
    },
}


def family_config(name: str, dtype: str = "float32", **changes: Any) -> ModelSpec:
    return compile_spec(BASE | (FAMILIES | HYBRIDS)[name] | {"dtype": dtype} | changes)


def write_family(directory: Path, name: str, dtype: str = "float32", **changes: Any) -> Path:
    """A directory with config.json alone, for dummy loading."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(BASE | (FAMILIES | HYBRIDS)[name] | {"dtype": dtype} | changes))
    return directory


def random_decoder(directory: Path, seed: int = 0) -> Decoder:
    """Random weights, with biases and norms that are not trivial."""
    decoder = load_decoder(directory, LoadOptions(load_format="dummy", seed=seed))
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    with torch.no_grad():  # livelier logits: random models are otherwise nearly flat
        decoder.embedding *= 6.0
    return decoder


def make_pool(decoder: Decoder, page_size: int = 16, pages: int = 160, int8: bool = False) -> KVPool:
    return kv_pool(decoder.spec, pages, page_size, int8)


def write_tokenizer(directory: Path, vocab: int = 300, extra: tuple[str, ...] = ()) -> Path:
    """A byte-level BPE with an end-of-text token, as Transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["def main(argument): return argument + 1", "the quick brown fox jumps over the lazy dog", "naïve café 🙂 日本語"]
    special = ["<|end|>", *extra]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text * 3, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    settings["chat_template"] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
