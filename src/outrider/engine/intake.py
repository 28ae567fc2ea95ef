"""What callers pass to LLM and the server: checked, and turned into one `Request` for each sample."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

from outrider import checks
from outrider.config import SPELLINGS, EngineConfig, RequestSpeculation, SpeculationConfig
from outrider.core import Request
from outrider.engine.build import Target
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter, ModelError
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = [
    "Intake",
    "Messages",
    "Prepared",
    "Prompt",
    "WantedLora",
    "WantedSpeculation",
    "conversations",
    "loras_for",
    "model_name",
    "params_for",
    "prompts_of",
    "split_keywords",
    "vllm_keywords",
]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
WantedLora = str | Sequence[str | None] | None
WantedSpeculation = bool | Mapping[str, Any] | RequestSpeculation | None
_LOOKUPS = ("ngram", "suffix")  # methods that look up earlier text, in the order in which a request gets them
_PROMPT = "must be a text or token ids"


class Prepared(NamedTuple):
    """A prompt that passed every check, as an EngineThread takes it."""

    requests: list[Request]  # one for each of n samples
    method: str  # that drafts for them


@dataclass(frozen=True, slots=True)
class Intake:
    """Turns what callers ask for into requests of one engine."""

    target: Target
    engine: Engine
    speculation: SpeculationConfig  # what is loaded
    ids: Iterator[int] = field(default_factory=count)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        speculation: WantedSpeculation = None,
        tenant: str | None = None,
        priority: int = 0,
        lora: str | None = None,
        prediction: Prompt | None = None,
        memory: str | None = None,
    ) -> Prepared:
        """Check one prompt with its parameters; nothing is queued yet.

        The output is likely to be like the prediction. `memory` owns the texts of requests without a tenant.
        """
        if tenant is not None:
            checks.text("tenant", tenant)
        checks.integer("priority", priority, -(2**31))
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_ids("prompt", ids, self.target.config.vocab)
        self._check_ids(ids, params)
        self._check_room(len(ids), params)
        if params.structured is not None:
            self.engine.grammars.check(params.structured)
        if params.bad_words:
            params = replace(params, bad_word_ids=self._bad_words(params.bad_words))
        wanted = self._wanted(speculation, params)
        request = Request(
            id=f"request-{next(self.ids)}",
            prompt_ids=ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.target.eos),
            max_tokens=self.target.max_model_len - len(ids) if params.max_tokens is None else params.max_tokens,
            speculate=wanted.enabled,
            tenant=tenant,
            priority=priority,
            method=wanted.method,
            draft_tokens=wanted.draft_tokens,
            return_rejected=wanted.return_rejected,
            adapter=None if lora is None else self.target.adapters.get(lora),
            memory="" if not wanted.remember else memory if tenant is None else None,
            prediction=self._predicted(prediction),
        )
        method = (wanted.method or self.speculation.method) if wanted.enabled else "none"
        return Prepared([replace(request, index=index) for index in range(params.n)], method)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.target.tokenizer is None:
            raise ModelError(f"{self.target.directory} holds no tokenizer; pass token ids instead of text")
        return self.target.tokenizer

    def texts_to_keep(self, texts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """The tokens of texts that drafters are to look up."""
        if isinstance(texts, str) or not _is_list(texts):
            raise InvalidParameter("texts", f"must be a list of texts, got {checks.shown(texts)}")
        return [
            self.tokenizer.encode_bare(checks.text("texts", text))
            if isinstance(text, str)
            else check_ids("texts", text, self.target.config.vocab)
            for text in texts
        ]

    def _predicted(self, prediction: Prompt | None) -> tuple[int, ...]:
        """The tokens of a prediction, as far as the context could hold them."""
        if prediction is None:
            return ()
        ids = self.tokenizer.encode_bare(checks.text("prediction", prediction)) if isinstance(prediction, str) else prediction
        return check_ids("prediction", ids, self.target.config.vocab)[: self.target.max_model_len]

    def _wanted(self, speculation: WantedSpeculation, params: SamplingParams) -> RequestSpeculation:
        """What a request asks of speculation, where it can be had."""
        wanted = self._limited(RequestSpeculation.parse(speculation), params)
        loaded = self.loaded_methods
        if wanted.method is not None and wanted.method not in loaded:
            raise InvalidParameter("speculation", f"method {wanted.method!r} is not loaded; loaded: {', '.join(loaded)}")
        if wanted.method == "none":
            return replace(wanted, enabled=False)
        return replace(wanted, method=None) if wanted.method == self.speculation.method else wanted

    @property
    def loaded_methods(self) -> list[str]:
        """The methods that a request may name."""
        return sorted({"none", *self.speculation.methods()})

    def _limited(self, wanted: RequestSpeculation, params: SamplingParams) -> RequestSpeculation:
        """What a request asks of speculation, with what other engines call a limit of its drafts."""
        limit, lookup = params.num_speculative_tokens, params.prompt_lookup_num_tokens
        if limit is None and lookup is None:
            return wanted
        name = "num_speculative_tokens" if lookup is None else "prompt_lookup_num_tokens"
        if wanted.draft_tokens is not None or (limit is not None and lookup is not None):
            raise InvalidParameter(name, "was given beside another limit of drafted tokens; pass one of them")
        if lookup is None:
            return replace(wanted, draft_tokens=limit)
        if wanted.method is not None and wanted.method not in _LOOKUPS:
            raise InvalidParameter(name, f"is for lookups ({', '.join(_LOOKUPS)}), not for method {wanted.method!r}")
        method = wanted.method or next((method for method in _LOOKUPS if method in self.loaded_methods), None)
        if method is None and self.speculation.method != "none":
            raise InvalidParameter(name, f"no lookup is loaded, but {', '.join(self.loaded_methods)}; start with --method auto")
        return replace(wanted, draft_tokens=lookup, method=method)

    def _check_ids(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        vocab = self.target.config.vocab
        if not ids:
            raise InvalidParameter("prompt", "must hold at least one token")
        check_ids("stop_token_ids", params.stop_token_ids or (), vocab)
        check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab)
        check_ids("logit_bias", tuple(params.logit_bias or ()), vocab)
        check_ids("bad_word_ids", tuple(token for word in params.bad_word_ids for token in word), vocab)

    def check_length(self, prompt: int) -> None:
        """Refuse a prompt of this many tokens where the context has no room for one more."""
        if prompt >= self.target.max_model_len:
            raise InvalidParameter(
                "prompt",
                f"has {prompt} tokens; the context holds {self.target.max_model_len}, output included",
                "context_length_exceeded",
            )

    def _check_room(self, prompt: int, params: SamplingParams) -> None:
        """Whether a prompt of so many tokens and its output fit the context and the KV memory."""
        self.check_length(prompt)
        room = self.target.max_model_len - prompt
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidParameter(
                "max_tokens",
                f"must be at most {room} after a prompt of {prompt} tokens, got {params.max_tokens}",
                "context_length_exceeded",
            )
        needed, pages = prompt + (room if params.max_tokens is None else params.max_tokens), self.engine.pages
        if pages.pages_for(needed) > pages.count:
            capacity = pages.count * pages.page_size
            raise InvalidParameter(
                "max_tokens", f"{needed} tokens do not fit the KV memory, which holds {capacity}; raise kv_bytes"
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word, as it starts a text and as it follows a space; added tokens without a logit are never chosen."""
        spelled = {self.tokenizer.encode_bare(prefix + word.lstrip()) for word in words for prefix in ("", " ")}
        return tuple(sorted(ids for ids in spelled if ids and max(ids) < self.target.config.vocab))


