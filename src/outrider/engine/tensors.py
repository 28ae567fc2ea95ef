"""`generate` with tensors: Transformers' configuration as sampling parameters, padded batches in, padded batches out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider import checks
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.speed_up import SpedUpModel

__all__ = ["TensorRequest", "params_of", "prepared_config", "run_request"]

_NEW_TOKENS = 20  # of a call that names no length, as in Transformers
_SEEDS = 2**62
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # settings that are not served, and their values that change nothing
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0.0,), "dola_layers": (), "typical_p": (1.0,), "top_h": (),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "forced_bos_token_id": (), "forced_eos_token_id": (), "sequence_bias": (),
    "exponential_decay_length_penalty": (), "suppress_tokens": (), "begin_suppress_tokens": (), "guidance_scale": (1.0,),
    "watermarking_config": (), "constraints": (), "force_words_ids": (), "max_time": (), "token_healing": (False,),
    "output_scores": (False,), "output_logits": (False,), "output_attentions": (False,), "output_hidden_states": (False,),
    "assistant_ensemble_weight": (), "use_mtp": (False,), "diversity_penalty": (0.0,),
}  # fmt: skip
_STANDARD = "transformers.generation"  # the module of processors and criteria that the configuration stands for


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A batch of left-padded token ids, and how to continue it."""

    ids: Tensor  # (B, L)
    mask: Tensor | None  # (B, L), 0 at padding; None: nothing is padded
    config: Any  # a GenerationConfig with a length
    streamer: Any = None
    expanded: bool = False  # rows are repeated already for num_return_sequences

    def check_extras(self, processors: Any, criteria: Any) -> None:
        """Refuse processors and criteria that the configuration does not stand for."""
        for kind, extras in (("logits_processor", processors), ("stopping_criteria", criteria)):
            for extra in extras or ():
                if not type(extra).__module__.startswith(_STANDARD):
                    raise InvalidParameter(
                        kind,
                        f"{type(extra).__name__} is not served; use settings of generation_config, or generate without Outrider",
                    )


def prepared_config(base: Any, settings: Mapping[str, Any], length: int, context: int) -> Any:
    """A generation configuration with a call's settings, and a length for inputs of `length` tokens."""
    config = copy.deepcopy(settings.get("generation_config") or base)
    config.update(**base.to_dict(), defaults_only=True)
    for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "negative_prompt_ids", "custom_generate"):
        if settings.get(name) is not None:
            raise InvalidParameter(name, "is not served; use settings of generation_config, or generate without Outrider")
    changes = {name: value for name, value in settings.items() if value is not None and name != "generation_config"}
    for name in ("token_type_ids", "position_ids", "use_cache", "logits_to_keep", "synced_gpus", "cache_implementation"):
        changes.pop(name, None)
    unknown = config.update(**changes)
    if unknown:
        name = next(iter(unknown))
        known = [key for key in config.to_dict() if not key.startswith("_")]
        raise InvalidParameter(name, f"is not a setting of generate{checks.nearest(name, known)}")
    if config.max_new_tokens is not None:
        config.max_length = length + config.max_new_tokens
    elif settings.get("max_length") is None and config.max_length is None:
        config.max_length = min(length + _NEW_TOKENS, context)
    return config


def run_request(llm: SpedUpModel, request: TensorRequest) -> Any:
    """Continue every row; rows end when they end, and are padded to the longest."""
    config, (rows, length) = request.config, request.ids.shape
    prompts = _prompts(request)
    copies = 1 if request.expanded else config.num_return_sequences or 1
    each = [params_of(config, length, copies) for _ in range(rows)]
    if request.streamer is not None:
        texts = [_streamed(llm, request, prompts, each)]
    else:
        outputs = llm.complete(prompts, each)
        texts = [output.token_ids for one in outputs for output in one.outputs]
    pad = _pad_id(config)
    longest = max(map(len, texts))
    filled = torch.tensor([text + [pad] * (longest - len(text)) for text in texts], dtype=request.ids.dtype)
    sequences = torch.cat((request.ids.repeat_interleave(copies, 0), filled.to(request.ids.device)), 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _streamed(llm: SpedUpModel, request: TensorRequest, prompts: list[list[int]], each: list[SamplingParams]) -> list[int]:
    """One row, its tokens given to a streamer as they come."""
    if len(prompts) != 1 or each[0].n != 1:
        raise InvalidParameter("streamer", f"takes one sequence, got {len(prompts)} rows of {each[0].n}")
    request.streamer.put(request.ids.cpu())
    tokens: list[int] = []
    for piece in llm.stream(prompts[0], each[0]):
        for token in piece.token_ids:
            tokens.append(token)
            request.streamer.put(torch.tensor([token]))
    request.streamer.end()
    return tokens


def params_of(config: Any, length: int, copies: int) -> SamplingParams:
    """Sampling parameters that mean what a generation configuration does, after inputs of `length` tokens.

    Seeds come from torch's generator, so `torch.manual_seed` makes a sampled call repeatable.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise InvalidParameter(name, f"{checks.shown(value)} is not served; leave it out, or generate without Outrider")
    eos = config.eos_token_id
    least = max((config.min_length or 0) - length, config.min_new_tokens or 0, 0)
    count = config.max_length - length
    if count < 1:
        raise InvalidParameter(
            "max_length", f"{config.max_length} leaves no room after inputs of {length} tokens; raise max_new_tokens"
        )
    stop = config.stop_strings
    settings: dict[str, Any] = {
        "n": copies,
        "max_tokens": count,
        "min_tokens": min(least, count),
        "repetition_penalty": _or(config.repetition_penalty, 1.0),
        "stop_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        "ignore_eos": True,
        "bad_word_ids": tuple(map(tuple, config.bad_words_ids or ())),
        "stop": [stop] if isinstance(stop, str) else stop,
        "include_stop_str_in_output": True,
    }
    if not config.do_sample:
        return SamplingParams(temperature=0.0, **settings)
    return SamplingParams(
        temperature=_or(config.temperature, 1.0),
        top_k=_or(config.top_k, 50),
        top_p=_or(config.top_p, 1.0),
        min_p=_or(config.min_p, 0.0),
        seed=int(torch.randint(_SEEDS, (1,)).item()),
        **settings,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _prompts(request: TensorRequest) -> list[list[int]]:
    """Token ids of each row, without its padding on the left."""
    if request.ids.dim() != 2 or request.ids.is_floating_point() or not request.ids.numel():
        raise InvalidParameter("input_ids", f"must be token ids of shape (batch, length), got {tuple(request.ids.shape)}")
    rows: list[list[int]] = request.ids.tolist()
    if request.mask is None:
        return rows
    if request.mask.shape != request.ids.shape:
        raise InvalidParameter("attention_mask", f"has shape {tuple(request.mask.shape)}, input_ids {tuple(request.ids.shape)}")
    prompts = []
    for row, seen in zip(rows, request.mask.tolist(), strict=True):
        first = next((i for i, one in enumerate(seen) if one), len(seen))
        if not all(seen[first:]) or first == len(seen):
            raise InvalidParameter("attention_mask", "rows must be padded on the left alone; set tokenizer.padding_side='left'")
        prompts.append(row[first:])
    return prompts


def _pad_id(config: Any) -> int:
    for value in (config.pad_token_id, config.eos_token_id):
        if value is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    return 0
