"""Fields of other engines' requests that would change the result and are not served: they are refused by name, with ours.

A field with a value that has no effect passes, because some clients send every field that they know; so does one that is sent
under our name too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["check_served", "unknown_fields"]

_OFF: tuple[Any, ...] = (False, 0, "", [], {})  # values without effect, besides null
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values without effect of fields where they are others
    "repeat_penalty": (1.0, 0), "typical_p": (1.0,), "typical": (1.0,), "tfs_z": (1.0,), "tfs": (1.0,), "top_n_sigma": (-1, 0),
    "n_predict": (-1,), "num_predict": (-1,), "num_beams": (1, 0), "num_beam_groups": (1,), "guidance_scale": (1.0, 0),
    "cfg_scale": (1.0, 0), "encoder_repetition_penalty": (1.0,), "do_sample": (True,), "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,), "separate_reasoning": (True,), "stream_reasoning": (True,), "verbosity": ("medium",),
    "logprob_start_len": (-1, 0), "t_max_predict_ms": (-1, 0), "temperature_last": (False, True), "length_penalty": (1.0, 0),
    "adaptive_target": (-1,),
}  # fmt: skip
_OURS: Mapping[str, str] = {  # what to send here instead
    "repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens", "max_length": "max_tokens", "min_new_tokens": "min_tokens",
    "regex": "structured_outputs.regex", "do_sample": "temperature", "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar", "json_schema": "response_format", "format": "response_format",
    "n_probs": "logprobs", "top_n_tokens": "logprobs", "return_logprob": "logprobs", "top_logprobs_num": "logprobs",
    "logprob_start_len": "prompt_logprobs", "decoder_input_details": "prompt_logprobs", "input_ids": "a prompt of token ids",
    "prompt_token_ids": "a prompt of token ids", "lora_path": "model, which may name an adapter",
    "adapter_id": "model, which may name an adapter", "no_stop_trim": "include_stop_str_in_output",
    "banned_strings": "bad_words", "banned_tokens": "bad_words", "custom_token_bans": "logit_bias",
    "enable_thinking": "chat_template_kwargs.enable_thinking", "thinking": "chat_template_kwargs.thinking",
    "think": "chat_template_kwargs.thinking", "reasoning": "reasoning_effort", "options": "its fields beside the prompt",
    "sampling_params": "its fields beside the prompt", "echo": "/v1/completions",
}  # fmt: skip
_UNSERVED = frozenset(
    (
        *_NEUTRAL, *_OURS,
        # llama.cpp, and front ends that speak to several engines
        "mirostat", "mirostat_mode", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_a", "smoothing_factor",
        "skew", "epsilon_cutoff", "eta_cutoff", "penalize_nl", "samplers", "sampler_order", "sampler_priority", "min_keep",
        "n_indent", "image_data", "post_sampling_probs", "response_fields", "token_healing", "negative_prompt", "input_prefix",
        "input_suffix",
        # Transformers and TGI
        "penalty_alpha", "no_repeat_ngram_size", "diversity_penalty", "early_stopping", "force_words_ids", "watermark",
        "truncate", "sequence_bias", "dola_layers",
        # vLLM
        "use_beam_search", "prompt_embeds", "logits_processors", "truncate_prompt_tokens", "mm_processor_kwargs", "documents",
        "vllm_xargs", "return_tokens_as_token_ids", "logprob_token_ids", "repetition_detection", "chat_template",
        "add_special_tokens",
        # SGLang
        "logits_processor", "custom_logit_processor", "custom_params", "stop_regex", "session_params", "token_ids_logprob",
        "return_hidden_states", "input_embeds", "audio_data", "video_data",
    )
)  # fmt: skip
_WINDOWS = ("repeat_last_n", "repetition_penalty_range")  # tokens that penalties read; here it is all of them
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_WITHOUT_EFFECT = frozenset(  # known, and nothing of the result depends on them here
    (
        "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "modalities",
        "guided_decoding_backend", "cache_prompt", "id_slot", "rid", "n_keep", "n_discard", "parallel_tool_calls",
        "reasoning_effort", "stream_options", "best_of", "suffix", "functions", "function_call", "audio", "web_search_options",
        "lora", "timings_per_token", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "smoothing_curve",
    )
)  # fmt: skip


def check_served(data: Mapping[str, Any], served: Collection[str]) -> None:
    """Raise ValueError at the first field that would change the result and is not among those served."""
    for name, value in data.items():
        if (
            name in _UNSERVED
            and name not in served
            and value is not None
            and value not in _without_effect(name, "prompt" in served)
            and value != data.get(_OURS.get(name, ""))
        ):
            ours = f"; here: {_OURS[name]}" if name in _OURS else ""
            raise ValueError(f"{name} is not supported{ours}")
    for name in _WINDOWS:
        if data.get(name) not in (None, -1) and any(data.get(penalty) not in (None, off) for penalty, off in _PENALTIES.items()):
            raise ValueError(f"{name} is not supported: penalties read all earlier tokens")


def _without_effect(name: str, takes_text: bool) -> tuple[Any, ...]:
    """Values of a field that change nothing. A prompt of text has special tokens added, and a template writes them itself."""
    return (takes_text,) if name == "add_special_tokens" else _NEUTRAL.get(name, _OFF)


def unknown_fields(data: Mapping[str, Any], served: Collection[str]) -> tuple[str, ...]:
    """The fields that nothing here knows."""
    known = (_UNSERVED, _WITHOUT_EFFECT, _WINDOWS, served)
    return tuple(name for name in data if not any(name in names for names in known))
