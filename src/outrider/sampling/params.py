"""SamplingParams: the parameters of a request, with vLLM's names and meanings, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.checks import MAX_COUNT, boolean, integer, real, shown, text
from outrider.errors import InvalidParameter
from outrider.sampling.structured import Structured

__all__ = ["SamplingParams"]

GREEDY_BELOW = 1e-5  # dividing by less can overflow float32
_INTEGERS = {  # lowest and highest value
    "n": (1, 128),
    "top_k": (-1, MAX_COUNT),
    "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (0, MAX_COUNT),
    "max_tokens": (1, MAX_COUNT),
    "logprobs": (0, 100),
    "prompt_logprobs": (0, 100),
    "num_speculative_tokens": (0, 256),
    "prompt_lookup_num_tokens": (0, 256),
}
_OPTIONAL = (  # integers that may be None
    "seed", "max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens", "prompt_lookup_num_tokens",
)  # fmt: skip
_REALS = {  # lowest and highest value, and whether the lowest one itself is excluded
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
_BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request turns logits into tokens.

    temperature 0, or below 1e-5, is greedy. `seed=None` draws a seed, which the output reports.
    `top_k` 0 or -1 keeps every token. `max_tokens=None` runs to the end of the context.
    `logprobs=k` reports the chosen token and the k most probable ones, of the raw logits.
    `structured` makes the output match a JSON schema, a regex or a grammar.
    `num_speculative_tokens` and `prompt_lookup_num_tokens` limit how far this request is drafted for, the latter by looking up
    earlier text alone. They never change the tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] | list[str] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: Structured | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_num_tokens: int | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)  # filled from bad_words by the engine

    # derived from the parameters once, because every round reads them
    greedy: bool = field(init=False, repr=False, compare=False)
    temperature_bucket: int = field(init=False, repr=False, compare=False)  # temperature in halves, at most 4
    uses_history: bool = field(init=False, repr=False, compare=False)  # penalties or bad words read the earlier tokens
    adjusts: bool = field(init=False, repr=False, compare=False)  # something may change the logits before temperature
    takes_largest: bool = field(init=False, repr=False, compare=False)  # the choice is the largest raw logit
    truncates: bool = field(init=False, repr=False, compare=False)  # a filter removes tokens after temperature

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        put(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        put(self, "bad_words", _items("bad_words", self.bad_words))
        words = _items("bad_word_ids", self.bad_word_ids)
        put(self, "bad_word_ids", tuple(_items("bad_word_ids", word) for word in words))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _items("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            put(self, "logit_bias", _bias(self.logit_bias))
        self._check_numbers()
        self._check_lists()
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise InvalidParameter("structured", f"must be a Structured, got {type(self.structured).__name__}")
        self._derive()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    def _derive(self) -> None:
        put = object.__setattr__
        penalised = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        put(self, "greedy", self.temperature < GREEDY_BELOW)
        put(self, "temperature_bucket", min(round(2 * self.temperature), 4))
        put(self, "uses_history", penalised or bool(self.bad_word_ids))
        masked = bool(self.logit_bias) or self.allowed_token_ids is not None or self.min_tokens > 0 or self.structured is not None
        put(self, "adjusts", self.uses_history or masked)
        put(self, "takes_largest", self.greedy and not self.adjusts)
        put(self, "truncates", self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def _check_numbers(self) -> None:
        for name, bounds in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                integer(name, value, *bounds)
        for name, (low, high, low_open) in _REALS.items():
            real(name, getattr(self, name), low, high, low_open)
        for name in _BOOLEANS:
            boolean(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            for string in getattr(self, name):
                if not isinstance(string, str) or not string:
                    raise InvalidParameter(name, f"must hold non-empty strings, got {shown(string)}")
                text(name, string)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                integer(name, token, 0, MAX_COUNT)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", "must hold at least one token id, or be None")
        for word in self.bad_word_ids:
            for token in word:
                integer("bad_word_ids", token)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidParameter(name, f"must be a list, got {shown(value)}")
    return tuple(value)


def _bias(bias: Any) -> dict[int, float]:
    """Token ids to floats, in id order; ids may be decimal strings, as JSON has them."""
    if not isinstance(bias, Mapping):
        raise InvalidParameter("logit_bias", f"must map token ids to numbers, got {shown(bias)}")
    out: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        integer("logit_bias", token, 0, MAX_COUNT)
        real("logit_bias", value, -100.0, 100.0)
        out[token] = float(value)
    return dict(sorted(out.items()))
