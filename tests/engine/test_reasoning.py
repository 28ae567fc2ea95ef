"""Reasoning before a grammar: budgets hold exactly, every answer matches, and speculation changes no token."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.none import NoDrafter
from outrider.engine import engine as engine_module
from outrider.engine.engine import Engine
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import Markers, Reasoning, ReasoningGuide, Structured
from outrider.sampling import guide as guide_module
from tests.support import Oracle
from tests.support.engines import run
from tests.support.examples import thinned
from tests.support.schemas import random_schema

METHODS: dict[str, Any] = {
    "suffix": {"method": "suffix", "draft_tokens": 8, "adaptive": False},
    "eagle tree": {"method": "eagle", "draft_tokens": 12, "adaptive": False, "beam": 3, "branch": 3, "depth": 5},
    "draft_model": {"method": "draft_model", "draft_tokens": 5, "adaptive": False},
    "oracle": None,
}
PROMPT = "import json\n\nrecord = "
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NUMBER = {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], "additionalProperties": False}
# Markers of several tokens, of one control token, and such as the bundled model writes by itself.
MARKERS = [("</think>", ""), ("<|tool|>", ""), ("\n", ""), (")\n", "("), ("]", "["), ("</think>", "<think>")]


@functools.cache
def loaded(method: str = "draft_model") -> LLM:
    return LLM(speculation=METHODS[method])


def reasoned(schema: Any, reasoning: Reasoning, **changes: Any) -> SamplingParams:
    structured = Structured("text" if schema is None else "json_schema", schema, reasoning=reasoning)
    return SamplingParams(
        **{"max_tokens": 180, "structured": structured, "skip_special_tokens": False, "temperature": 1.0} | changes
    )


def outputs(llm: LLM, params: Sequence[SamplingParams], speculation: Any = None) -> list[CompletionOutput]:
    return [out for result in llm.generate([PROMPT] * len(params), list(params), speculation) for out in result.outputs]


def both(llm: LLM, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    """Outputs with speculation, checked against those without."""
    fast, plain = outputs(llm, params), outputs(llm, params, False)
    for a, b in zip(plain, fast, strict=True):
        assert (b.token_ids, b.text, b.finish_reason, b.stop_reason) == (a.token_ids, a.text, a.finish_reason, a.stop_reason)
        assert b.speculation["fallback_reason"] is None
    assert llm.engine.pages.used == 0
    return fast


def engine_with(llm: LLM, drafter: Drafter, length: int) -> Engine:
    """Another engine on the model of an LLM, with its compiled grammars."""
    config = EngineConfig(max_num_seqs=8)
    engine = Engine(llm.engine.runner, llm.tokenizer, drafter, FixedLength(length), config, llm.engine.pages)
    engine.grammars = llm.engine.grammars
    return engine


def requests_of(llm: LLM, params: Sequence[SamplingParams]) -> list[Request]:
    return [llm.intake.prepare(PROMPT, one).requests[0] for one in params]


def oracle_outputs(llm: LLM, params: Sequence[SamplingParams], branches: int) -> list[CompletionOutput]:
    """Outputs under drafts that hold the plain text up to a random node, on one branch of a tree."""
    requests = requests_of(llm, params)
    plain = run(engine_with(llm, NoDrafter(), 0), requests)
    oracle = Oracle({processor.seq.request.id: processor.seq.tokens for processor in plain}, 9, branches, vocab=llm.config.vocab)
    fast = run(engine_with(llm, oracle, 9 + branches), requests)
    for a, b in zip(plain, fast, strict=True):
        assert (b.seq.tokens, b.seq.finish_reason, b.seq.stop_reason) == (a.seq.tokens, a.seq.finish_reason, a.seq.stop_reason)
        assert b.seq.stats.fallback_reason is None
    assert max(oracle.accepted) > 4
    return [processor.output() for processor in fast]


def parts(llm: LLM, reasoning: Reasoning, output: CompletionOutput) -> tuple[str, str]:
    """The reasoning and the answer of a text."""
    text = output.text
    if reasoning.begin:
        if not text.startswith(reasoning.begin):
            return "", text
        text = text[len(reasoning.begin) :]
    before, marker, after = text.partition(reasoning.end)
    assert marker, output.text
    return before, after


def check_answer(llm: LLM, params: SamplingParams, schema: Any, output: CompletionOutput) -> int:
    """The answer matches its schema and the budget is kept; returns the tokens of reasoning."""
    assert output.finish_reason == "stop", (output.finish_reason, output.stop_reason, output.text)
    assert params.structured is not None
    reasoning = params.structured.reasoning
    assert reasoning is not None
    jsonschema.validate(json.loads(parts(llm, reasoning, output)[1]), schema)
    count = markers_of(llm, reasoning).count(output.token_ids)
    assert reasoning.budget is not None
    assert count <= reasoning.budget
    return count


def markers_of(llm: LLM, reasoning: Reasoning) -> Markers:
    assert llm.tokenizer is not None
    spellings = llm.tokenizer.spellings()
    return Markers(reasoning, lambda token: spellings[token][1])


@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_random_schemas_after_reasoning(number: int) -> None:
    """Fifty for each drafter: every answer matches, every budget holds, and the ids are those of plain decoding."""
    rng = random.Random(number)
    method = list(METHODS)[number]
    llm = loaded("draft_model" if METHODS[method] is None else method)
    schemas = [random_schema(rng) for _ in range(max(thinned(50), 12))]
    params = []
    for schema in schemas:
        end, begin = rng.choice(MARKERS)
        reasoning = Reasoning(end, begin, budget=rng.randint(0, 24))
        params.append(reasoned(schema, reasoning, seed=rng.randrange(2**62), max_tokens=400))
    found = both(llm, params) if METHODS[method] is not None else oracle_outputs(llm, params, branches=6)
    counts = [check_answer(llm, *row) for row in zip(params, schemas, found, strict=True)]
    budgets = [one.structured.reasoning.budget for one in params]  # type: ignore[union-attr]
    forced = sum(count == budget for count, budget in zip(counts, budgets, strict=True))
    assert 0 < forced < len(counts), "some markers come by themselves, and some are forced"
    assert sum(output.speculation["accepted"] for output in found) > len(found)


@pytest.mark.parametrize("branches", [0, 6], ids=["chains", "trees"])
def test_a_budget_is_exact_inside_accepted_drafts(branches: int) -> None:
    """Drafts run past the budget and past the marker; the answer follows no grammar."""
    llm = loaded()
    budgets = [0, 1, 2, 5, 9, 13, 17, 30]
    for end, begin in (("</think>", ""), ("<|tool|>", "")):
        params = [
            reasoned(None, Reasoning(end, begin, budget), seed=budget, max_tokens=45, temperature=budget % 2, ignore_eos=True)
            for budget in budgets
        ]
        assert llm.tokenizer is not None
        marker = list(llm.tokenizer.encode_bare(end))
        for budget, output in zip(budgets, oracle_outputs(llm, params, branches), strict=True):
            assert output.token_ids[budget : budget + len(marker)] == marker
            assert end not in llm.tokenizer.decode(output.token_ids[:budget], skip_special_tokens=False)
            assert markers_of(llm, Reasoning(end, begin, budget)).count(output.token_ids) == budget


def test_one_token_of_a_marker_in_the_text_and_the_next_in_a_draft() -> None:
    """Budgets one apart put the border between text and draft at every token of the marker."""
    llm = loaded()
    params = [reasoned(NUMBER, Reasoning("</think>", budget=budget), seed=3, temperature=0.0) for budget in range(16)]
    for budget, output in enumerate(oracle_outputs(llm, params, branches=0)):
        assert check_answer(llm, params[budget], NUMBER, output) == budget


def test_reasoning_that_never_ends_is_cut_and_an_end_token_cannot_end_it() -> None:
    llm = loaded()
    assert llm.tokenizer is not None
    ends = {0: 100.0}  # the model would end at once
    (cut,) = both(llm, [reasoned(NUMBER, Reasoning("</think>"), seed=1, max_tokens=30, logit_bias=ends)])
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 30)
    assert 0 not in cut.token_ids
    (free,) = both(llm, [reasoned(None, Reasoning("</think>", budget=20), seed=1, max_tokens=30, logit_bias=ends)])
    assert free.finish_reason == "stop"


def test_an_answer_without_reasoning_follows_the_grammar_from_its_first_token() -> None:
    llm = loaded()
    assert llm.tokenizer is not None
    brace, paren = (llm.tokenizer.encode_bare(text)[0] for text in "{(")
    direct, opened = both(
        llm,
        [
            reasoned(NUMBER, Reasoning(")", "(", budget=4), seed=1, logit_bias={brace: 50.0}),
            reasoned(NUMBER, Reasoning(")", "(", budget=4), seed=1, logit_bias={paren: 50.0}),
        ],
    )
    jsonschema.validate(json.loads(direct.text), NUMBER)
    assert opened.text.startswith("(")
    jsonschema.validate(json.loads(opened.text.partition(")")[2]), NUMBER)


def test_preempted_and_resumed_inside_the_reasoning() -> None:
    params = [reasoned(NUMBER, Reasoning("</think>", budget=40 + i), seed=i, max_tokens=90) for i in range(6)]
    page = 16 * loaded().engine.runner.pool.token_bytes
    llm = LLM(speculation=METHODS["draft_model"], kv_bytes=12 * page, page_size=16, max_model_len=128)
    found = outputs(llm, params)
    assert llm.engine.scheduler.preemptions > 0
    assert [o.token_ids for o in found] == [o.token_ids for o in outputs(loaded(), params, False)]
    for one, output in zip(params, found, strict=True):
        check_answer(llm, one, NUMBER, output)


def test_a_ratio_test_keeps_budget_and_grammar() -> None:
    llm = LLM(speculation={"method": "draft_model", "draft_tokens": 6, "rule": "rejection", "adaptive": False})
    params = [reasoned(NUMBER, Reasoning("</think>", budget=3 * i), seed=i) for i in range(6)]
    for one, output in zip(params, outputs(llm, params), strict=True):
        check_answer(llm, one, NUMBER, output)


def test_refused_at_the_door() -> None:
    for wrong in ({"end": ""}, {"end": "x" * 300}, {"end": "</think>", "budget": -1}, {"end": 3}, {"end": "\ud800"}):
        with pytest.raises(InvalidParameter):
            Reasoning(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="text needs reasoning"):
        Structured("text")
    with pytest.raises(InvalidParameter, match="must be a Reasoning"):
        Structured("json_object", reasoning="</think>")  # type: ignore[arg-type]


def test_a_marker_that_is_forbidden_is_told() -> None:
    llm = loaded()
    assert llm.tokenizer is not None
    letters = list(llm.tokenizer.encode_bare("abcdefgh"))
    (stuck,) = both(llm, [reasoned(None, Reasoning("</think>", budget=4), seed=1, allowed_token_ids=letters)])
    assert (stuck.finish_reason, len(stuck.token_ids)) == ("error", 4)
    assert "no token can follow" in str(stuck.stop_reason)


# the tests above can fail


def test_a_grammar_that_begins_only_in_the_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that misses the marker inside a draft lets wrong tokens through."""
    real = ReasoningGuide.allowed

    def broken(self: ReasoningGuide, tokens: Sequence[int], start: int, path: Sequence[int] = ()) -> Any:
        return real(self, tokens, start) if path else real(self, tokens, start, path)

    monkeypatch.setattr(ReasoningGuide, "allowed", broken)
    monkeypatch.setattr(engine_module, "guided", lambda drafts, *_: drafts)
    params = [reasoned(NUMBER, Reasoning("</think>", budget=4 + i), seed=i) for i in range(6)]

    def checked() -> None:
        for one, output in zip(params, oracle_outputs(loaded(), params, branches=0), strict=True):
            check_answer(loaded(), one, NUMBER, output)

    with pytest.raises(AssertionError):
        checked()


