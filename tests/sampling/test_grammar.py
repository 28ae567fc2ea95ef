"""Grammars: what is refused at the door, and what a guide lets follow."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits

from outrider.errors import InvalidParameter, OutriderError
from outrider.model.bundled import bundled_model
from outrider.sampling import Grammars, Guide, SamplingParams, Structured
from outrider.sampling import grammar as grammar_module
from outrider.sampling import judge as judge_module
from outrider.text import Tokenizer
from tests.schemas import random_schema

EOS = 0
VOCAB = 8192
_tokenizer = Tokenizer.load(bundled_model())
assert _tokenizer is not None
TOKENIZER: Tokenizer = _tokenizer


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    own = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    yield own
    own.close()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode_bare(text))


def follows(grammars: Grammars, structured: Structured, output: str | list[int], stops: tuple[int, ...] = (EOS,)) -> set[int]:
    guide = grammars.guide(structured, frozenset(stops))
    mask = guide.allowed(ids(output) if isinstance(output, str) else output, 0)
    assert mask is not None
    return set(mask.nonzero().flatten().tolist())


# what is refused


def test_equal_grammars_are_one() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Structured("json_schema", schema) == Structured("json_schema", json.dumps(schema))
    assert len({Structured("choice", ["a", "b"]), Structured("choice", ("a", "b"))}) == 1
    assert SamplingParams(structured=Structured("json_object")).adjusts
    with pytest.raises(InvalidParameter, match="structured"):
        SamplingParams(structured={"type": "object"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("xml", "<a/>", "known: json_schema"),
        ("json_schema", 3, "an object or a bool"),
        ("json_schema", {"enum": [float("nan")]}, "written as JSON"),
        ("json_schema", {"enum": {1, 2}}, "written as JSON"),
        ("json_schema", "", "non-empty"),
        ("json_object", {"type": "object"}, "takes no value"),
        ("regex", None, "non-empty"),
        ("regex", "a" * 70_000, "at most 65536"),
        ("regex", "(" * 200 + ")" * 200, "nested deeper"),
        ("regex", "\ud800", "surrogate"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "non-empty strings"),
        ("choice", "yes", "list"),
        ("choice", "[" * 5000, "list"),
        ("lark", "", "non-empty"),
    ],
)
def test_malformed_values(kind: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as caught:
        Structured(kind, value)
    assert caught.value.param == "response_format"


def test_a_schema_too_deep_to_write() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="response_format"):
        Structured("json_schema", schema)


def _chain(step: str, count: int) -> str:
    return f'start: a{count}\na0: "x"\n' + "\n".join(step.format(i, i - 1) for i in range(1, count + 1))


_REFS = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i - 1}"}} for i in range(1, 1200)} | {"a0": {"type": "integer"}}
_AUTOMATON = "[ab]*a[ab]{%d}"
ATTACKS = {
    "not JSON": ("json_schema", '{"type":', "json"),
    "no such type": ("json_schema", {"type": "objekt"}, "Invalid type"),
    "reference to itself": ("json_schema", {"$ref": "#"}, "nothing matches"),
    "loop of references": ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing matches"),
    "reference to a URL": ("json_schema", {"$ref": "http://127.0.0.1/x.json"}, "not present"),
    "exponential allOf": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(10)]} for i in range(12)]},
        "too large",
    ),
    "stack of references": ("json_schema", {"$ref": "#/$defs/a1199", "$defs": _REFS}, "too long"),
    "crossed patterns": (
        "json_schema",
        {"type": "string", "allOf": [{"pattern": f"^{_AUTOMATON % i}$"} for i in range(10, 40)]},
        "too long",
    ),
    "unknown keyword": ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "open group": ("regex", "(a", "unclosed group"),
    "lookahead": ("regex", "(?=a)b", "look-around"),
    "back-reference": ("regex", r"(a)\1", "backreferences"),
    "stars": ("regex", "a" + "*" * 60_000, "regex"),
    "crossed terminals": ("lark", "start: X\nX: " + " & ".join(f"/{_AUTOMATON % i}/" for i in range(10, 40)), "too long"),
    "stack of rules": ("lark", _chain("a{}: a{}", 4000), "too long"),
    "doubling terminals": ("lark", _chain("A{0}: A{1} A{1}", 40).replace("a40", "A40").replace("a0", "A0"), "too (big|long)"),
    "rule without end": ("lark", "start: a\na: a", "nothing matches"),
    "file": ("lark", "%import /etc/passwd\nstart: X", "lark"),
    "broken GBNF": ("grammar", "root ::= (", "GBNF"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each ends with an error that says why; those that hang or crash the compiler do so in another process."""
    monkeypatch.setattr(judge_module, "_PATIENCE_S", 1.0)
    kind, value, said = ATTACKS[name]
    with pytest.raises(InvalidParameter, match=said) as caught:
        grammars.check(Structured(kind, value))
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 500
    monkeypatch.undo()
    grammars.check(Structured("regex", "[0-9]{1,3}" + name))  # whatever it did, the next one is served


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"enum": [f"value {i}" for i in range(4000)]}),
        ("choice", [f"word {i}" for i in range(4000)]),
        ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
        ("json_schema", {"type": "string", "maxLength": 10**9, "minLength": 10**8}),
        ("json_schema", {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
        ("regex", "(a+)+b"),
        ("regex", "((a{0,1000}){0,1000}){0,1000}"),
        ("regex", "[ab]*a[ab]{500}c"),
        ("lark", "start: start start | /a/"),
    ],
)
def test_large_ones_are_served(grammars: Grammars, kind: str, value: Any) -> None:
    guide = grammars.guide(Structured(kind, value), frozenset((EOS,)))
    rng, output = random.Random(0), []
    for _ in range(12):
        mask = guide.allowed(output, 0)
        assert mask is not None
        assert bool(mask.any()), guide.fault
        output.append(rng.choice(mask.nonzero().flatten().tolist()))


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    compiled: list[str] = []
    real = grammar_module.compile_grammar

    def counting(tokenizer: Any, kind: str, text: str) -> Any:
        compiled.append(text)
        return real(tokenizer, kind, text)

    monkeypatch.setattr(grammar_module, "compile_grammar", counting)
    own = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    for text in "abcaadab":
        own.check(Structured("regex", text))
    own.close()
    assert compiled == list("abcdb")


