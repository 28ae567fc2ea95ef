"""LLM: load a model, generate, chat, stream."""

from __future__ import annotations

import atexit
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from outrider.cache import KVPool
from outrider.config import EngineConfig, RequestSpeculation, SpeculationConfig
from outrider.control import Adaptive, Costs, FixedLength, Policy
from outrider.core import Request
from outrider.draft import DraftContext, build_drafter, check_method
from outrider.draft.auto import arms_of, resolve_auto
from outrider.engine.commit import Writer
from outrider.engine.costs_file import costs_path, known_acceptance
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput, StreamPiece
from outrider.engine.surveying import survey_costs
from outrider.errors import InvalidParameter, ModelError
from outrider.model import Decoder, LoadOptions, ModelConfig, Runner, load_decoder, locate
from outrider.model.bundled import bundled_model
from outrider.model.load import INT8, generation_defaults, is_int8
from outrider.ops.native import find_core
from outrider.platform import guard
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_KV_SHARE_OF_MEMORY = 0.25
_SURVEYED = (1, 8, 64)  # sequences with which costs are measured, the last on a GPU alone: elsewhere it would take long


@dataclass(frozen=True, slots=True)
class _Prepared:
    text: str | None
    ids: tuple[int, ...]
    params: SamplingParams
    tenant: str | None = None


