"""Fields of the config.json of models that people run, and what must be read from them.

Sources: the models' public config files; fields that do not change the spec are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["REAL_CONFIGS", "Real"]


class Real(NamedTuple):
    """What a config must be read as."""

    billions: float  # parameters
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    config: dict[str, Any]
    rotary: str = "default"  # kinds, joined by "+"
    windows: str = ""  # window x layers that have it
    features: str = ""  # beyond a Llama layer


_NAMES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def _c(architecture: str, sizes: str, **fields: Any) -> dict[str, Any]:
    """A config from its architecture, `sizes` (vocab hidden layers heads kv_heads ffn; "-" where there is none) and fields."""
    given = {name: int(size) for name, size in zip(_NAMES, sizes.split(), strict=True) if size != "-"}
    return {"architectures": [architecture], "max_position_embeddings": 4096, **given, **fields}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _longrope(pairs: int) -> dict[str, Any]:
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}


_L, _M, _Q2, _Q3, _P3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA2 = "attention soft cap, embedding scale, gelu_tanh activation, logit soft cap, norm after a part, sliding window"
_GEMMA3 = "embedding scale, gelu_tanh activation, norm after a part, q/k norm, sliding window"
_GEMMA3_FIELDS = {"sliding_window": 1024, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256}
_GEMMA3_NESTED = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}, "torch_dtype": "bfloat16"}
_LINEAR8 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_ALTERNATING3 = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_NEOX = "gelu activation, layer norm, parallel attention and MLP, ungated MLP"
_GPT = "gelu_tanh activation, layer norm, learned positions, no rotary, ungated MLP"
_COHERE = "layer norm, logit scale, parallel attention and MLP"
_MULTIPLIERS = "embedding scale, logit scale, residual scale"
_DELTA = "gated delta rule, output gate, q/k norm"
_LINEAR = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip

# name: billions, layers, heads, KV heads, head width, config, rotary kinds, windows, features
REAL_CONFIGS: dict[str, Real] = {
    "Llama-2-7B": Real(6.74, 32, 32, 32, 128, _c(_L, "32000 4096 32 32 32 11008")),
    "Llama-3.1-8B": Real(
        8.03, 32, 32, 8, 128,
        _c(_L, "128256 4096 32 32 8 14336", max_position_embeddings=131072, rope_theta=5e5, rope_scaling=_llama3(8.0)), "llama3",
    ),
    "Llama-3.2-1B": Real(
        1.24, 16, 32, 8, 64, _c(_L, "128256 2048 16 32 8 8192", head_dim=64, rope_scaling=_llama3(32.0), **_TIED), "llama3",
    ),
    "Llama-3.2-3B": Real(
        3.21, 28, 24, 8, 128, _c(_L, "128256 3072 28 24 8 8192", head_dim=128, rope_scaling=_llama3(32.0), **_TIED), "llama3",
    ),
    "CodeLlama-34B": Real(33.74, 48, 64, 8, 128, _c(_L, "32000 8192 48 64 8 22016", rope_theta=1e6)),
    "Vicuna-7B-v1.5": Real(6.74, 32, 32, 32, 128, _c(_L, "32000 4096 32 32 - 11008")),
    "SmolLM2-1.7B": Real(1.71, 24, 32, 32, 64, _c(_L, "49152 2048 24 32 32 8192", rope_theta=130000, **_TIED)),
    "Mistral-7B-v0.1": Real(
        7.24, 32, 32, 8, 128, _c(_M, "32000 4096 32 32 8 14336", sliding_window=4096, max_position_embeddings=32768),
        windows="4096x32", features="sliding window",
    ),
    "Mistral-7B-v0.3": Real(7.25, 32, 32, 8, 128, _c(_M, "32768 4096 32 32 8 14336", sliding_window=None, rope_theta=1e6)),
    "Ministral-8B": Real(
        8.02, 36, 32, 8, 128,
        _c("MinistralForCausalLM", "131072 4096 36 32 8 12288", head_dim=128, rope_theta=1e8, sliding_window=32768,
           layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 9),
        windows="32768x27", features="sliding window",
    ),
    "Ministral-3-8B": Real(
        8.49, 34, 32, 8, 128,
        {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}, "text_config": {
            "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
            "max_position_embeddings": 262144, "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e6,
                "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}},
        "yarn", features="queries scaled by position",
    ),
    "Qwen2-7B": Real(7.62, 28, 28, 4, 128, _c(_Q2, "152064 3584 28 28 4 18944", rope_theta=1e6, use_sliding_window=False)),
    "Qwen2.5-1.5B": Real(1.54, 28, 12, 2, 128, _c(_Q2, "151936 1536 28 12 2 8960", rope_theta=1e6, **_TIED)),
    "Qwen2.5-7B": Real(7.62, 28, 28, 4, 128, _c(_Q2, "152064 3584 28 28 4 18944", max_position_embeddings=32768)),
    "Qwen3-0.6B": Real(0.596, 28, 16, 8, 128, _c(_Q3, "151936 1024 28 16 8 3072", head_dim=128, **_TIED), features="q/k norm"),
    "Qwen3-8B": Real(8.19, 36, 32, 8, 128, _c(_Q3, "151936 4096 36 32 8 12288", head_dim=128), features="q/k norm"),
    "Qwen3-32B": Real(32.76, 64, 64, 8, 128, _c(_Q3, "151936 5120 64 64 8 25600", head_dim=128), features="q/k norm"),
    "Gemma-2B": Real(
        2.51, 18, 8, 1, 256, _c("GemmaForCausalLM", "256000 2048 18 8 1 16384", head_dim=256),
        features="embedding scale, gelu_tanh activation",
    ),
    "Gemma-2-9B": Real(
        9.24, 42, 16, 8, 256,
        _c("Gemma2ForCausalLM", "256000 3584 42 16 8 14336", head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
           attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        windows="4096x21", features=_GEMMA2,
    ),
    "Gemma-3-1B": Real(
        1.0, 26, 4, 1, 256,
        _c("Gemma3ForCausalLM", "262144 1152 26 4 1 6912", head_dim=256, sliding_window_pattern=6,
           **(_GEMMA3_FIELDS | {"sliding_window": 512})),
        windows="512x22", features=_GEMMA3,
    ),
    "Gemma-3-4B": Real(  # its text_config leaves out what equals the defaults of Transformers
        3.88, 34, 8, 4, 256,
        _GEMMA3_NESTED | {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                                          "num_hidden_layers": 34, "sliding_window": 1024} | _LINEAR8},
        "default+linear", "1024x29", _GEMMA3,
    ),
    "Gemma-3-12B": Real(
        11.77, 48, 16, 8, 256,
        _GEMMA3_NESTED | {"text_config": {"model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360,
                                          "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
                                          "sliding_window": 1024} | _LINEAR8},
        "default+linear", "1024x40", _GEMMA3,
    ),
    "Phi-2": Real(
        2.78, 32, 32, 32, 80, _c("PhiForCausalLM", "51200 2560 32 32 32 10240", partial_rotary_factor=0.4, hidden_act="gelu_new"),
        features="gelu_tanh activation, layer norm, output bias, parallel attention and MLP, ungated MLP",
    ),
    "Phi-3-mini-128k": Real(
        3.82, 32, 32, 32, 96,
        _c(_P3, "32064 3072 32 32 32 8192", max_position_embeddings=131072, original_max_position_embeddings=4096,
           rope_scaling=_longrope(48), sliding_window=262144),
        "longrope", "262144x32", "several rotary tables, sliding window",
    ),
    "Phi-3.5-mini": Real(
        3.82, 32, 32, 32, 96,
        _c(_P3, "32064 3072 32 32 32 8192", max_position_embeddings=131072, original_max_position_embeddings=4096,
           rope_scaling=_longrope(48), sliding_window=262144),
        "longrope", "262144x32", "several rotary tables, sliding window",
    ),
    "Phi-4": Real(14.66, 40, 40, 10, 128, _c(_P3, "100352 5120 40 40 10 17920", rope_theta=250000, sliding_window=None)),
    "Phi-4-mini": Real(
        3.84, 32, 24, 8, 128,
        _c(_P3, "200064 3072 32 24 8 8192", max_position_embeddings=131072, original_max_position_embeddings=4096,
           partial_rotary_factor=0.75, rope_scaling=_longrope(48), sliding_window=262144, **_TIED),
        "longrope", "262144x32", "several rotary tables, sliding window",
    ),
    "GLM-4-9B": Real(
        9.4, 40, 32, 2, 128,
        _c("GlmForCausalLM", "151552 4096 40 32 2 13696", head_dim=128, attention_bias=True, partial_rotary_factor=0.5),
    ),
    "Granite-3.1-8B": Real(
        8.17, 40, 32, 8, 128,
        _c("GraniteForCausalLM", "49155 4096 40 32 8 12800", embedding_multiplier=12.0, attention_multiplier=0.0078125,
           residual_multiplier=0.22, logits_scaling=16.0, rope_theta=1e7, **_TIED),
        features=_MULTIPLIERS,
    ),
    "OLMo-2-7B": Real(
        7.3, 32, 32, 32, 128, _c("Olmo2ForCausalLM", "100352 4096 32 32 32 11008", rope_theta=5e5),
        features="no norm before a part, norm after a part, q/k norm, q/k norm over the width",
    ),
    "OLMo-3-7B": Real(
        7.3, 32, 32, 32, 128,
        _c("Olmo3ForCausalLM", "100278 4096 32 32 32 11008", sliding_window=4096, layer_types=_ALTERNATING3 * 8,
           rope_theta=5e5, max_position_embeddings=65536, rope_scaling={
               "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079,
               "beta_fast": 32.0, "beta_slow": 1.0}),
        "default+yarn", "4096x24", "no norm before a part, norm after a part, q/k norm, q/k norm over the width, sliding window",
    ),
    "SmolLM3-3B": Real(
        3.08, 36, 16, 4, 128,
        _c("SmolLM3ForCausalLM", "128256 2048 36 16 4 11008", no_rope_layers=[1, 1, 1, 0] * 9, rope_theta=5e6, **_TIED),
        features="no rotary",
    ),
    "EXAONE-4.0-32B": Real(
        32.0, 64, 40, 8, 128,
        _c("Exaone4ForCausalLM", "102400 5120 64 40 8 27392", head_dim=128, sliding_window=4096, rope_theta=1e6,
           layer_types=_ALTERNATING3 * 16, rope_scaling=_llama3(16.0), max_position_embeddings=131072),
        "llama3", "4096x48", "no norm before a part, no rotary, norm after a part, q/k norm, sliding window",
    ),
    "StarCoder": Real(
        15.52, 40, 48, 1, 128,
        {"architectures": ["GPTBigCodeForCausalLM"], "vocab_size": 49152, "n_embd": 6144, "n_layer": 40, "n_head": 48,
         "n_inner": 24576, "n_positions": 8192, "multi_query": True, "activation_function": "gelu"},
        "none", features=_GPT.replace("gelu_tanh", "gelu"),
    ),
    "StarCoder2-7B": Real(
        7.17, 32, 36, 4, 128,
        _c("Starcoder2ForCausalLM", "49152 4608 32 36 4 18432", hidden_act="gelu_pytorch_tanh", use_bias=True,
           sliding_window=4096, **_TIED),
        windows="4096x32", features="gelu_tanh activation, layer norm, sliding window, ungated MLP",
    ),
    "Command-R": Real(
        34.98, 40, 64, 64, 128, _c("CohereForCausalLM", "256000 8192 40 64 64 22528", logit_scale=0.0625), features=_COHERE,
    ),
    "Command-R7B": Real(
        8.03, 32, 32, 8, 128,
        _c("Cohere2ForCausalLM", "256000 4096 32 32 8 14336", head_dim=128, logit_scale=0.25, sliding_window=4096,
           sliding_window_pattern=4),
        windows="4096x24", features=f"{_COHERE}, no rotary, sliding window",
    ),
    "StableLM-2-12B": Real(
        12.14, 40, 32, 8, 160,
        _c("StableLmForCausalLM", "100352 5120 40 32 8 13824", partial_rotary_factor=0.25, qk_layernorm=True,
           use_parallel_residual=True),
        features="layer norm, parallel attention and MLP, q/k norm",
    ),
    "Pythia-6.9B": Real(
        6.86, 32, 32, 32, 128, _c("GPTNeoXForCausalLM", "50432 4096 32 32 - 16384", rotary_pct=0.25), features=_NEOX,
    ),
    "GPT-NeoX-20B": Real(
        20.55, 44, 64, 64, 96, _c("GPTNeoXForCausalLM", "50432 6144 44 64 - 24576", rotary_pct=0.25, hidden_act="gelu_fast"),
        features=_NEOX.replace("gelu", "gelu_tanh"),
    ),
    "GPT-J-6B": Real(
        6.05, 28, 16, 16, 256,
        {"architectures": ["GPTJForCausalLM"], "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16,
         "n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new", "tie_word_embeddings": False},
        features=f"{_NEOX.replace('gelu', 'gelu_tanh')}, output bias",
    ),
    "Minitron-8B": Real(
        8.27, 32, 48, 8, 128,
        _c("NemotronForCausalLM", "256000 4096 32 48 8 16384", head_dim=128, hidden_act="relu2", partial_rotary_factor=0.5),
        features="layer norm, relu2 activation, ungated MLP",
    ),
    "Falcon-7B": Real(
        6.92, 32, 71, 1, 64, _c("FalconForCausalLM", "65024 4544 32 71 - -", multi_query=True, parallel_attn=True, bias=False),
        features=_NEOX,
    ),
    "Falcon-40B": Real(
        41.3, 60, 128, 8, 64, _c("FalconForCausalLM", "65024 8192 60 128 - -", new_decoder_architecture=True, num_kv_heads=8),
        features=_NEOX,
    ),
    "GPT-2": Real(
        0.124, 12, 12, 12, 64,
        {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
         "n_positions": 1024},
        "none", features=_GPT,
    ),
    "OPT-6.7B": Real(
        6.66, 32, 32, 32, 128,
        _c("OPTForCausalLM", "50272 4096 32 32 - -", ffn_dim=16384, max_position_embeddings=2048, do_layer_norm_before=True),
        "none", features="layer norm, learned positions, no rotary, relu activation, ungated MLP",
    ),
    "MiniCPM-2B": Real(
        2.72, 40, 36, 36, 64,
        _c("MiniCPMForCausalLM", "122753 2304 40 36 36 5760", scale_emb=12, dim_model_base=256, scale_depth=1.4, **_TIED),
        features=_MULTIPLIERS,
    ),
    "Qwen3-Next-80B-A3B": Real(
        79.67, 48, 16, 2, 256,
        _c(
            "Qwen3NextForCausalLM", "151936 2048 48 16 2 5120", head_dim=256, num_experts=512, num_experts_per_tok=10,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, partial_rotary_factor=0.25, rope_theta=1e7, **_LINEAR,
        ),
        features=f"{_DELTA}, gate of the shared expert, mixture of experts, shared expert",
    ),
    "Qwen3.5-4B": Real(
        4.21, 32, 16, 4, 256,
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {},
            "text_config": _c(
                "", "248320 2560 32 16 4 9216", model_type="qwen3_5_text", head_dim=256, **_LINEAR, **_TIED,
                rope_parameters={"rope_type": "default", "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
            ),
        },
        features=_DELTA,
    ),
    "Qwen3.5-35B-A3B": Real(
        34.66, 40, 16, 2, 256,
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {},
            "text_config": _c(
                "", "248320 2048 40 16 2 -", model_type="qwen3_5_moe_text", head_dim=256, num_experts=256, num_experts_per_tok=8,
                moe_intermediate_size=512, shared_expert_intermediate_size=512, **_LINEAR,
            ),
        },
        features=f"{_DELTA}, gate of the shared expert, mixture of experts, shared expert",
    ),
    "LFM2-1.2B": Real(
        1.17, 16, 32, 8, 64,
        _c(
            "Lfm2ForCausalLM", "65536 2048 16 32 8 -", block_ff_dim=12288, full_attn_idxs=[2, 5, 8, 10, 12, 14],
            conv_L_cache=3, rope_theta=1e6, **_TIED,
        ),
        features="q/k norm, short convolution",
    ),
    "Granite-4.0-H-Tiny": Real(
        6.94, 40, 12, 4, 128,
        _c(
            "GraniteMoeHybridForCausalLM", "100352 1536 40 12 4 512", num_local_experts=64, num_experts_per_tok=6,
            shared_intermediate_size=1024, layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, embedding_multiplier=12, residual_multiplier=0.22,
            attention_multiplier=0.0078125, logits_scaling=6, position_embedding_type="nope", **_TIED,
        ),
        "none", features=f"Mamba-2, mixture of experts, no rotary, shared expert, {_MULTIPLIERS}",
    ),
    "Nemotron-H-8B": Real(
        8.10, 52, 32, 8, 128,
        _c(
            "NemotronHForCausalLM", "131072 4096 52 32 8 21504", head_dim=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8,
            ssm_state_size=128, hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", mlp_hidden_act="relu2",
        ),
        "none", features="Mamba-2, no MLP, no mixer, no rotary, relu2 activation, ungated MLP",
    ),
}  # fmt: skip
