"""Settings of the engine and of speculation, resolved once from what the user passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from outrider import checks
from outrider.errors import InvalidParameter, UnknownMethod

__all__ = [
    "ALIASES",
    "FIELDS",
    "GPU_SEQUENCES",
    "KV_DTYPES",
    "METHODS",
    "RULES",
    "SPELLINGS",
    "EngineConfig",
    "RequestSpeculation",
    "SpeculationConfig",
    "parse_method",
    "pinned",
    "resolve_speculation",
    "speculation_of_flags",
]

RULES = ("match", "rejection", "block", "lossy_typical")
KV_DTYPES = ("auto", "int8")
DEFAULT_DRAFT_TOKENS = 5
MAX_DRAFT_TOKENS = 256
MAX_TREE_TOKENS = 1024  # of a draft model that grows trees
GPU_SEQUENCES = 256  # that run at once on a GPU, unless the user says otherwise
_MAX_SEQUENCES = 2**16
_MAX_PAGE = 2**12
_MAX_RANKS = 64
_MAX_SIZE = 2**63 - 1
_MAX_DEPTH = 8  # of parentheses in one word
_MAX_DIGITS = 9  # of a number of draft tokens in one word
SPELLINGS = {  # other engines' names for settings of speculation, and ours
    "num_speculative_tokens": "draft_tokens",  # vLLM
    "speculative_model": "model",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
    "num_assistant_tokens": "draft_tokens",  # Transformers
    "assistant_model": "model",
    "prompt_lookup_num_tokens": "draft_tokens",
    "assistant_early_exit": "exit_layer",
    "max_matching_ngram_size": "ngram_max",
}
_IMPLIED = {"prompt_lookup_num_tokens": "ngram", "assistant_early_exit": "early_exit"}  # spellings that name a method too
ALIASES: Mapping[str, Mapping[str, Any]] = {  # other names of methods, with the settings that they stand for
    "standard": {"method": "draft_model"},  # the temperature decides whether a draft is greedy or sampled
    "sampling": {"method": "draft_model"},
    "stochastic": {"method": "draft_model"},
    "self": {"method": "early_exit"},
    "self_speculative": {"method": "early_exit"},
    "hierarchical": {"method": "cascade"},
    "prompt_lookup": {"method": "ngram"},
    "[ngram]": {"method": "ngram"},
    "eagle2": {"method": "eagle", "draft_tokens": 24, "beam": 3, "branch": 6, "depth": 9},  # a tree
    "eagle3": {"method": "eagle"},
    "dspark": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
}
FIELDS = ("method", "model", "draft_tokens", "rule", "adaptive", "min_draft_tokens", "disable_by_batch_size")
METHODS = (  # built in; draft/registry.py has their classes
    "none", "ngram", "suffix", "recycle", "lookahead", "draft_model", "eagle", "mtp", "medusa", "dflash",
    "early_exit", "cascade", "mixture", "auto",
)  # fmt: skip
# methods for which `model` names a directory, and the folder beside a target's weights where they look otherwise
WITH_WEIGHTS: Mapping[str, str] = {"draft_model": "draft", "eagle": "eagle", "mtp": "mtp", "medusa": "medusa", "dflash": "dflash"}
_NESTED = {"cascade": "levels", "mixture": "members", "auto": "members"}  # options that hold drafters


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. `None` is resolved from the model and the machine."""

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_batch_rows: int = 512  # prompt rows read in one round, shared by all sequences
    max_mixed_rows: int | None = None  # of these, in a round in which others decode; as many where it is not set
    page_size: int = 64
    kv_bytes: int | None = None
    kv_dtype: str = "auto"  # of keys and values of the target: as it computes, or int8 on the native core
    prefix_cache: bool = True  # full pages stay findable by their tokens until their memory is needed
    max_queue: int | None = None  # requests that may wait; more are refused
    calibration_s: float = 3.0  # seconds to time rounds and drafts at the first start of a model and its drafter; 0: none
    max_loras: int = 32  # LoRA adapters that may be loaded at once
    max_lora_rank: int = 256  # of each of them
    tensor_parallel_size: int = 1  # processes that share the model's layers and KV: the ranks

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_rows", "max_loras", "max_lora_rank"):
            checks.integer(name, getattr(self, name), 1, _MAX_SEQUENCES)
        checks.integer("page_size", self.page_size, 1, _MAX_PAGE)
        checks.integer("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_RANKS)
        for name, low in (("max_model_len", 2), ("kv_bytes", 1), ("max_queue", 0), ("max_mixed_rows", 1)):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), low, _MAX_SIZE)
        checks.choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        checks.boolean("prefix_cache", self.prefix_cache)
        checks.real("calibration_s", self.calibration_s, 0.0)

    def within(self, context: int) -> EngineConfig:
        """The same sizes with the context length resolved: the model's, or a shorter one."""
        if self.max_model_len is not None and self.max_model_len > context:
            longer = f"{self.max_model_len} is more than the model's context of {context} tokens"
            raise InvalidParameter("max_model_len", f"{longer}; lower it or leave it out")
        return replace(self, max_model_len=self.max_model_len or context)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which drafter, how far it drafts, and the rule that verifies it."""

    method: str = "none"
    model: str | None = None
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    rule: str = "match"
    adaptive: bool = True  # up to `draft_tokens`, and none where that is faster; False: as many in every round
    min_draft_tokens: int = 1  # of a round that drafts at all
    disable_by_batch_size: int | None = None  # batches from this size on are decoded plainly
    options: Mapping[str, Any] = field(default_factory=dict)  # the drafter's own settings

    def __post_init__(self) -> None:
        checks.text("method", self.method)
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", str(self.model))
        if self.model is not None:
            checks.text("model", self.model)
        if self.rule not in RULES:
            raise UnknownMethod("rule", checks.text("rule", self.rule), list(RULES))
        most = MAX_TREE_TOKENS if self.grows_trees else MAX_DRAFT_TOKENS
        checks.integer("draft_tokens", self.draft_tokens, 0, most)
        checks.integer("min_draft_tokens", self.min_draft_tokens, 0, most)
        if self.disable_by_batch_size is not None:
            checks.integer("disable_by_batch_size", self.disable_by_batch_size, 1, _MAX_SEQUENCES)
        words = {"false": False, "true": True, 0: False, 1: True}  # as one word of a command line spells it
        adaptive = words.get(self.adaptive, self.adaptive) if isinstance(self.adaptive, str | int) else self.adaptive
        object.__setattr__(self, "adaptive", checks.boolean("adaptive", adaptive))
        if self.method == "auto" and not self.adaptive:
            raise InvalidParameter("adaptive", "'auto' chooses how far to draft; name a drafter to pin its length")

    @property
    def grows_trees(self) -> bool:
        """Whether a draft model is to grow trees, which may have more nodes than other drafts."""
        branch = self.options.get("branch", 1) if self.method == "draft_model" else 1
        return isinstance(branch, int) and branch > 1

    @property
    def is_pinned(self) -> bool:
        """Whether every round drafts as far as `draft_tokens` says. Under rules by which the text depends on the drafts it
        does: with lengths that depend on the clock, no output could be repeated.
        """
        return not self.adaptive or self.rule != "match" or self.draft_tokens == 0

    def nested(self) -> tuple[SpeculationConfig, ...]:
        """The drafters this one is made of: a cascade's levels, a mixture's members."""
        return tuple(self.options.get(_NESTED.get(self.method, ""), ()))

    def flat(self) -> Iterator[SpeculationConfig]:
        """This method and all it is made of."""
        yield self
        for config in self.nested():
            yield from config.flat()

    def methods(self) -> Iterator[str]:
        """Their names."""
        return (config.method for config in self.flat())

    @classmethod
    def parse(cls, speculation: str | bool | Mapping[str, Any] | SpeculationConfig | None) -> SpeculationConfig:
        """From a method as `parse_method` reads it, or a mapping of settings (vLLM's names included).

        What names no method is `auto`, and False is `none`.
        """
        if isinstance(speculation, SpeculationConfig):
            return speculation
        if speculation is None or isinstance(speculation, bool):
            return cls.parse({"method": "none" if speculation is False else "auto"})
        if isinstance(speculation, str):
            return cls.parse(parse_method(speculation))
        try:
            return cls._from_settings(_settings("speculation", speculation))
        except RecursionError:
            raise InvalidParameter("speculation", "holds drafters inside drafters without end") from None

    @classmethod
    def _from_settings(cls, settings: dict[str, Any]) -> SpeculationConfig:
        if settings.get("model") in ("ngram", "[ngram]"):  # vLLM's older spelling
            settings |= {"method": "ngram", "model": None}
        settings.setdefault("method", "draft_model" if settings.get("model") else "auto")
        settings = _without_alias(settings)
        method = settings["method"]
        if method == "auto":
            settings.setdefault("draft_tokens", MAX_DRAFT_TOKENS)
        options = {key: value for key, value in settings.items() if key not in FIELDS and value is not None}
        if method in _NESTED and _NESTED[method] in options:
            options[_NESTED[method]] = _parse_nested(method, options[_NESTED[method]])
        fields = {key: settings[key] for key in FIELDS if settings.get(key) is not None}
        return cls(**fields, options=options)


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """What one request asks of speculation: whether, by which of the loaded methods, how far."""

    enabled: bool = True
    method: str | None = None
    draft_tokens: int | None = None
    return_rejected: bool = False  # the answer also lists the drafted tokens that were not accepted
    remember: bool = True  # False: its text is not kept for later requests, and theirs does not draft for it

    def __post_init__(self) -> None:
        for name in ("enabled", "return_rejected", "remember"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameter("speculation", f"{name} must be True or False, got {checks.shown(value)}")
        if self.method is not None and not isinstance(self.method, str):
            raise InvalidParameter("speculation", f"method must be a name, got {checks.shown(self.method)}")
        if self.draft_tokens is not None:
            try:
                checks.integer("max_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
            except InvalidParameter as error:
                raise InvalidParameter("speculation", str(error)) from None

    @classmethod
    def parse(cls, settings: bool | Mapping[str, Any] | RequestSpeculation | None) -> RequestSpeculation:
        """From True or False, or the mapping of a request's `speculation`."""
        if isinstance(settings, RequestSpeculation):
            return settings
        if settings is None or isinstance(settings, bool):
            return cls(settings is not False)
        if not isinstance(settings, Mapping):
            raise InvalidParameter("speculation", f"must be True, False or a mapping, got {type(settings).__name__}")
        settings = _settings("speculation", settings, SPELLINGS | {"max_tokens": "draft_tokens"})
        if isinstance(settings.get("method"), str):
            settings["method"] = _without_alias(settings)["method"]
        for name in settings:
            if name not in ("enabled", "method", "draft_tokens", "return_rejected", "remember"):
                allowed = ("enabled", "method", "max_tokens", "return_rejected", "remember")
                hint = checks.nearest(name, allowed)
                raise InvalidParameter("speculation", f"unknown setting {name!r}{hint}; allowed: {', '.join(allowed)}")
        return cls(**settings)


def resolve_speculation(
    speculation: str | bool | Mapping[str, Any] | SpeculationConfig | None = None, others: Mapping[str, Any] | None = None
) -> SpeculationConfig:
    """The settings of speculation from `speculation` and from what others call it: the one place that knows both.

    `others` are keywords of other engines, None where one is not set: vLLM's `speculative_config` in place of `speculation`,
    and the names of SPELLINGS, which change or replace single settings.
    """
    extra = {name: value for name, value in (others or {}).items() if value is not None}
    config = extra.pop("speculative_config", None)
    if config is not None and not isinstance(config, Mapping):
        raise InvalidParameter("speculative_config", f"must be a mapping of settings, got {checks.shown(config)}")
    base = {"speculation": speculation, "speculative_config": config}
    base |= {name: value for name, value in extra.items() if SPELLINGS[name] == "model" or name in _IMPLIED}
    passed = [name for name, value in base.items() if value is not None]
    if len(passed) > 1:
        raise InvalidParameter(passed[1], f"was given beside {passed[0]}; pass one of them")
    parsed = SpeculationConfig.parse(speculation if config is None else config)
    if not extra:
        return parsed
    if not passed or passed[0] in extra:  # nothing else names a method
        return SpeculationConfig.parse(extra)
    changes = _settings("speculation", extra)
    draft_tokens = changes.pop("draft_tokens", parsed.draft_tokens)
    return replace(parsed, draft_tokens=draft_tokens, options={**parsed.options, **changes})


def speculation_of_flags(
    method: str | None, draft_model: str | None, draft_tokens: int | None, rule: str | None = None
) -> SpeculationConfig:
    """The settings of speculation from the command line's flags, None where one is not set."""
    settings = parse_method(method or ("draft_model" if draft_model and draft_model != "auto" else "auto"))
    if draft_model is not None and settings["method"] not in (*WITH_WEIGHTS, "early_exit", "auto"):
        raise InvalidParameter("--draft-model", f"is for methods with weights of their own, and {settings['method']!r} has none")
    flags = {"model": draft_model, "draft_tokens": draft_tokens, "rule": rule}
    return SpeculationConfig.parse(settings | {name: value for name, value in flags.items() if value is not None})


def parse_method(text: str) -> dict[str, Any]:
    """Settings from one word: "eagle:24:beam=6" is a method, its draft tokens, and its own options.

    Several values are joined by plus signs, and settings among them stand in parentheses:
    "mixture:24:members=(suffix:min_match=2)+eagle". A class is named with its module: "package.module:Class".
    """
    method, *parts = _split(checks.text("method", text), ":")
    if parts and parts[0].isidentifier() and method not in (*METHODS, *ALIASES):
        method = f"{method}:{parts.pop(0)}"
    settings: dict[str, Any] = {"method": method}
    for part in parts:
        name, is_option, value = part.partition("=")
        if is_option:
            settings[name] = value if name == "model" else _value(value)
        elif part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS:
            settings["draft_tokens"] = int(part)
        else:
            raise InvalidParameter(
                "method", f"{checks.shown(part)} in {checks.shown(text)} is neither a number of draft tokens nor name=value"
            )
    return _without_alias(settings)


def pinned(text: str) -> dict[str, Any]:
    """Settings from one word, for a measurement: a drafter that is named drafts as far as it says in every round."""
    settings = parse_method(text)
    return settings if settings["method"] == "auto" else {"adaptive": False} | settings


def _settings(name: str, settings: Any, spellings: Mapping[str, str] = SPELLINGS) -> dict[str, Any]:
    """Settings under our names."""
    if not isinstance(settings, Mapping):
        raise InvalidParameter(name, f"must be a method's name or a mapping, got {type(settings).__name__}")
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise InvalidParameter(name, f"names of settings are strings, got {checks.shown(key)}")
        ours = spellings.get(key, key)
        if ours in out and value is not None:
            raise InvalidParameter(name, f"{key!r} and another setting both mean {ours!r}; pass one of them")
        out[ours] = value
        if key in _IMPLIED and value is not None:
            out.setdefault("method", _IMPLIED[key])
    return out


def _without_alias(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose method has its name here. Settings that an alias stands for are defaults."""
    method = checks.text("method", settings["method"])
    if method not in ALIASES:
        return settings
    passed = {name: value for name, value in settings.items() if name != "method" and value is not None}
    return {**ALIASES[method], **passed}


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
        if depth > _MAX_DEPTH:
            raise InvalidParameter("method", f"{checks.shown(text)} holds drafters inside drafters without end")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise InvalidParameter("method", f"parentheses in {checks.shown(text)} do not match")
    return parts


def _parse_nested(method: str, drafters: Any) -> tuple[SpeculationConfig, ...]:
    """Drafters inside another's settings. Their draft tokens are limits of their own; none by default."""
    name = _NESTED[method]
    items = drafters if isinstance(drafters, list | tuple) else [drafters]
    if not items:
        raise InvalidParameter(name, f'must name drafters, such as {name}=["suffix", "draft_model"]')
    parsed = []
    for item in items:
        if isinstance(item, SpeculationConfig):
            parsed.append(item)
            continue
        settings = parse_method(item) if isinstance(item, str) else item
        if not isinstance(settings, Mapping):
            raise InvalidParameter(name, f"{checks.shown(item)} is neither a method's name nor a mapping of settings")
        for outer in ("rule", "dtype", "load_format"):
            if outer in settings:
                raise InvalidParameter(name, f"{outer!r} belongs to {method!r} as a whole, not to one of its {name}")
        parsed.append(SpeculationConfig.parse({"draft_tokens": MAX_DRAFT_TOKENS} | dict(settings)))
    if any(config.method == "auto" for config in parsed):
        raise InvalidParameter(name, "'auto' chooses among drafters itself; name the drafters instead")
    return tuple(parsed)
