"""Margins where texts part, log probabilities, and the check of a schema."""

from __future__ import annotations

import jsonschema
import pytest

from outrider.bench.audit.cases import SCHEMA
from outrider.bench.audit.compare import Margin, divergence, equal, fits_schema, logprob_gap, margin_at
from outrider.bench.audit.records import Choice, TokenLogprob


def said(*tokens: tuple[str, float, dict[str, float]]) -> Choice:
    return Choice("".join(text for text, _, _ in tokens), tokens=tuple(TokenLogprob(*token) for token in tokens))


AGAIN = said(
    ("def", -0.1, {"def": -0.1, "class": -2.0}),
    (" load", -1.0, {" load": -1.0, " l": -1.5, " lo": -1.25, " save": -1.1}),
    ("(", -0.2, {"(": -0.2, "": -3.0, "_x": -4.0}),
)


@pytest.mark.parametrize(
    ("other", "margin"),
    [
        ("def save(", Margin(pytest.approx(0.1))),
        ("def long(", Margin(pytest.approx(0.25))),  # " lo" fits better than " l"
        ("def quit(", Margin(pytest.approx(0.5), at_least=True)),  # not among the likeliest
        ("def load", Margin(pytest.approx(0.25))),  # " lo" fits, and so does the end; the smaller margin counts
        ("def load_x", Margin(pytest.approx(0.25))),
        ("class A", Margin(pytest.approx(1.9))),
    ],
)
def test_margins(other: str, margin: Margin) -> None:
    assert margin_at(AGAIN, Choice("def load("), Choice(other)) == margin


def test_tokens_that_part_before_their_texts_do() -> None:
    again = said(("a", -0.7, {"a": -0.7, "ab": -0.75}), ("b", -0.1, {"b": -0.1, "q": -7.0}), ("c", -0.1, {"c": -0.1, "q": -6.0}))
    text = margin_at(again, Choice("abc"), Choice("abd"))
    assert text == Margin(pytest.approx(0.05))  # "ab" may have been one token
    apart = margin_at(again, Choice("abc", ids=(1, 2, 3)), Choice("abd", ids=(4, 5)))
    assert apart == Margin(pytest.approx(0.05))  # it was
    together = margin_at(again, Choice("abc", ids=(1, 2, 3)), Choice("abd", ids=(1, 2, 4)))
    assert together == Margin(pytest.approx(5.9), at_least=True)  # it was not


def test_margins_that_cannot_be_told() -> None:
    assert margin_at(Choice("def load("), Choice("def load("), Choice("x")) is None  # no log probabilities
    assert margin_at(AGAIN, Choice("import os"), Choice("import sys")) is None  # the plain side says something else now
    assert margin_at(AGAIN, Choice("def load("), Choice("def load(x")) is None  # the plain text ended
    odd = said(("a", -3.0, {"a": -3.0, "b": -0.1}))
    assert margin_at(odd, Choice("a"), Choice("b")) is None  # a greedy choice that its log probability does not explain
    assert margin_at(Choice("xa", tokens=odd.tokens), Choice("xa"), Choice("xb")) is None  # tokens of another text
    assert margin_at(AGAIN, Choice("def keep("), Choice("def load(")) == Margin(0.0)  # now it says what the other said


def test_texts_and_ids_are_compared() -> None:
    assert equal(Choice("a", ids=(1,)), Choice("a"))
    assert not equal(Choice("a", ids=(1, 2)), Choice("a", ids=(3,)))
    assert not equal(Choice("a", ids=(1,)), Choice("b", ids=(1,)))
    parted = divergence(Choice("abcd"), Choice("abxy"))
    assert (parted.character, parted.plain, parted.speculative) == (2, "cd", "xy")


def test_log_probabilities_are_compared_up_to_the_first_other_token() -> None:
    other = said(("def", -0.3, {}), (" save", -9.0, {}))
    assert logprob_gap(AGAIN, other) == (pytest.approx(0.2), 1)
    assert logprob_gap(AGAIN, Choice("def")) == (0.0, 0)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "a", "count": 1, "kind": "file"}', '{"name": "a", "count": 1}', '{"name": 1, "count": 1, "kind": "file"}',
        '{"name": "a", "count": true, "kind": "file"}', '{"name": "a", "count": 1, "kind": "disk"}', "[]", "{", "",
    ],
)  # fmt: skip
def test_the_schema_check_agrees_with_jsonschema(text: str) -> None:
    import json

    try:
        jsonschema.validate(json.loads(text), SCHEMA)
        valid = True
    except (ValueError, jsonschema.ValidationError):
        valid = False
    assert fits_schema(text, SCHEMA) is valid


def test_a_bound_needs_alternatives() -> None:
    again = said(("a", -0.1, {"a": -0.1}))
    assert margin_at(again, Choice("a"), Choice("b")) is None
