"""Settings of the engine and of speculation, resolved once from what the user passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidParameter, UnknownMethod

__all__ = ["RULES", "EngineConfig", "SpeculationConfig"]

RULES = ("match", "rejection", "block", "lossy_typical")
DEFAULT_DRAFT_TOKENS = 5
_ALIASES = {
    "num_speculative_tokens": "draft_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}
_FIELDS = ("method", "model", "draft_tokens", "rule")
_OPTIONS = {
    "ngram": ("ngram_min", "ngram_max"),
    "suffix": ("min_match", "max_match", "factor", "offset", "min_prob", "branch", "shared_tokens"),
    "recycle": ("top", "table_tokens", "shared"),
    "draft_model": ("dtype", "load_format", "beam", "branch", "depth", "vocabulary"),
    "eagle": ("beam", "branch", "depth"),
    "medusa": ("dynamic",),
    "early_exit": ("exit_layer", "tail"),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. `None` is resolved from the model and the machine."""

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_batch_rows: int = 512  # prompt rows read in one round, shared by all sequences
    page_size: int = 64
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_rows", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, got {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidParameter("max_model_len", f"must be at least 2, got {self.max_model_len}")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which drafter, how far it drafts, and the rule that verifies it."""

    method: str = "none"
    model: str | None = None
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    rule: str = "match"
    options: Mapping[str, Any] = field(default_factory=dict)  # the drafter's own settings

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UnknownMethod("rule", self.rule, list(RULES))
        if isinstance(self.draft_tokens, bool) or not isinstance(self.draft_tokens, int) or not 0 <= self.draft_tokens <= 256:
            raise InvalidParameter("draft_tokens", f"must be an integer in [0, 256], got {self.draft_tokens!r}")

    @classmethod
    def parse(cls, speculation: str | Mapping[str, Any] | SpeculationConfig | None) -> SpeculationConfig:
        """From a method's name, a mapping of settings (vLLM's names included), or nothing."""
        if isinstance(speculation, SpeculationConfig):
            return speculation
        if speculation is None:
            return cls()
        if isinstance(speculation, str):
            return cls(method=speculation)
        if not isinstance(speculation, Mapping):
            raise InvalidParameter("speculation", f"must be a method's name or a mapping, got {type(speculation).__name__}")
        settings = {_ALIASES.get(key, key): value for key, value in speculation.items()}
        model = settings.get("model")
        if model in ("ngram", "[ngram]"):  # vLLM's older spelling
            settings |= {"method": "ngram", "model": None}
        method = settings.setdefault("method", "draft_model" if settings.get("model") else "none")
        known = _OPTIONS.get(method, ())
        unknown = sorted(set(settings) - set(_FIELDS) - set(known))
        if unknown and method in ("none", *_OPTIONS):
            allowed = ", ".join((*_FIELDS, *known, *_ALIASES))
            raise InvalidParameter("speculation", f"unknown setting {unknown[0]!r} for method {method!r}; allowed: {allowed}")
        options = {key: value for key, value in settings.items() if key not in _FIELDS}
        return cls(**{key: settings[key] for key in _FIELDS if key in settings}, options=options)