def test_pruning_and_forcing_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)  # on a busy machine a late mask would cost a round
    params = [reasoned(NUMBER, Reasoning("</think>", budget=6), seed=i) for i in range(4)]
    guided = both(loaded("suffix"), params)
    monkeypatch.setattr(engine_module, "guided", lambda drafts, *_: drafts)
    bare = outputs(loaded("suffix"), params)
    assert [o.token_ids for o in bare] == [o.token_ids for o in guided]
    assert sum(o.speculation["rounds"] for o in bare) > sum(o.speculation["rounds"] for o in guided)


def test_a_prefix_from_the_cache_and_several_samples_change_nothing() -> None:
    llm = loaded("suffix")
    prompt = PROMPT + "".join(f"\n# line {i}" for i in range(40))
    params = reasoned(NUMBER, Reasoning("</think>", budget=12), seed=5, n=3)
    runs = [llm.generate([prompt], params, speculation)[0].outputs for speculation in (None, False, None)]
    assert runs[1][0].cached_tokens > 0
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]] == [o.token_ids for o in runs[2]]
    for output in runs[0]:
        check_answer(llm, params, NUMBER, output)


def test_no_token_spells_the_end_of_the_marker_and_the_beginning_of_the_answer() -> None:
    """Tokens such as `],` would put a comma before the answer."""
    llm = loaded()
    words = llm.engine.grammars
    structured = Structured("json_schema", NUMBER, reasoning=Reasoning("]"))
    words.check(structured)
    guide = words.guide(structured, frozenset())
    assert isinstance(guide, ReasoningGuide)
    assert llm.tokenizer is not None
    spelled = {token: llm.tokenizer.bytes_of(token) for token in range(llm.config.vocab)}
    mask = guide.allowed([1], 1)
    assert mask is not None
    over = [token for token, text in spelled.items() if b"]" in text[:-1]]
    assert len(over) > 20
    assert not mask[over].any()
    assert all(mask[token] for token, text in spelled.items() if b"]" not in text[:-1] and token != llm.tokenizer.eos_id)