class LLM:
    """A model ready to generate.

    `speculation` is a method's name ("ngram", "draft_model", "none") or its settings, such as
    {"method": "draft_model", "model": path, "draft_tokens": 5, "rule": "match"}. vLLM's
    `speculative_config`, `speculative_model` and `num_speculative_tokens` are understood too.
    `device` is "auto" (a GPU where there is one), "cpu" or "cuda". On a GPU, `memory` is the share of it that
    weights, KV and graphs may take, and `numerics="fast"` gives up the same-tokens promise for other kernels.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculation: str | Mapping[str, Any] | SpeculationConfig | None = None,
        dtype: str = "auto",
        load_format: str = "safetensors",
        revision: str | None = None,
        device: str = "auto",
        numerics: str = "exact",
        memory: float = 0.9,
        speculative_config: Mapping[str, Any] | None = None,
        speculative_model: str | None = None,
        num_speculative_tokens: int | None = None,
        **sizes: Any,
    ) -> None:
        self._costs_path: Path | None = None
        self._companions: list[Runner] = []
        self._target: Runner | None = None
        self.speculation = _speculation(speculation, speculative_config, speculative_model, num_speculative_tokens)
        for method in self.speculation.methods():
            check_method(method)
        config = _engine_config(sizes)
        self.device = Device.resolve(device, numerics, memory)
        self.directory = locate(str(model or bundled_model()), revision)
        self._options = LoadOptions(dtype, load_format, widen=not guard().bf16_products)
        decoder = load_decoder(self.directory, self._options)
        self.config: ModelConfig = decoder.config
        self.max_model_len = min(config.max_model_len or self.config.context, self.config.context)
        self.tokenizer = Tokenizer.load(self.directory)
        self._defaults, self._eos = generation_defaults(self.directory, self.config)
        if self.tokenizer is not None and self.tokenizer.eos_id is not None:
            self._eos |= {self.tokenizer.eos_id}
        if self.speculation.method == "auto":
            self.speculation = resolve_auto(self.speculation, self.directory, self.device.is_gpu)
        self._layout = (self._page_count(config), config.page_size)
        self._target = runner = self._runner(decoder)
        context = DraftContext(self.speculation, runner, self.directory, self._options, self._companion, self.tokenizer)
        drafter = build_drafter(context)
        measured = self._warm_up(runner, drafter.needs.taps, config) if self.device.is_gpu else Costs()
        policy = self._policy(runner, measured)
        self._sizes = replace(config, max_model_len=self.max_model_len)
        self.engine = Engine(runner, self.tokenizer, drafter, policy, self._sizes)
        self._ids = count()
        if self.device.is_gpu:
            self.measure_costs()  # a moment on a GPU; graphs alone say nothing of the work between them

    def beside(self, speculation: str) -> LLM:
        """The same weights and KV memory, drafted for by another method: to compare the two and nothing else."""
        other = copy(self)
        other._costs_path, other._companions = None, []
        other.speculation = _speculation(speculation, None, None, None)
        runner = self.engine.runner
        drafter = build_drafter(
            DraftContext(other.speculation, runner, self.directory, self._options, other._companion, self.tokenizer)
        )
        policy = other._policy(runner, Costs())
        other.engine = Engine(runner, self.tokenizer, drafter, policy, self._sizes, self.engine.pages)
        return other

    def _policy(self, runner: Runner, measured: Costs) -> Policy:
        """Fixed lengths for a method that was named, the controller where all may be chosen from."""
        own = self.speculation
        if own.method != "auto":
            return FixedLength(own.draft_tokens if own.method != "none" else 0, own.rule)
        self._costs_path = costs_path(self.directory, runner)
        atexit.register(_save_costs, weakref.ref(self))
        kept = Costs.load(self._costs_path)
        if measured.knows_forward:  # a GPU's graphs, just now
            measured.accepted = kept.accepted
            kept = measured
        kept.accepted = kept.accepted or known_acceptance(self.directory)
        return Adaptive(arms_of(own.nested(), self.device.is_gpu), kept)

    def _warm_up(self, runner: Runner, taps: tuple[int, ...], config: EngineConfig) -> Costs:
        """On a GPU: the graphs a run will need, and what each costs."""
        length = max(own.draft_tokens if own.method != "none" else 0 for own in self.speculation.flat())
        return self.device.warm_up(runner, self._companions, taps, config.max_num_seqs, length)

    def measure_costs(self) -> None:
        """Time forwards and proposals of all sizes now, in a second or two, instead of learning them in service."""
        if isinstance(self.engine.policy, Adaptive):
            most = self.engine.scheduler.most
            survey_costs(self.engine, sorted({min(batch, most) for batch in _SURVEYED[: 3 if self.device.is_gpu else 2]}))
            self.save_costs()

    def save_costs(self) -> None:
        """Keep what was measured for the next start on this machine."""
        if isinstance(self.engine.policy, Adaptive) and self._costs_path is not None:
            self.engine.policy.keep(self._costs_path)

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling parameters from the model's generation_config.json, with changes on top."""
        return SamplingParams(**(self._defaults | changes))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: bool | Mapping[str, Any] | RequestSpeculation | None = None,
        tenant: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text or token ids). `params` is one for all, or one each.

        `speculation=False` decodes plainly, and {"method": "suffix", "max_tokens": 8} limits how these requests
        are drafted for; the tokens are the same. `tenant` says whose texts these are:
        a drafter set to share earlier outputs does so within one tenant, and never without a key.
        """
        batch = _as_batch(prompts)
        each = self._params_for(len(batch), params)
        prepared = [self._prepare(prompt, own, tenant) for prompt, own in zip(batch, each, strict=True)]
        return self._run(prepared, self._asked(speculation))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        tenant: str | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the model's chat template."""
        if not messages:
            raise InvalidParameter("messages", "must not be empty")
        several = [messages] if isinstance(messages[0], Mapping) else list(messages)
        return self.generate([self._tokenizer().chat(own) for own in several], params, tenant=tenant)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tenant: str | None = None,
        speculation: bool | Mapping[str, Any] | RequestSpeculation | None = None,
    ) -> Iterator[StreamPiece]:
        """Complete one prompt piece by piece; leaving the loop early aborts the request."""
        prepared = self._prepare(prompt, params or self.default_params(), tenant)
        writers = self._submit(prepared, self._asked(speculation))
        waiting = list(writers)
        try:
            while waiting:
                if not any(writer.has_news for writer in waiting):
                    self.engine.round()
                for writer in [own for own in waiting if own.has_news]:
                    piece = writer.piece()
                    if piece.output is not None:
                        waiting.remove(writer)
                    yield piece
        finally:
            for writer in writers:
                self.engine.abort(writer)

    def _run(self, prepared: Sequence[_Prepared], asked: RequestSpeculation) -> list[RequestOutput]:
        groups = [self._submit(own, asked) for own in prepared]
        try:
            while self.engine.has_work:
                self.engine.round()
        finally:
            for group in groups:
                for writer in group:
                    self.engine.abort(writer)
        return [self._output(own, group) for own, group in zip(prepared, groups, strict=True)]

    def _output(self, prepared: _Prepared, writers: Sequence[Writer]) -> RequestOutput:
        wanted = prepared.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=writers[0].seq.request.id,
            prompt=prepared.text,
            prompt_token_ids=list(prepared.ids),
            outputs=[writer.output() for writer in writers],
            prompt_logprobs=writers[0].prompt_logprobs if wanted else None,
        )

    def _asked(self, speculation: bool | Mapping[str, Any] | RequestSpeculation | None) -> RequestSpeculation:
        """What a request asks of speculation, where it can be had."""
        asked = RequestSpeculation.parse(speculation)
        loaded = sorted({"none", *self.speculation.methods()})
        if asked.method is not None and asked.method not in loaded:
            raise InvalidParameter("speculation", f"method {asked.method!r} is not loaded; loaded: {', '.join(loaded)}")
        if asked.method == "none":
            return replace(asked, enabled=False)
        return replace(asked, method=None) if asked.method == self.speculation.method else asked

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        speculation: bool | Mapping[str, Any] | RequestSpeculation | None = None,
        tenant: str | None = None,
        priority: int = 0,
    ) -> tuple[list[Request], str]:
        """One checked request for each sample and the method that drafts for them, as an EngineThread takes them."""
        return self._requests(self._prepare(prompt, params, tenant), self._asked(speculation), priority)

    def _submit(self, prepared: _Prepared, asked: RequestSpeculation = RequestSpeculation()) -> list[Writer]:  # noqa: B008 (frozen)
        requests, method = self._requests(prepared, asked)
        return [self.engine.submit(request, method) for request in requests]

    def _requests(self, prepared: _Prepared, asked: RequestSpeculation, priority: int = 0) -> tuple[list[Request], str]:
        params, name = prepared.params, f"request-{next(self._ids)}"
        request = Request(
            id=name,
            prompt_ids=prepared.ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos),
            max_tokens=self.max_model_len - len(prepared.ids) if params.max_tokens is None else params.max_tokens,
            speculate=asked.enabled,
            tenant=prepared.tenant,
            priority=priority,
            method=asked.method,
            draft_tokens=asked.draft_tokens,
        )
        method = (asked.method or self.speculation.method) if asked.enabled else "none"
        return [replace(request, index=index) for index in range(params.n)], method

    def _prepare(self, prompt: Prompt, params: SamplingParams, tenant: str | None = None) -> _Prepared:
        text = prompt if isinstance(prompt, str) else None
        ids = tuple(self._tokenizer().encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        self._check(ids, params)
        if params.structured is not None:
            self.engine.grammars.check(params.structured)
        if params.bad_words:
            params = replace(params, bad_word_ids=self._bad_words(params.bad_words))
        return _Prepared(text, ids, params, tenant)

    def _check(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        vocab = self.config.vocab
        if not ids:
            raise InvalidParameter("prompt", "must hold at least one token")
        for name, tokens in {
            "prompt": ids,
            "stop_token_ids": params.stop_token_ids or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or (),
        }.items():
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise InvalidParameter(name, f"token id {token!r} is outside the vocabulary [0, {vocab - 1}]")
        if len(ids) >= self.max_model_len:
            raise InvalidParameter("prompt", f"has {len(ids)} tokens; the context holds {self.max_model_len}, output included")
        room = self.max_model_len - len(ids)
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidParameter(
                "max_tokens", f"must be at most {room} after a prompt of {len(ids)} tokens, got {params.max_tokens}"
            )
        tokens_needed = len(ids) + (room if params.max_tokens is None else params.max_tokens)
        pages = self.engine.pages
        if pages.pages_for(tokens_needed) > pages.count:
            held = pages.count * pages.page_size
            raise InvalidParameter(
                "max_tokens", f"{tokens_needed} tokens do not fit the KV memory, which holds {held}; raise kv_bytes"
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word, as it starts a text and as it follows a space."""
        tokenizer = self._tokenizer()
        found = {tokenizer.encode_bare(prefix + word.lstrip()) for word in words for prefix in ("", " ")}
        return tuple(sorted(ids for ids in found if ids))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self.directory} holds no tokenizer; pass token ids instead of text")
        return self.tokenizer

    def _params_for(self, n: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * n
        if len(params) != n:
            raise InvalidParameter("params", f"{len(params)} sets of parameters for {n} prompts")
        return list(params)

    def _companion(self, directory: Path) -> Runner:
        """Load a draft model, its KV in as many pages as the target's.

        Stored in int8 it is served so where it can: it only guesses, and the target decides.
        """
        options = {key: self.speculation.options[key] for key in ("dtype", "load_format") if key in self.speculation.options}
        if self._options.dtype == "auto" and not self.device.is_gpu and find_core()[0] is not None and is_int8(directory):
            options = {"dtype": INT8} | options
        decoder = load_decoder(directory, replace(self._options, **options))
        self._companions.append(self._runner(decoder))
        return self._companions[-1]

    def _runner(self, decoder: Decoder) -> Runner:
        """A model and its KV where it runs."""
        if self.device.is_gpu:
            return self.device.runner(decoder, *self._layout, self._target)
        return Runner(decoder, _pool(decoder.config, *self._layout))

    def _page_count(self, config: EngineConfig) -> int:
        if not self.device.is_gpu:
            return _page_count(config, self.config, self.max_model_len)
        drafts = [own.model or str(self.directory / "draft") for own in self.speculation.flat() if own.method == "draft_model"]
        heads = [own for own in self.speculation.flat() if own.method in ("eagle", "medusa")]  # a layer each, or less
        models = [
            self.config,
            *(ModelConfig.read(locate(own)) for own in drafts),
            *(replace(self.config, layers=1) for _ in heads),
        ]
        return self.device.page_count(config, models, self.max_model_len)


def _save_costs(llm: weakref.ref[LLM]) -> None:
    own = llm()
    if own is not None and hasattr(own, "engine"):
        own.save_costs()


def _speculation(
    speculation: str | Mapping[str, Any] | SpeculationConfig | None,
    config: Mapping[str, Any] | None,
    model: str | None,
    tokens: int | None,
) -> SpeculationConfig:
    """One setting from its current name and vLLM's two older ones."""
    given = [
        name
        for name, value in (("speculation", speculation), ("speculative_config", config), ("speculative_model", model))
        if value
    ]
    if len(given) > 1:
        raise InvalidParameter(given[1], f"was given beside {given[0]}; pass one of them")
    if model is not None:
        config = {"model": model}
    if tokens is not None:
        base = config if config is not None else {"method": speculation} if isinstance(speculation, str) else speculation
        if isinstance(base, SpeculationConfig):
            return replace(base, draft_tokens=tokens)
        return SpeculationConfig.parse({**(base or {}), "draft_tokens": tokens})
    return SpeculationConfig.parse(config if config is not None else speculation)


def _engine_config(sizes: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    for name in sizes:
        if name not in known:
            raise InvalidParameter(name, f"is not a setting of LLM; sizes are: {', '.join(known)}")
    return EngineConfig(**sizes)


def _page_count(engine: EngineConfig, model: ModelConfig, max_model_len: int) -> int:
    """Pages for every sequence at full length, or as many as the memory given allows."""
    per_page = engine.page_size * KVPool.bytes_per_token(model.layers, model.kv_heads, model.head_dim)
    budget = engine.kv_bytes or int(_KV_SHARE_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    wanted = engine.max_num_seqs * -(-max_model_len // engine.page_size)
    count = min(wanted, budget // per_page)
    if count < 1:
        raise InvalidParameter("kv_bytes", f"{budget} bytes hold no page of {per_page} bytes; raise it")
    return count


def _pool(model: ModelConfig, pages: int, page_size: int) -> KVPool:
    # one page more than the page table knows: rows that fill up a block write there
    return KVPool(model.layers, pages + 1, model.kv_heads, page_size, model.head_dim)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
