"""Settings of the engine and of speculation, resolved once from what the user passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidParameter, UnknownMethod

__all__ = ["RULES", "EngineConfig", "RequestSpeculation", "SpeculationConfig", "parse_method"]

RULES = ("match", "rejection", "block", "lossy_typical")
DEFAULT_DRAFT_TOKENS = 5
MOST_DRAFT_TOKENS = 256
_ALIASES = {
    "num_speculative_tokens": "draft_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}
_FIELDS = ("method", "model", "draft_tokens", "rule")
_OPTIONS = {
    "ngram": ("ngram_min", "ngram_max"),
    "suffix": ("min_match", "max_match", "factor", "offset", "min_prob", "branch", "shared_tokens"),
    "recycle": ("top", "table_tokens", "shared", "tenants"),
    "lookahead": ("window", "ngram", "pool_tokens", "from_prompt"),
    "draft_model": ("dtype", "load_format", "beam", "branch", "depth", "vocabulary"),
    "eagle": ("beam", "branch", "depth"),
    "medusa": ("dynamic",),
    "early_exit": ("exit_layer", "tail"),
    "cascade": ("levels", "dtype", "load_format"),
    "mixture": ("members", "merge", "splice", "enough", "dtype", "load_format"),
    "auto": ("members", "dtype", "load_format"),
}
_NESTED = {"cascade": "levels", "mixture": "members", "auto": "members"}  # options that hold drafters


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. `None` is resolved from the model and the machine."""

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_batch_rows: int = 512  # prompt rows read in one round, shared by all sequences
    page_size: int = 64
    kv_bytes: int | None = None
    prefix_cache: bool = True  # full pages stay findable by their tokens until their memory is needed
    max_queue: int | None = None  # requests that may wait; more are refused

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
        if (
            isinstance(self.draft_tokens, bool)
            or not isinstance(self.draft_tokens, int)
            or not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS
        ):
            raise InvalidParameter("draft_tokens", f"must be an integer in [0, {MOST_DRAFT_TOKENS}], got {self.draft_tokens!r}")

    def nested(self) -> tuple[SpeculationConfig, ...]:
        """The drafters this one is made of: a cascade's levels, a mixture's members."""
        return tuple(self.options.get(_NESTED.get(self.method, ""), ()))

    def flat(self) -> Iterator[SpeculationConfig]:
        """This method and all it is made of."""
        yield self
        for own in self.nested():
            yield from own.flat()

    def methods(self) -> Iterator[str]:
        """Their names."""
        return (own.method for own in self.flat())

    @classmethod
    def parse(cls, speculation: str | Mapping[str, Any] | SpeculationConfig | None) -> SpeculationConfig:
        """From a method as `parse_method` reads it, a mapping of settings (vLLM's names included), or nothing."""
        if isinstance(speculation, SpeculationConfig):
            return speculation
        if speculation is None:
            return cls()
        if isinstance(speculation, str):
            return cls.parse(parse_method(speculation))
        if not isinstance(speculation, Mapping):
            raise InvalidParameter("speculation", f"must be a method's name or a mapping, got {type(speculation).__name__}")
        settings = {_ALIASES.get(key, key): value for key, value in speculation.items()}
        model = settings.get("model")
        if model in ("ngram", "[ngram]"):  # vLLM's older spelling
            settings |= {"method": "ngram", "model": None}
        method = settings.setdefault("method", "draft_model" if settings.get("model") else "none")
        if method == "auto":
            settings.setdefault("draft_tokens", MOST_DRAFT_TOKENS)
        known = _OPTIONS.get(method, ())
        unknown = sorted(set(settings) - set(_FIELDS) - set(known))
        if unknown and method in ("none", *_OPTIONS):
            allowed = ", ".join((*_FIELDS, *known, *_ALIASES))
            raise InvalidParameter("speculation", f"unknown setting {unknown[0]!r} for method {method!r}; allowed: {allowed}")
        options = {key: value for key, value in settings.items() if key not in _FIELDS}
        if method in _NESTED and (method != "auto" or "members" in options):
            options[_NESTED[method]] = _parse_nested(method, options.get(_NESTED[method]))
        return cls(**{key: settings[key] for key in _FIELDS if key in settings}, options=options)


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """What one request asks of speculation: whether, by which of the loaded methods, how far."""

    enabled: bool = True
    method: str | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise InvalidParameter("speculation", f"enabled must be True or False, got {self.enabled!r}")
        if self.method is not None and not isinstance(self.method, str):
            raise InvalidParameter("speculation", f"method must be a name, got {self.method!r}")
        most = self.draft_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MOST_DRAFT_TOKENS):
            raise InvalidParameter("speculation", f"max_tokens must be an integer in [0, {MOST_DRAFT_TOKENS}], got {most!r}")

    @classmethod
    def parse(cls, given: bool | Mapping[str, Any] | RequestSpeculation | None) -> RequestSpeculation:
        """From True or False, or {"enabled": ..., "method": ..., "max_tokens": ...}."""
        if isinstance(given, RequestSpeculation):
            return given
        if given is None or isinstance(given, bool):
            return cls(given is not False)
        if not isinstance(given, Mapping):
            raise InvalidParameter("speculation", f"must be True, False or a mapping, got {type(given).__name__}")
        names = {"max_tokens": "draft_tokens", "num_speculative_tokens": "draft_tokens"}
        settings = {names.get(key, key): value for key, value in given.items()}
        unknown = sorted(set(settings) - {"enabled", "method", "draft_tokens"})
        if unknown:
            raise InvalidParameter("speculation", f"unknown setting {unknown[0]!r}; allowed: enabled, method, max_tokens")
        return cls(**settings)


