"""Two answers to one request: whether they are equal, where they part, and by how much the plain side held its token likelier."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.audit.records import Choice, TokenLogprob

__all__ = ["Divergence", "Margin", "divergence", "equal", "fits_schema", "logprob_gap", "margin_at"]

_SNIPPET = 24
_SLACK = 1e-3  # nats by which a greedy choice may be less likely than the likeliest token: engines round what they return
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Margin:
    """Log probability of the plain side's token less that of the other's, in nats; `at_least` where only a bound is known."""

    nats: float
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first character at which two texts differ, and what follows there."""

    character: int
    plain: str
    speculative: str


def equal(plain: Choice, other: Choice) -> bool:
    """The same text, and the same token ids where both have them."""
    return plain.text == other.text and (plain.ids is None or other.ids is None or plain.ids == other.ids)


def divergence(plain: Choice, other: Choice) -> Divergence:
    place = _common(plain.text, other.text)
    return Divergence(place, plain.text[place : place + _SNIPPET], other.text[place : place + _SNIPPET])


def margin_at(again: Choice, plain: Choice, other: Choice) -> Margin | None:
    """The margin where two answers part, from the plain one sent again with log probabilities. None: it cannot be told.

    Texts may part later than their tokens do. Where ids do not say where that is, every token that could have been another one
    counts, and the margin is the smallest of them.
    """
    place = _common(plain.text, other.text)
    if again.tokens is None or not again.text.startswith(plain.text[:place]):
        return None
    parted = None if plain.ids is None or other.ids is None else _common(plain.ids, other.ids)
    begin, margins = 0, list[Margin]()
    for number, token in enumerate(again.tokens):
        if not again.text.startswith(token.text, begin) or token.logprob < max(token.top.values(), default=0.0) - _SLACK:
            return None  # the tokens are not those of the text, or their log probabilities do not explain the choice
        is_last = number == parted or begin + len(token.text) > place
        if is_last and not plain.text.startswith(token.text, begin):
            return Margin(0.0)  # the plain side itself chose another token this time
        if (is_last or parted is None) and (margin := _margin(token, other.text[begin:], is_last)) is not None:
            margins.append(margin)
        if is_last:
            return min(margins, key=lambda margin: margin.nats, default=None)
        begin += len(token.text)
    return None  # the plain text ended there, and no engine says how likely that was


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of leading characters or ids that two answers share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _margin(token: TokenLogprob, rest: str, is_last: bool) -> Margin | None:
    """Against the likeliest token with which the other text may go on; at the last place, a bound where none is known."""
    fitting = [value for name, value in token.top.items() if name and name != token.text and rest.startswith(name)]
    if is_last and not rest:  # the other text ended: by a token without text, or by none that is known
        fitting = [value for name, value in token.top.items() if not name or name.startswith("<")]
    if fitting:
        return Margin(token.logprob - max(fitting))
    return Margin(token.logprob - min(token.top.values()), at_least=True) if is_last and len(token.top) > 1 else None


def logprob_gap(plain: Choice, other: Choice) -> tuple[float, int]:
    """The largest difference of log probabilities over the leading tokens that both have, and how many those are."""
    largest, count = 0.0, 0
    for a, b in zip(plain.tokens or (), other.tokens or (), strict=False):
        if a.text != b.text:
            break
        largest, count = max(largest, abs(a.logprob - b.logprob)), count + 1
    return largest, count


def fits_schema(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether a text is JSON that fits a schema of types, properties, required, items and enum."""
    try:
        return _fits(json.loads(text), schema)
    except (ValueError, RecursionError):
        return False


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        complete = all(name in value for name in schema.get("required", ()))
        return complete and all(_fits(value[name], part) for name, part in known.items() if name in value)
    return not isinstance(value, list) or all(_fits(item, schema.get("items", {})) for item in value)
