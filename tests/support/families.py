"""Tiny random models of every family, as Transformers builds them, and what runners are compared in with them.

They are the oracle of parity tests on every backend. A family, or a variant of one, is one entry: the class of its
configuration and what differs from SIZES.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.cache import SequenceState
from outrider.model import Feed, Runner

__all__ = [
    "CASES", "TOKENS", "VOCAB", "assert_agreement", "assert_greedy", "build_reference", "expected", "greedy_text", "logits",
    "reference_config",
]  # fmt: skip

VOCAB = 96
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # buffers of routers
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 76, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 512}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(5)],
    "long_factor": [1.0 + i for i in range(5)],
}
PHIMOE_ROPE = {"rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 64}
PHIMOE_ROPE |= {"long_factor": LONGROPE["short_factor"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
GROUPS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
GROUPS |= {"routed_scaling_factor": 2.5}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

DELTA = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 6,
    "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 9, "mamba_n_groups": 2, "mamba_d_conv": 4}
GRANITE4 = MAMBA | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 36,
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
}  # fmt: skip
ONE_PART = ["linear_attention", "full_attention"]
NEMOTRON = {
    "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 9, "head_dim": 12, "mamba_proj_bias": False,
    "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36,
}  # fmt: skip
FALCON_H1 = MAMBA | {
    "mamba_d_ssm": 48, "head_dim": 12, "mlp_multipliers": [0.8, 1.3], "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.2, "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9,
    "key_multiplier": 0.7, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3,
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-dynamic-long": (
        "Llama",
        {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 21, "head_dim": 14}),
    "qwen2": ("Qwen2", {"num_attention_heads": 5, "num_key_value_heads": 1}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 18, "attention_bias": True, "rope_parameters": YARN}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 17, "query_pre_attn_scalar": 12, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 17, "num_hidden_layers": 7, "tie_word_embeddings": True}),
    "phi": ("Phi", {"num_key_value_heads": 6, "partial_rotary_factor": 0.4}),
    "phi-normed": ("Phi", {"num_key_value_heads": 3, "qk_layernorm": True, "partial_rotary_factor": 0.4}),
    "phi3": ("Phi3", {"sliding_window": 25}),
    "phi3-longrope": (
        "Phi3", {"rope_parameters": LONGROPE | {"rope_theta": 1e4}, "original_max_position_embeddings": 64, "head_dim": 10},
    ),
    "phi4-mini": ("Phi3", {"partial_rotary_factor": 0.6, "tie_word_embeddings": True}),
    "glm": ("Glm", {"head_dim": 12, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": True}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 15, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]}),
    "exaone4": ("Exaone4", {"sliding_window": 13, "num_hidden_layers": 4}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral": ("Ministral", {"sliding_window": 22, "head_dim": 10}),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}, "head_dim": 16},
    ),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 14, "use_bias": True}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "starcoder": ("GPTBigCode", GPT2 | {"tie_word_embeddings": True}),
    "starcoder-heads": ("GPTBigCode", GPT2 | {"multi_query": False, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 18, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"tie_word_embeddings": True}),
    "cohere-normed": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.2, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"sliding_window": 16, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.4, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.6},
    ),
    "pythia": ("GPTNeoX", {"rotary_pct": 0.4}),
    "neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("GPTJ", GPT2 | {"rotary_dim": 4}),
    "nemotron": ("Nemotron", {"head_dim": 12, "attention_bias": True}),
    "gpt2": ("GPT2", GPT2 | {"tie_word_embeddings": True}),
    "gpt2-scaled": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 52, "tie_word_embeddings": True}),
    "opt": ("OPT", {"ffn_dim": 76, "word_embed_proj_dim": 60, "tie_word_embeddings": True}),
    "falcon-7b": ("Falcon", {"multi_query": True, "tie_word_embeddings": True}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-sequential": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral-window": ("Mixtral", EXPERTS | {"sliding_window": 21, "num_experts_per_tok": 3}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 36, "mlp_only_layers": [1]}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"head_dim": 14, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", EXPERTS | {"num_key_value_heads": 6}),
    "granite-moe": (
        "GraniteMoe",
        EXPERTS | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "phimoe": ("Phimoe", EXPERTS | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}),
    # Transformers takes the short factors of this family at every length
    "phimoe-longrope": ("Phimoe", EXPERTS | {"rope_parameters": LONGROPE | PHIMOE_ROPE}),
    "glm4-moe": (
        "Glm4Moe",
        EXPERTS | GROUPS | {"use_qk_norm": True, "attention_bias": True, "head_dim": 12, "n_shared_experts": 2},
    ),
    "minimax-m2": ("MiniMaxM2", EXPERTS | {"head_dim": 14, "rotary_dim": 8}),
    "gpt-oss": ("GptOss", EXPERTS | {"head_dim": 12, "sliding_window": 21, "num_experts_per_tok": 3}),
    "qwen3-next": ("Qwen3Next", DELTA | EXPERTS | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 36}),
    "qwen3.5": ("Qwen3_5Text", DELTA | {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5MoeText", DELTA | EXPERTS | {"shared_expert_intermediate_size": 36, "partial_rotary_factor": 0.5}),
    "granite-4-h": ("GraniteMoeHybrid", GRANITE4 | {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "granite-4-h-moe": ("GraniteMoeHybrid", GRANITE4 | EXPERTS | {"mamba_proj_bias": True}),
    "nemotron-h": ("NemotronH", NEMOTRON | {"layers_block_type": [*ONE_PART, "mlp", "linear_attention"]}),
    "nemotron-3": (
        "NemotronH", NEMOTRON | GROUPS | {"layers_block_type": [*ONE_PART, "moe"], "use_bias": True},
    ),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-normed": ("FalconH1", FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None}),
    "lfm2": ("Lfm2", LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2-biased": ("Lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 16, "intermediate_size": 120}),
    "lfm2-moe": ("Lfm2Moe", LFM2 | EXPERTS | {"num_dense_layers": 1, "use_expert_bias": True}),
}  # fmt: skip
# Transformers follows the text's length with dynamic tables; here they are those of the original length, doubled.
LENGTHS = {"llama-dynamic-long": 256}


def reference_config(name: str) -> dict[str, Any]:
    """The config.json that Transformers writes for a case."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    return config.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def build_reference(name: str, directory: Path | None, **sizes: Any) -> Any:
    """The Transformers model of a case with random weights, norms and biases included, saved in a directory if there is one."""
    import transformers

    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes, **sizes})
    if "rotary_dim" in changes and kind == "MiniMaxM2" and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0:
        pytest.skip("this version of Transformers turns whole heads of MiniMax-M2, whatever its rotary_dim")
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # others leave caps out
    with torch.no_grad():
        corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTIONS)]
        for parameter in [*model.parameters(), *corrections]:
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
            if parameter.dim() == 1:
                parameter += 0.5
    if directory is not None:
        model.save_pretrained(directory)
    return model


