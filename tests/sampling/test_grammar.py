"""Grammars: which are refused, and which tokens a guide allows."""

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
from llguidance import LLTokenizer

from outrider.errors import InvalidParameter, OutriderError, QueueFull
from outrider.model.bundled import bundled_model
from outrider.sampling import Grammars, Guide, SamplingParams, Structured, matcher
from outrider.sampling import grammar as grammar_module
from outrider.sampling import guide as guide_module
from outrider.sampling.matcher import Follower, Spec, compile_grammar
from outrider.sampling.sandbox import Sandbox
from outrider.text import Tokenizer
from tests.support.schemas import random_schema

EOS = 0
VOCAB = 8192
_tokenizer = Tokenizer.load(bundled_model())
assert _tokenizer is not None
TOKENIZER: Tokenizer = _tokenizer


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    cache = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    yield cache
    cache.close()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode_bare(text))


def known(guide: Guide, output: list[int], start: int = 0) -> torch.Tensor:
    """The mask of allowed tokens, however long it takes."""
    while not guide.ready(output, start):
        guide._workers.wait()
    mask = guide.allowed(output, start)
    while mask is None:
        guide._workers.wait()
        guide.ready(output, start)
        mask = guide.allowed(output, start)
    return mask


def follows(grammars: Grammars, structured: Structured, output: str | list[int], stops: tuple[int, ...] = (EOS,)) -> set[int]:
    guide = grammars.guide(structured, frozenset(stops))
    mask = known(guide, ids(output) if isinstance(output, str) else output)
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
    """Each attack ends with an error that says why. Those that hang or crash the compiler do so in another process."""
    monkeypatch.setattr(grammar_module, "COMPILE_S", 1.0)
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
def test_large_grammars_are_served(grammars: Grammars, kind: str, value: Any) -> None:
    guide = grammars.guide(Structured(kind, value), frozenset((EOS,)))
    rng, output = random.Random(0), []
    for _ in range(12):
        mask = known(guide, output)
        assert bool(mask.any()), guide.fault
        output.append(rng.choice(mask.nonzero().flatten().tolist()))


def test_the_compiled_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    compiled: list[str] = []
    real = matcher.compile_grammar

    def counting(tokenizer: Any, spec: Spec, limits: Any) -> Any:
        compiled.append(spec[1])
        return real(tokenizer, spec, limits)

    monkeypatch.setattr(matcher, "compile_grammar", counting)
    cache = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    for text in "abcaadab":
        cache.check(Structured("regex", text))
    cache.close()
    assert compiled == list("abcdb")


def test_known_grammars_do_not_wait_for_a_slow_one(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread asks for guides: a compiler that hangs for another request must not hold it."""
    familiar, busy, go_on = Structured("regex", "known"), threading.Event(), threading.Event()
    grammars.check(familiar)

    def slow(_sandbox: Any, _question: Any, _budget: float) -> str:
        busy.set()
        go_on.wait(60)
        return "slow"

    monkeypatch.setattr(Sandbox, "ask", slow)
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(grammars.check, Structured("regex", "another"))
        busy.wait(60)
        try:
            assert pool.submit(grammars.guide, familiar, frozenset((EOS,))).result(20).ready([], 0)
        finally:
            go_on.set()
        with pytest.raises(InvalidParameter, match="slow"):
            hanging.result()


def test_a_missing_tokenizer_or_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_any_stop_id_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop id ends the text as the tokenizer's EOS does, and nothing else may follow an end."""
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)
    grammars = Grammars(TOKENIZER.to_json, VOCAB + 64, EOS)
    structured, stops = Structured("regex", "ab?"), (5, VOCAB + 3)
    grammars.check(structured)
    ends = {EOS, *stops}
    a, b = ids("a"), ids("b")
    assert follows(grammars, structured, a, stops) == ends | set(b)
    for output in ([*a, *b], [*a, EOS], [*a, 5], [*a, EOS, 5, EOS], [*a, *b, VOCAB + 3]):
        assert follows(grammars, structured, output, stops) == ends
    guide = grammars.guide(structured, frozenset(stops))
    known(guide, [])
    assert guide.allowed([], 0, [EOS]) is None
    assert not guide.complete([], 0)
    assert guide.allowed(a, 0, [EOS, *b]) is None
    assert guide.complete([*a, EOS], 0)
    grammars.close()


@pytest.mark.parametrize("vocab", [VOCAB - 1000, VOCAB, VOCAB + 100])
def test_the_mask_is_as_wide_as_the_logits(vocab: int) -> None:
    grammars = Grammars(TOKENIZER.to_json, vocab, EOS)
    mask = known(grammars.guide(Structured("regex", "(?s:.*)"), frozenset((EOS,))), [])
    grammars.close()
    assert mask.shape == (vocab,)
    assert not bool(mask[VOCAB:].any())