def test_known_grammars_do_not_wait_for_a_slow_one(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread asks for guides: a compiler that hangs for another request must not hold it."""
    known, busy, go_on = Structured("regex", "known"), threading.Event(), threading.Event()
    grammars.check(known)

    def slow(_judge: Any, _kind: str, _text: str) -> str:
        busy.set()
        go_on.wait(60)
        return "slow"

    monkeypatch.setattr(judge_module.Judge, "complaint", slow)
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(grammars.check, Structured("regex", "another"))
        busy.wait(60)
        try:
            assert pool.submit(grammars.guide, known, frozenset((EOS,))).result(20).allowed([], 0) is not None
        finally:
            go_on.set()
        with pytest.raises(InvalidParameter, match="slow"):
            hanging.result()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="no tokenizer"):
        Grammars(None, VOCAB, None).check(Structured("json_object"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OutriderError, match=r"outrider\[serve\]"):
        Grammars(TOKENIZER.to_json, VOCAB, EOS).check(Structured("json_object"))


# what may follow


def test_tokens_are_allowed_where_their_text_is(grammars: Grammars) -> None:
    choices = Structured("choice", ["yes", "yesterday", "naïve 🙂"])
    for output in ("", "yes", "na"):
        tails = [choice[len(output) :].encode() for choice in ("yes", "yesterday", "naïve 🙂") if choice.startswith(output)]
        expected = {
            token
            for token, (added, text) in TOKENIZER.spellings().items()
            if not added and any(tail.startswith(text) for tail in tails)
        }
        assert follows(grammars, choices, output) == expected | ({EOS} if output == "yes" else set())
    assert follows(grammars, choices, "yesterday") == {EOS}


def test_ends() -> None:
    """A stop id ends the text as the tokenizer's own does; after an end there is nothing else."""
    grammars = Grammars(TOKENIZER.to_json, VOCAB + 64, EOS)
    structured, stops = Structured("regex", "ab?"), (5, VOCAB + 3)
    ends = {EOS, *stops}
    a, b = ids("a"), ids("b")
    assert follows(grammars, structured, a, stops) == ends | set(b)
    for output in ([*a, *b], [*a, EOS], [*a, 5], [*a, EOS, 5, EOS], [*a, *b, VOCAB + 3]):
        assert follows(grammars, structured, output, stops) == ends
    guide = grammars.guide(structured, frozenset(stops))
    assert guide.allowed([], 0, [EOS]) is None
    assert not guide.complete([], 0)
    assert guide.allowed(a, 0, [EOS, *b]) is None
    assert guide.complete([*a, EOS], 0)
    grammars.close()


@pytest.mark.parametrize("vocab", [VOCAB - 1000, VOCAB, VOCAB + 100])
def test_the_mask_is_as_wide_as_the_logits(vocab: int) -> None:
    grammars = Grammars(TOKENIZER.to_json, vocab, EOS)
    mask = grammars.guide(Structured("regex", "(?s:.*)"), frozenset((EOS,))).allowed([], 0)
    grammars.close()
    assert mask is not None
    assert mask.shape == (vocab,)
    assert not bool(mask[VOCAB:].any())


def test_whitespace_is_bounded(grammars: Grammars) -> None:
    nulls = Structured("json_schema", {"type": "array", "items": {"type": "null"}})
    space = set(ids(" "))
    assert space & follows(grammars, nulls, "[")
    assert not space & follows(grammars, nulls, "[ ")
    assert space & follows(grammars, nulls, "[\n")
    assert not space & follows(grammars, nulls, "[\n" + " " * 16)


def test_answers_do_not_depend_on_what_was_asked_before(grammars: Grammars) -> None:
    """Nodes of trees in any order, forbidden ones among them, while the text grows: as a fresh guide says."""
    rng = random.Random(3)
    for case in range(12):
        structured = Structured("json_schema", random_schema(rng))
        guide, output = grammars.guide(structured, frozenset((EOS, 7))), [1, 2, 3]
        for _ in range(6):
            paths = _paths(guide, output, rng)
            rng.shuffle(paths)
            for path in paths:
                fresh = grammars.guide(structured, frozenset((EOS, 7))).allowed(output, 3, path)
                found = guide.allowed(output, 3, path)
                assert (found is None) == (fresh is None), (case, path)
                assert found is None or torch.equal(found, fresh)  # type: ignore[arg-type]
            output = [*output, *rng.choice([p for p in paths if guide.allowed(output, 3, p) is not None])]


def _paths(guide: Guide, output: list[int], rng: random.Random) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for _ in range(8):
        above = rng.choice(paths)
        mask = guide.allowed(output, 3, above)
        allowed = [] if mask is None else mask.nonzero().flatten().tolist()
        paths.append([*above, rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(VOCAB)])
    return paths


def test_a_limit_hit_in_a_draft_costs_the_draft_only(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the parser's limits nothing may follow, and the guide says why; the text before it goes on."""
    monkeypatch.setattr(judge_module, "limits", lambda: LLParserLimits(max_items_in_row=50, verbose_errors=False))
    heavy = 'start: "a" | "b" c\nc: ' + " | ".join(f'"x{i}"' for i in range(100))
    guide = grammars.guide(Structured("lark", heavy), frozenset((EOS,)))
    stuck = ids("b")
    root = guide.allowed([], 0)
    assert root is not None
    assert bool(root[ids("a") + ids("b")].all())
    assert guide.allowed([], 0, stuck) is None
    assert torch.equal(guide.allowed([], 0), root)  # type: ignore[arg-type]
    assert guide.fault is None
    none = guide.allowed(stuck, 0)
    assert none is not None
    assert not bool(none.any())
    assert "max is 50" in str(guide.fault)
