"""Grammars that are too much for the parser: speculation and plain decoding end alike, and no token leaves the grammar."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.config import pinned
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import Grammars, Guide, Structured, matcher
from outrider.sampling import guide as guide_module
from tests.support.examples import thinned

AMBIGUOUS = 'start: a\na: a a | "x" | "x" a "x" | b\nb: b b | "x" | a b | b a'


@functools.cache
def loaded(method: str) -> LLM:
    return LLM(speculation=pinned(method))


def random_grammar(rng: random.Random) -> str:
    """A dozen rules that call each other in every way: the same text has very many readings."""
    names = [f"r{i}" for i in range(rng.randint(2, 12))]
    words = [rng.choice(("x", "xx", " x", "y", "x = ", "\n", "(", ")", "0")) for _ in range(6)]
    rules = [f"start: {rng.choice(names)}+"]
    for name in names:
        options = [" ".join(rng.choice((*names, *(f'"{word!s}"'.replace("\n", "\\n") for word in words))) for _ in range(3))]
        options += [" ".join(rng.sample(names, min(2, len(names)))) for _ in range(2)]
        rules.append(f"{name}: " + " | ".join([*options, '"{}"'.format(rng.choice(words).replace("\n", "\\n"))]))
    return "\n".join(rules)


def limit_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Tight limits, in the server's process and in the sandbox; and time, so that nothing but limits counts."""
    monkeypatch.setattr(guide_module, "_BURST_S", 1e6)
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)
    monkeypatch.setattr(matcher, "QUICK_LIMITS", {"max_items_in_row": rows})
    monkeypatch.setattr(matcher, "SANDBOX_LIMITS", {"max_items_in_row": rows})
    assert llm.tokenizer is not None
    llm.engine.grammars.close()
    llm.engine.grammars = Grammars(llm.tokenizer.to_json, llm.config.vocab, llm.tokenizer.eos_id)


def outcome(output: CompletionOutput) -> tuple[object, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


WHOLE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "method", ["suffix:8", "draft_model:5", pytest.param("recycle:12", marks=WHOLE), pytest.param("lookahead:24", marks=WHOLE)]
)
def test_limits_hit_by_drafts_change_no_token(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(method)
    llm = loaded(method)
    ended = accepted = 0
    for case in range(6):
        if case % 3 == 0:
            limit_rows(llm, monkeypatch, rng.choice((100, 160, 250)))
        structured = Structured("lark", AMBIGUOUS if case == 0 else random_grammar(rng))
        params = [
            SamplingParams(seed=seed, max_tokens=40, temperature=1.0 if seed else 0.0, structured=structured) for seed in range(3)
        ]
        try:
            fast, plain = ([r.outputs[0] for r in llm.generate(["x = (x + x)\nx = "] * 3, params, on)] for on in (None, False))
        except InvalidParameter:
            continue  # too much for the compiler already
        assert [outcome(o) for o in fast] == [outcome(o) for o in plain], structured.value
        assert not any(o.speculation["fallback_reason"] for o in fast)
        accepted += sum(o.speculation["accepted"] for o in fast)
        ended += sum(o.finish_reason == "error" for o in fast)
    assert ended, "no grammar hit its limit"
    assert accepted, "no draft was followed"


@pytest.mark.parametrize("rule", ["rejection", "block", "lossy_typical"])
def test_no_rule_leaves_a_grammar_at_its_limits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains drawn from q are not cut before the forward: they end where a mask is unknown."""
    rng = random.Random(rule)
    llm = LLM(speculation={"method": "draft_model", "draft_tokens": 4, "rule": rule})
    limit_rows(llm, monkeypatch, 80)
    for case in range(max(thinned(6), 3)):
        structured = Structured("lark", AMBIGUOUS if case == 0 else random_grammar(rng))
        params = [SamplingParams(seed=seed, max_tokens=30, structured=structured) for seed in range(3)]
        try:
            found = [r.outputs[0] for r in llm.generate(["x = (x + x)\nx = "] * 3, params)]
        except InvalidParameter:
            continue
        start = matcher.compile_grammar(llm.engine.grammars._tokenizer, structured.spec, {"max_items_in_row": 16_000})
        for output in found:
            text = [token for token in output.token_ids if token != 0]
            assert start.deep_copy().try_consume_tokens(text) == len(text), (structured.value, text)
            assert output.speculation["fallback_reason"] is None
            assert output.finish_reason != "error" or "items; max is" in str(output.stop_reason), "a limit, nothing else"


PERSON = Structured(
    "json_schema",
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
)


METHODS = ["none", "suffix:8", "eagle:12:beam=3:depth=5", "draft_model:5", "recycle:12", "medusa:16", "lookahead:24", "auto"]


def lose_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask of a text comes too late for the round that asks for it first."""
    lost: set[tuple[int, int]] = set()
    real = Guide._wait_for

    def late(guide: Guide, question: Any, output: Any) -> Any:
        if not question.path and not question.forced and (id(guide), len(output)) not in lost:
            lost.add((id(guide), len(output)))
            return None
        return real(guide, question, output)

    monkeypatch.setattr(Guide, "_wait_for", late)


@pytest.mark.grid(once=["method"])
@pytest.mark.parametrize("how", ["a round is lost", "masks are late", "masks come from a sandbox"])
@pytest.mark.parametrize("method", METHODS)
def test_waiting_for_masks_changes_no_token(method: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences sit out rounds, or lose one after its forward; the others run, and everybody's text is the same."""
    llm = loaded(method)
    params = [SamplingParams(seed=seed, max_tokens=24, structured=PERSON if seed < 3 else None) for seed in range(4)]
    plain = [outcome(r.outputs[0]) for r in llm.generate(["record = "] * 4, params, False)]
    begun: list[object] = []
    begin = llm.engine.drafter.begin
    monkeypatch.setattr(llm.engine.drafter, "begin", lambda seq: (begun.append(seq), begin(seq)))
    if how == "a round is lost":
        lose_rounds(monkeypatch)
    else:
        monkeypatch.setattr(guide_module, *(("WAIT_S", 0.0) if how == "masks are late" else ("_BURST_S", -1.0)))
    found = [r.outputs[0] for r in llm.generate(["record = "] * 4, params)]
    assert [outcome(output) for output in found] == plain
    assert not any(output.speculation["fallback_reason"] for output in found)
    assert llm.engine.pages.used == 0
    assert how != "a round is lost" or len(begun) > 4, "the drafter must forget the row that is read again"