def test_whitespace_is_bounded(grammars: Grammars) -> None:
    nulls = Structured("json_schema", {"type": "array", "items": {"type": "null"}})
    space = set(ids(" "))
    assert space & follows(grammars, nulls, "[")
    assert not space & follows(grammars, nulls, "[ ")
    assert not set(ids("\n")) & (follows(grammars, nulls, "[") | follows(grammars, nulls, "[null,"))
    lines = Structured("json_schema", {"type": "array", "items": {"type": "null"}}, whitespace=r"\x0A\x20{0,4}")
    assert not space & follows(grammars, lines, "[")
    assert space & follows(grammars, lines, "[\n")
    assert not space & follows(grammars, lines, "[\n" + " " * 4)
    assert set(ids("\n")) & follows(grammars, Structured("json_object", whitespace=r"\x0A"), "{")
    tabs = Structured("json_schema", {"type": "array", "x-guidance": {"whitespace_pattern": r"\x09"}})
    assert set(ids("\t")) & follows(grammars, tabs, "[")


def test_masks_do_not_depend_on_earlier_queries(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries tree nodes in any order, forbidden ones among them, while the text grows, and compares with a fresh guide."""
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)  # every query is answered
    rng = random.Random(3)
    for case in range(12):
        structured = Structured("json_schema", random_schema(rng))
        grammars.check(structured)
        guide, output = grammars.guide(structured, frozenset((EOS, 7))), [1, 2, 3]
        for _ in range(6):
            paths = _paths(guide, output, rng)
            rng.shuffle(paths)
            for path in paths:
                fresh = grammars.guide(structured, frozenset((EOS, 7))).allowed(output, 3, path)
                allowed = guide.allowed(output, 3, path)
                assert (allowed is None) == (fresh is None), (case, path)
                assert allowed is None or torch.equal(allowed, fresh)  # type: ignore[arg-type]
            output = [*output, *rng.choice([p for p in paths if guide.allowed(output, 3, p) is not None])]


def _paths(guide: Guide, output: list[int], rng: random.Random) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for _ in range(8):
        above = rng.choice(paths)
        mask = guide.allowed(output, 3, above)
        allowed = [] if mask is None else mask.nonzero().flatten().tolist()
        paths.append([*above, rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(VOCAB)])
    return paths


def test_a_limit_hit_in_a_draft_costs_the_draft_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the parser's limits no token is allowed and the guide says why; the text before the limit continues."""
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)
    monkeypatch.setattr(matcher, "QUICK_LIMITS", {"max_items_in_row": 50})
    monkeypatch.setattr(matcher, "SANDBOX_LIMITS", {"max_items_in_row": 50})
    grammars = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    heavy = 'start: "a" | "b" c\nc: ' + " | ".join(f'"x{i}"' for i in range(100))
    guide = grammars.guide(Structured("lark", heavy), frozenset((EOS,)))
    stuck = ids("b")
    root = known(guide, [])
    assert bool(root[ids("a") + ids("b")].all())
    assert guide.allowed([], 0, stuck) is None
    assert torch.equal(known(guide, []), root)
    assert guide.fault is None
    assert not bool(known(guide, stuck).any())
    assert "max is 50" in str(guide.fault)
    grammars.close()


def test_a_grammar_beyond_the_server_limits_runs_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox gives equal masks and follows no drafts, and the engine does not wait for it."""
    wide = Structured("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(60)}})
    plain = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    plain.check(wide)
    monkeypatch.setattr(matcher, "QUICK_LIMITS", {"max_items_in_row": 100})
    narrow = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    with_stop = frozenset((EOS, 7))
    quick, slow = plain.guide(wide, with_stop), narrow.guide(wide, with_stop)
    output = [1, 2]
    for token in ids('{"p3": null, "p40": null}'):
        assert torch.equal(known(quick, output, 2), known(slow, output, 2))
        output = [*output, token]
    assert torch.equal(known(quick, output, 2), known(slow, output, 2))
    assert quick.complete(output, 2)
    assert slow.complete(output, 2)
    assert (quick.slow, slow.slow) == (False, True)
    assert slow.allowed(output, 2, [5]) is None
    plain.close()
    narrow.close()


def test_a_draft_is_not_followed_in_a_sandbox(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of paths that were queried before the grammar moved to a sandbox stay unknown."""
    monkeypatch.setattr(guide_module, "_BURST_S", -1.0)
    structured = Structured("regex", "ab[cd]{5}")
    grammars.check(structured)
    guide = grammars.guide(structured, frozenset((EOS,)))
    path = ids("ab")
    guide.prefetch([], 0, [[], path])
    known(guide, [])
    while guide._busy:
        guide._workers.wait()
    assert guide.slow
    assert guide.allowed([], 0, path) is None


