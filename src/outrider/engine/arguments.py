"""What callers pass to LLM, checked as far as no engine is needed: the model, keywords, prompts, messages, parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from outrider import checks
from outrider.config import SPELLINGS, EngineConfig
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams

__all__ = [
    "Messages",
    "Prompt",
    "check_ids",
    "conversations",
    "model_name",
    "params_for",
    "prompts_of",
    "split_keywords",
]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_PROMPT = "must be a text or token ids"


def model_name(model: object) -> str:
    """The path or hub id of a model; None is the bundled one."""
    if model is None:
        return str(bundled_model())
    if not isinstance(model, str | os.PathLike):
        raise InvalidParameter("model", f"must be a directory or a hub id like 'owner/name', got {checks.shown(model)}")
    return checks.text("model", os.fspath(model))


def split_keywords(keywords: Mapping[str, Any]) -> tuple[EngineConfig, dict[str, Any]]:
    """LLM's further keywords: the engine's sizes, and what other engines call settings of speculation."""
    sizes = [field.name for field in fields(EngineConfig)]
    others = {name: value for name, value in keywords.items() if name in ("speculative_config", *SPELLINGS)}
    for name in keywords:
        if name not in sizes and name not in others:
            hint = checks.nearest(name, (*sizes, *SPELLINGS))
            raise InvalidParameter(name, f"is not a setting of LLM{hint}; sizes are: {', '.join(sizes)}")
    return EngineConfig(**{name: value for name, value in keywords.items() if name in sizes}), others


def prompts_of(prompts: Any) -> list[Prompt]:
    """A batch from one prompt or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidParameter("prompt", f"{_PROMPT}, or a list of these, got {checks.shown(prompts)}")
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise InvalidParameter("prompt", f"{_PROMPT}, got {checks.shown(prompt)} in the list")
    return list(prompts)


def check_ids(name: str, tokens: Any, vocab: int) -> tuple[int, ...]:
    """Token ids that the model has."""
    if not _is_list(tokens):
        raise InvalidParameter(name, f"{_PROMPT}, got {checks.shown(tokens)}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise InvalidParameter(name, f"token id {checks.shown(token)} is outside the vocabulary [0, {vocab - 1}]")
    return tuple(tokens)


def conversations(messages: Any) -> list[Messages]:
    """Several conversations from one or several, each a list of messages."""
    several = messages if _is_list(messages) and len(messages) and _is_list(messages[0]) else [messages]
    for conversation in several:
        if not _is_list(conversation) or not conversation or not all(isinstance(message, Mapping) for message in conversation):
            example = '[{"role": "user", "content": "..."}]'
            raise InvalidParameter("messages", f"must be a list such as {example}, or several, got {checks.shown(conversation)}")
    return list(several)


def params_for(count: int, params: Any, default: SamplingParams, changes: Mapping[str, Any]) -> list[SamplingParams]:
    """Parameters of each prompt, from one for all or one each, with changes that were passed by keyword."""
    known = [field.name for field in fields(SamplingParams) if field.init]
    for name in changes:
        if name not in known:
            hint = checks.nearest(name, known)
            raise InvalidParameter(name, f"is not a sampling parameter{hint}; known: {', '.join(known)}")
    several = params if _is_list(params) else [default if params is None else params] * count
    if not all(isinstance(one, SamplingParams) for one in several):
        raise InvalidParameter("params", f"must be SamplingParams or a list of them, got {checks.shown(params)}")
    if len(several) != count:
        raise InvalidParameter("params", f"{len(several)} sets of parameters for {count} prompts")
    return [replace(one, **changes) for one in several] if changes else list(several)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
