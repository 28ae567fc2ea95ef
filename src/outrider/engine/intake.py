"""Intake of requests, for LLM and the server alike: checks, token ids, and one `Request` for each sample."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from outrider import checks
from outrider.config import RequestSpeculation, SpeculationConfig
from outrider.core import Request
from outrider.engine.arguments import Prompt, check_ids
from outrider.engine.build import Target
from outrider.engine.engine import Engine
from outrider.errors import InvalidParameter, ModelError
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer

__all__ = ["Intake", "Prepared", "WantedSpeculation"]

WantedSpeculation = bool | Mapping[str, Any] | RequestSpeculation | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that passed every check, and its samples."""

    text: str | None  # where the prompt was a text
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
    ) -> Prepared:
        """Check one prompt with its parameters; nothing is queued yet."""
        if tenant is not None:
            checks.text("tenant", tenant)
        checks.integer("priority", priority, -(2**31))
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = check_ids("prompt", ids, self.target.config.vocab)
        self._check_ids(ids, params)
        self._check_room(len(ids), params)
        if params.structured is not None:
            self.engine.grammars.check(params.structured)
        if params.bad_words:
            params = replace(params, bad_word_ids=self._bad_words(params.bad_words))
        wanted = self._wanted(speculation)
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
        )
        method = (wanted.method or self.speculation.method) if wanted.enabled else "none"
        return Prepared(text, [replace(request, index=index) for index in range(params.n)], method)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.target.tokenizer is None:
            raise ModelError(f"{self.target.directory} holds no tokenizer; pass token ids instead of text")
        return self.target.tokenizer

    def _wanted(self, speculation: WantedSpeculation) -> RequestSpeculation:
        """What a request asks of speculation, where it can be had."""
        wanted = RequestSpeculation.parse(speculation)
        loaded = sorted({"none", *self.speculation.methods()})
        if wanted.method is not None and wanted.method not in loaded:
            raise InvalidParameter("speculation", f"method {wanted.method!r} is not loaded; loaded: {', '.join(loaded)}")
        if wanted.method == "none":
            return replace(wanted, enabled=False)
        return replace(wanted, method=None) if wanted.method == self.speculation.method else wanted

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