def test_budgets_end_the_request_that_exceeds_them(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    structured = Structured("lark", 'start: a\na: a a | "x" | "x" a "x" | b\nb: b b | "x" | a b | b a')
    monkeypatch.setattr(guide_module, "_BURST_S", 0.0)  # every grammar is slow
    guide, token = grammars.guide(structured, frozenset((EOS,))), ids("x")
    assert bool(known(guide, token).any())
    assert guide.slow
    monkeypatch.setattr(guide_module, "REQUEST_S", -1.0)
    assert not bool(known(guide, token * 2).any())
    assert guide.too_slow
    assert not guide.complete(token * 2, 0)
    monkeypatch.undo()
    monkeypatch.setattr(guide_module, "_BURST_S", 0.0)
    monkeypatch.setattr(guide_module, "_REPLAY_S", 0.0)
    monkeypatch.setattr(guide_module, "MASK_S", 0.0)
    late = grammars.guide(structured, frozenset((EOS,)))
    known(late, [])
    assert not bool(known(late, token).any())
    assert late.too_slow
    monkeypatch.undo()
    assert bool(known(grammars.guide(structured, frozenset((EOS,))), token).any()), "the next one is served"


def test_a_late_mask_waits_for_the_next_round(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is unknown at first stays unknown for the whole round."""
    guide = grammars.guide(Structured("regex", "[ab]{9}"), frozenset((EOS,)))
    known(guide, [])
    go_on, real = threading.Event(), Follower.step

    def late(self: Follower, *args: Any) -> Any:
        go_on.wait(60)
        return real(self, *args)

    monkeypatch.setattr(Follower, "step", late)
    output = ids("a")
    assert guide.ready(output, 0), "it may yet come while the forward runs"
    assert guide.allowed(output, 0) is None
    assert not guide.ready(output, 0)
    assert guide.allowed(output, 0, ids("b")) is None
    go_on.set()
    assert guide.allowed(output, 0) is None
    assert bool(known(guide, output).any())


def test_refusals_and_grammars_in_flight_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_texts: list[Any] = []
    go_on, real = threading.Event(), Sandbox.ask

    def counting(sandbox: Sandbox, question: Any, budget: float) -> Any:
        compiled_texts.append(question[1][1])
        go_on.wait(60)
        return real(sandbox, question, budget)

    monkeypatch.setattr(Sandbox, "ask", counting)
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 3)
    grammars = Grammars(TOKENIZER.to_json, VOCAB, EOS)
    bad, good = Structured("regex", "(a"), Structured("regex", "a")
    waiting = [grammars.compiled(structured) for structured in (bad, good, bad, good)]
    grammars.compiled(Structured("regex", "b"))
    with pytest.raises(QueueFull, match="3 grammars"):
        grammars.compiled(Structured("regex", "c"))
    go_on.set()
    for future in (waiting[0], waiting[2], grammars.compiled(bad)):
        with pytest.raises(InvalidParameter, match="unclosed group"):
            future.result()
    assert waiting[1].result() is waiting[3].result() is grammars.compiled(good).result()
    assert sorted(compiled_texts) == ["(a", "a", "b"]
    monkeypatch.setattr(grammar_module, "REFUSED_S", -1.0)
    with pytest.raises(InvalidParameter):
        grammars.check(bad)
    assert compiled_texts.count("(a") == 2
    grammars.close()


def test_the_cache_is_bounded_by_bytes() -> None:
    kept: grammar_module.LruCache[int] = grammar_module.LruCache(100, 10)
    for i in range(5):
        kept.put(Structured("regex", str(i) * 4), i)
    assert [kept.get(Structured("regex", str(i) * 4)) for i in range(5)] == [None, None, None, 3, 4]


# the matcher


AMBIGUOUS = """start: r5+
r0: r4 r0 r2 | r3 r2 | r5 r0 | "x"
r1: ")" "(" ")" | r4 r2 | r0 r1 | "("
r2: r0 r3 r1 | r3 r0 | r0 r5 | "\\n"
r3: r0 r1 "0" | r5 r4 | r4 r0 | "0"
r4: r3 "(" "\\n" | r5 r1 | r3 r2 | "("
r5: "0" "(" r5 | r1 r3 | r0 r4 | "(" """


def test_an_abandoned_path_leaves_nothing_behind() -> None:
    """Follows random texts and paths in an ambiguous grammar and compares with a fresh matcher."""
    tokenizer = LLTokenizer(TOKENIZER.to_json(), n_vocab=VOCAB, eos_token=EOS)
    start = compile_grammar(tokenizer, ("lark", AMBIGUOUS, None), matcher.SANDBOX_LIMITS)
    text = ids("0\n\nx000000000\n\n000000")
    follower = Follower(start, frozenset((EOS,)))
    follower.step(text[:-4], text[-4:])
    other = [*text[:-1], *ids("\n")]
    assert follower.step(other) == Follower(start, frozenset((EOS,))).step(other)
    rng = random.Random(0)
    for _ in range(20):
        follower, output = Follower(start, frozenset((EOS,))), []
        for _ in range(8):
            for _ in range(4):
                path = _walk(start, output, rng)
                assert follower.step(output, path) == Follower(start, frozenset((EOS,))).step(output, path)
            output = [*output, *_walk(start, output, rng)[:1]]


def _walk(start: Any, output: list[int], rng: random.Random) -> list[int]:
    path: list[int] = []
    for _ in range(rng.randint(1, 5)):
        step = Follower(start, frozenset((EOS,))).step(output, path)
        bits = b"" if step is None or step.bits is None else step.bits
        allowed = [8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1]
        path.append(rng.choice(allowed) if allowed and rng.random() < 0.9 else rng.randrange(VOCAB))
    return path