def parse_method(text: str) -> dict[str, Any]:
    """Settings from one word: "eagle:24:beam=6" is a method, its draft tokens, and its own options.

    Several values are joined by plus signs, and settings among them stand in parentheses:
    "mixture:24:members=(suffix:min_match=2)+eagle". A class is named with its module: "package.module:Class".
    """
    method, *parts = _split(text, ":")
    if parts and parts[0].isidentifier() and method not in ("none", *_OPTIONS):
        method = f"{method}:{parts.pop(0)}"
    settings: dict[str, Any] = {"method": method}
    for part in parts:
        name, is_option, value = part.partition("=")
        if is_option:
            settings[name] = value if name == "model" else _value(value)
        elif part.isdigit():
            settings["draft_tokens"] = int(part)
        else:
            raise InvalidParameter("method", f"{part!r} in {text!r} is neither a number of draft tokens nor name=value")
    return settings


def _value(text: str) -> Any:
    """A number, a name, settings in parentheses, or several of these joined by plus signs."""
    items = _split(text, "+")
    if len(items) > 1:
        return [_value(item) for item in items]
    if text.startswith("(") and text.endswith(")"):
        return parse_method(text[1:-1])
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _split(text: str, mark: str) -> list[str]:
    """Cut at a mark, except inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise InvalidParameter("method", f"parentheses in {text!r} do not match")
    return parts


def _parse_nested(method: str, given: Any) -> tuple[SpeculationConfig, ...]:
    """Drafters inside another's settings. Their draft tokens are limits of their own; none by default."""
    name = _NESTED[method]
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    if not items:
        raise InvalidParameter(name, f'method {method!r} needs its drafters, such as {name}=["suffix", "eagle"]')
    parsed = []
    for item in items:
        if isinstance(item, SpeculationConfig):
            parsed.append(item)
            continue
        settings = parse_method(item) if isinstance(item, str) else item
        if not isinstance(settings, Mapping):
            raise InvalidParameter(name, f"{item!r} is neither a method's name nor a mapping of settings")
        for outer in ("rule", "dtype", "load_format"):
            if outer in settings:
                raise InvalidParameter(name, f"{outer!r} belongs to {method!r} as a whole, not to one of its {name}")
        parsed.append(SpeculationConfig.parse({"draft_tokens": MOST_DRAFT_TOKENS} | dict(settings)))
    return tuple(parsed)