PROMPT, TOKENS = 56, 200
PAGES = [3, 9, 1, 7, 4, 12, 22, 15, 6, 18, 31, 2, 14, 28, 11, 5, 19, 8, 25]  # of 16 slots each
# token, parent: two branches from the root, one of them forking again
TREE = [(5, -1), (17, -1), (8, 0), (31, 0), (2, 2), (40, 1), (77, 4)]


def expected(reference: Any, tokens: list[int]) -> Tensor:
    """Transformers' logits of every token."""
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


def logits(runner: Runner, feed: Feed) -> Tensor:
    """A runner's logits of every row."""
    return runner.logits(runner.forward([feed]).last, range(len(feed.tokens) + len(feed.nodes)))


def assert_agreement(runner: Runner, reference: Any, prompt: int = PROMPT, bits: bool = True) -> None:
    """Logits of a prompt, of its tokens one by one and of the nodes of a tree are Transformers' within 1e-4.

    Those of models with recurrent layers are so in proportion to the largest: both are as far from float64. Those of tokens and
    of the root have the bits of the prompt.
    """
    text = [i * 37 % VOCAB for i in range(prompt)]
    start = runner.decoder.rotary_start(prompt)
    prefill, state = logits(runner, Feed(PAGES, 0, text, rotary_start=start)), SequenceState()
    want = expected(reference, text)
    atol = 1e-4 * (max(float(want.abs().max()), 1.0) if runner.decoder.spec.recurrent else 1.0)
    torch.testing.assert_close(prefill, want, atol=atol, rtol=0)
    steps = torch.cat([logits(runner, Feed(PAGES, i, [token], rotary_start=start, state=state)) for i, token in enumerate(text)])
    tokens, parents = zip(*TREE, strict=True)
    rows = logits(runner, Feed(PAGES, prompt - 1, text[-1:], tokens, parents, rotary_start=start, state=state))
    if bits:
        assert torch.equal(torch.cat((steps, rows[:1])), torch.cat((prefill, prefill[-1:])))
    torch.testing.assert_close(torch.cat((steps, rows[:1])), torch.cat((prefill, prefill[-1:])), atol=atol / 10, rtol=0)
    for node in range(len(TREE)):
        path, here = [tokens[node]], parents[node]
        while here >= 0:
            path.insert(0, tokens[here])
            here = parents[here]
        torch.testing.assert_close(rows[node + 1], expected(reference, text + path)[-1], atol=atol, rtol=0)


def greedy_text(runner: Runner, name: str, tokens: int = TOKENS) -> list[int]:
    """A prompt, and the tokens that a runner adds to it one by one."""
    length = LENGTHS.get(name, PROMPT + TOKENS)  # the table of a request is that of its maximum length
    text = [i * 11 % VOCAB for i in range(length - TOKENS)]
    start, end, state = runner.decoder.rotary_start(length), len(text) + tokens, SequenceState()
    row = logits(runner, Feed(PAGES, 0, text, rotary_start=start, state=state))[-1]
    while len(text) < end:
        text.append(int(row.argmax()))
        row = logits(runner, Feed(PAGES, len(text) - 1, text[-1:], rotary_start=start, state=state))[0]
    return text


def assert_greedy(read: Tensor, text: list[int], tokens: int = TOKENS) -> None:
    """The reader of a text would have written its last tokens too: its argmax after every prefix is the next token."""
    assert read[-tokens - 1 : -1].argmax(-1).tolist() == text[-tokens:]