def model_name(model: object) -> str:
    """The path or hub id of a model; None is the bundled one."""
    if model is None:
        return str(bundled_model())
    if not isinstance(model, str | os.PathLike):
        raise InvalidParameter("model", f"must be a directory or a hub id like 'owner/name', got {checks.shown(model)}")
    return checks.text("model", os.fspath(model))


_ONE_DEVICE = ("pipeline_parallel_size", "data_parallel_size")
_WITHOUT_EFFECT = ("enforce_eager", "use_v2_block_manager", "disable_log_stats", "trust_remote_code")
_RENAMED = {"enable_prefix_caching": "prefix_cache", "kv_cache_dtype": "kv_dtype"}


def vllm_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """LLM's further keywords without those of vLLM that change nothing here, which are checked, and with our names."""
    kept = {}
    for name, value in keywords.items():
        if name in _ONE_DEVICE:
            if value != 1 or isinstance(value, bool):
                hint = "`outrider serve --data-parallel-size N` runs several replicas"
                hint = hint if name == "data_parallel_size" else "a model is shared by tensor_parallel_size"
                raise InvalidParameter(name, f"must be 1: {hint}; got {checks.shown(value)}")
        elif name in _WITHOUT_EFFECT:
            checks.boolean(name, value)
        else:
            kept[_RENAMED.get(name, name)] = value
    return kept


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
    changes = dict(changes)
    if (others := changes.pop("sampling_params", None)) is not None:  # as vLLM calls them
        if params is not None:
            raise InvalidParameter("sampling_params", "was given beside params; pass one of them")
        params = others
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


def loras_for(count: int, lora: Any) -> list[str | None]:
    """The adapter of each prompt, from one for all or one each."""
    if not _is_list(lora):
        return [lora] * count
    if len(lora) != count:
        raise InvalidParameter("lora", f"{len(lora)} adapters for {count} prompts")
    return list(lora)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
