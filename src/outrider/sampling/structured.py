"""Structured output: the schema, expression or grammar that a request wants its output to match."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import InvalidParameter
from outrider.sampling.matcher import Spec
from outrider.sampling.reasoning import Reasoning

__all__ = ["KINDS", "Structured"]

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "lark", "text")
MAX_BYTES = 64 * 1024
MAX_DEPTH = 96  # brackets within brackets: parsers recurse
_MAX_WHITESPACE = 256
_PARAM = "response_format"


@dataclass(frozen=True, slots=True)
class Structured:
    """What the output must match.

    kind            value
    "json_schema"   a schema, as a mapping, a bool or JSON text; properties come in the schema's order
    "json_object"   nothing: any JSON object
    "regex"         a regular expression for the whole output
    "choice"        a list of strings, one of which is the output
    "grammar"       a context-free grammar, in GBNF (`root ::= ...`) or Lark (`start: ...`)
    "lark"          a grammar in llguidance's dialect of Lark
    "text"          nothing: any text, after reasoning that has a budget

    With `reasoning` the grammar begins where the model's reasoning ends.
    `whitespace` is a regular expression for the white space between the parts of JSON; by default one blank or none.
    """

    kind: str
    value: Any = None  # kept as text: equal grammars are equal and hash alike
    whitespace: str | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter(_PARAM, f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        object.__setattr__(self, "value", _text(self.kind, self.value))
        _check_size(self.kind, self.value)
        self._check_whitespace()
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise InvalidParameter("reasoning", f"must be a Reasoning, got {type(self.reasoning).__name__}")
        if self.kind == "text" and (self.reasoning is None or self.reasoning.budget is None):
            raise InvalidParameter(_PARAM, "text needs reasoning with a budget; without one nothing is prescribed")

    @property
    def answer(self) -> Structured | None:
        """The grammar of the answer alone; None where the answer is free."""
        if self.kind == "text":
            return None
        return self if self.reasoning is None else replace(self, reasoning=None)

    @property
    def spec(self) -> Spec:
        """The input of the grammar compiler."""
        return self.kind, self.value, self.whitespace

    def _check_whitespace(self) -> None:
        if self.whitespace is None:
            return
        if self.kind not in ("json_schema", "json_object"):
            raise InvalidParameter("whitespace", f"is for JSON; a {self.kind} defines its white space itself")
        if not isinstance(self.whitespace, str) or not 0 < len(self.whitespace) <= _MAX_WHITESPACE:
            raise InvalidParameter("whitespace", f"must be a regular expression of 1 to {_MAX_WHITESPACE} characters")
        _check_size("white space", self.whitespace)


def _text(kind: str, value: Any) -> str:
    """A grammar's value as one string, or InvalidParameter."""
    if kind in ("json_object", "text"):
        if value is not None and value != "":
            raise InvalidParameter(_PARAM, f"{kind} takes no value; use json_schema to say which object")
        return ""
    if kind == "choice":
        return _choices(value)
    if kind == "json_schema" and not isinstance(value, str):
        if not isinstance(value, Mapping | bool):
            raise InvalidParameter(_PARAM, f"a JSON schema is an object or a bool, got {type(value).__name__}")
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameter(_PARAM, f"the schema cannot be written as JSON: {error}") from None
    if not isinstance(value, str) or not value:
        raise InvalidParameter(_PARAM, f"{kind} needs a non-empty string, got {type(value).__name__}")
    return value


def _choices(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidParameter(_PARAM, "choice needs a list of at least one string")
    for item in value:
        if not isinstance(item, str) or not item:
            raise InvalidParameter(_PARAM, f"choice must hold non-empty strings, got {item!r}")
    return json.dumps(list(value), ensure_ascii=False)


def _check_size(kind: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidParameter(_PARAM, f"the {kind} holds a lone surrogate, which no text can contain") from None
    if size > MAX_BYTES:
        raise InvalidParameter(_PARAM, f"the {kind} has {size} bytes; at most {MAX_BYTES} are taken")
    if _depth(text) > MAX_DEPTH:
        raise InvalidParameter(_PARAM, f"the {kind} is nested deeper than {MAX_DEPTH} brackets; flatten it, or use $ref")


def _depth(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth = max(depth - 1, 0)
    return deepest
