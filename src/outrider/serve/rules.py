"""Rules of --speculation-rules: how requests are drafted for by their tag, model name, temperature or response format.

The first rule whose conditions all hold applies. What a request sets itself takes precedence, field by field. Rules never change
tokens, as no setting of speculation does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider import checks
from outrider.config import RequestSpeculation
from outrider.draft import method_names
from outrider.errors import InvalidParameter, UnknownMethod
from outrider.sampling import SamplingParams
from outrider.serve.tags import MAX_TAGS, is_tag

__all__ = ["FORMATS", "Rule", "Rules", "Traits", "read_rules"]

FLAG = "--speculation-rules"
FORMATS = ("text", "json_object", "json_schema", "regex", "choice", "grammar", "tools")
_CONDITIONS = ("tag", "model", "temperature", "response_format")
_SETTINGS = ("enabled", "method", "max_tokens")
_MAX_RULES = 64
_MAX_BYTES = 2**18


class Traits(NamedTuple):
    """What rules look at of a request."""

    tag: str | None
    model: str
    temperature: float
    response_format: str  # one of FORMATS


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions and the settings of speculation where they hold. An empty set of values is no condition."""

    name: str
    tags: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    temperature: tuple[float, float] = (0.0, math.inf)  # lowest and highest
    settings: Mapping[str, Any] = field(default_factory=dict)  # as a request's `speculation` has them

    def matches(self, traits: Traits) -> bool:
        return (
            (not self.tags or traits.tag in self.tags)
            and (not self.models or traits.model in self.models)
            and (not self.formats or traits.response_format in self.formats)
            and self.temperature[0] <= traits.temperature <= self.temperature[1]
        )

    def merged(self, wanted: bool | Mapping[str, Any] | None, params: SamplingParams) -> dict[str, Any]:
        """The settings of a request: the rule's where it sets none."""
        settings = dict(self.settings)
        if params.prompt_lookup_num_tokens is not None:
            settings.pop("method", None)
        if params.prompt_lookup_num_tokens is not None or params.num_speculative_tokens is not None:
            settings.pop("max_tokens", None)
        requested = {"enabled": wanted} if isinstance(wanted, bool) else dict(wanted or {})
        return settings | requested


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a server, in order."""

    rules: tuple[Rule, ...] = ()

    @property
    def tags(self) -> list[str]:
        """The tags that rules name."""
        return list(dict.fromkeys(tag for rule in self.rules for tag in sorted(rule.tags)))

    def first(self, traits: Traits) -> Rule | None:
        """The rule that applies."""
        return next((rule for rule in self.rules if rule.matches(traits)), None)

    def check_models(self, served: Collection[str]) -> None:
        """Raise InvalidParameter where a rule names a model that is not served."""
        for rule in self.rules:
            for model in sorted(rule.models - set(served)):
                raise _error(
                    rule.name, f"model {model!r} is not served{checks.nearest(model, served)}; served: {', '.join(served)}"
                )

    def check_methods(self, loaded: Collection[str]) -> None:
        """Raise InvalidParameter where a rule names a method that is not loaded."""
        for rule in self.rules:
            method = rule.settings.get("method")
            if method is not None and method not in loaded:
                raise _error(rule.name, f"method {method!r} is not loaded; loaded: {', '.join(loaded)}")


def read_rules(path: Path) -> Rules:
    """The rules of a YAML or JSON file. Raises InvalidParameter that names the rule at fault."""
    data = _load(path)
    if not isinstance(data, Mapping) or set(data) != {"rules"} or not isinstance(data["rules"], list):
        raise InvalidParameter(FLAG, f"{path} must hold one key, rules, with a list of rules")
    if len(data["rules"]) > _MAX_RULES:
        raise InvalidParameter(FLAG, f"{path} holds {len(data['rules'])} rules; at most {_MAX_RULES} are allowed")
    rules = Rules(tuple(_rule(number, entry) for number, entry in enumerate(data["rules"], 1)))
    names = [rule.name for rule in rules.rules]
    for name in names:
        if names.count(name) > 1:
            raise _error(name, "another rule has this name; choose another")
    if len(rules.tags) > MAX_TAGS:
        raise InvalidParameter(FLAG, f"{path} names {len(rules.tags)} tags; at most {MAX_TAGS} are told apart")
    return rules


def _load(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise InvalidParameter(FLAG, "needs PyYAML: pip install 'outrider[serve]'") from None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidParameter(FLAG, f"{path} is larger than {_MAX_BYTES} bytes")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidParameter(FLAG, f"{path} cannot be read: {error}") from None


def _rule(number: int, entry: Any) -> Rule:
    label = f"rule-{number}"
    if not isinstance(entry, Mapping):
        raise _error(label, f"must have the keys when and speculation, got {checks.shown(entry)}")
    name = entry.get("name", label)
    if not is_tag(name):
        raise _error(label, f"name must be 1 to 64 letters, digits, '.', '_' or '-', got {checks.shown(name)}")
    _known(name, entry, ("name", "when", "speculation"))
    when = entry.get("when") or {}
    if not isinstance(when, Mapping):
        raise _error(name, f"when must hold conditions ({', '.join(_CONDITIONS)}), got {checks.shown(when)}")
    _known(name, when, _CONDITIONS)
    if "speculation" not in entry:
        raise _error(name, f"speculation is missing: true, false or settings ({', '.join(_SETTINGS)})")
    formats = _texts(name, when, "response_format")
    for form in sorted(formats - set(FORMATS)):
        raise _error(name, f"response_format {form!r} is unknown; known: {', '.join(FORMATS)}")
    tags = _texts(name, when, "tag")
    for tag in sorted(tags):
        if not is_tag(tag):
            raise _error(name, f"tag {checks.shown(tag)} must be 1 to 64 letters, digits, '.', '_' or '-'")
    temperature = _range(name, when.get("temperature"))
    return Rule(name, tags, _texts(name, when, "model"), formats, temperature, _settings(name, entry["speculation"]))


def _settings(name: str, value: Any) -> dict[str, Any]:
    """Settings of speculation as a request has them, checked."""
    if isinstance(value, bool):
        return {"enabled": value}
    if not isinstance(value, Mapping) or not value:
        raise _error(name, f"speculation must be true, false or settings ({', '.join(_SETTINGS)}), got {checks.shown(value)}")
    try:
        parsed = RequestSpeculation.parse(value)
        if parsed.method is not None and ":" not in parsed.method and parsed.method not in method_names():
            raise UnknownMethod("method", parsed.method, method_names())
    except InvalidParameter as error:
        raise _error(name, str(error)) from None
    ours = {"enabled": parsed.enabled, "method": parsed.method, "max_tokens": parsed.draft_tokens}
    for setting in ("return_rejected", "remember"):
        if setting in value:
            raise _error(name, f"{setting} is a request's to set; a rule sets {', '.join(_SETTINGS)}")
    return {key: setting for key, setting in ours.items() if setting is not None and (key != "enabled" or "enabled" in value)}


def _texts(name: str, when: Mapping[str, Any], condition: str) -> frozenset[str]:
    """The values of a condition, which is one text or a list of them."""
    if condition not in when:
        return frozenset()
    value = when[condition]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(text, str) and text for text in values):
        raise _error(name, f"{condition} must be a text or a list of texts, got {checks.shown(value)}")
    return frozenset(values)


def _range(name: str, value: Any) -> tuple[float, float]:
    """The temperatures of a condition: one, or an object with the lowest, the highest or both."""
    if value is None:
        return 0.0, math.inf
    limits = value if isinstance(value, Mapping) else {"min": value, "max": value}
    if not limits:
        raise _error(name, "temperature must be a number or have min, max or both")
    _known(name, limits, ("min", "max"), "temperature")
    try:
        low = checks.real("temperature", limits.get("min", 0.0), 0.0)
        high = checks.real("temperature", limits.get("max", 100.0), 0.0)
    except InvalidParameter as error:
        raise _error(name, str(error)) from None
    if low > high:
        raise _error(name, f"temperature has min {low:g} above max {high:g}")
    return low, high


def _known(name: str, entry: Mapping[Any, Any], keys: Iterable[str], where: str = "") -> None:
    for key in entry:
        if key not in keys:
            hint = checks.nearest(str(key), keys)
            raise _error(name, f"{f'{where}: ' if where else ''}unknown key {checks.shown(key)}{hint}; known: {', '.join(keys)}")


def _error(rule: str, reason: str) -> InvalidParameter:
    return InvalidParameter(FLAG, f"rule {rule!r}: {reason}")
