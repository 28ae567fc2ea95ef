"""Structured output through the engine: every text matches, and speculation changes no token."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider import LLM, SamplingParams
from outrider.core import Batch, Drafts, Plan
from outrider.engine import engine as engine_module
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import Guide, Row, Structured
from outrider.sampling import guide as guide_module
from tests.support.examples import thinned
from tests.support.schemas import random_schema

METHODS = {
    "suffix": {"method": "suffix", "draft_tokens": 8, "adaptive": False},
    "eagle tree": {"method": "eagle", "draft_tokens": 12, "adaptive": False, "beam": 3, "branch": 3, "depth": 5},
    "draft_model": {"method": "draft_model", "draft_tokens": 5, "adaptive": False},
    "mixture": "mixture:10:adaptive=false:members=suffix+(eagle:beam=2:branch=3:depth=5)",
}
PROMPT = "import json\n\nrecord = "
PERSON = Structured(
    "json_schema",
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "size": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    },
    whitespace=r"\x20|\x0A(\x20{0,16}|\x09{0,4})",  # lines and indentation: more to choose, and longer texts
)


@functools.cache
def loaded(method: str = "draft_model") -> LLM:
    return LLM(speculation=METHODS[method])


def outputs(llm: LLM, params: Sequence[SamplingParams], speculation: Any = None, prompt: str = PROMPT) -> list[CompletionOutput]:
    return [out for result in llm.generate([prompt] * len(params), list(params), speculation) for out in result.outputs]


def both(llm: LLM, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    """Outputs with speculation, checked against those without."""
    fast, plain = outputs(llm, params), outputs(llm, params, False)
    for a, b in zip(plain, fast, strict=True):
        assert (b.token_ids, b.text, b.finish_reason, b.stop_reason) == (a.token_ids, a.text, a.finish_reason, a.stop_reason)
        assert b.logprobs == a.logprobs
        assert b.speculation["fallback_reason"] is None
    assert llm.engine.pages.used == 0
    return fast


@pytest.mark.parametrize("number", range(len(METHODS)), ids=METHODS)
def test_random_schemas(number: int) -> None:
    """Many for each method, at temperature 1, in one batch with requests that have no grammar."""
    rng = random.Random(number)
    llm = loaded(list(METHODS)[number])
    count = thinned(50)
    schemas = [random_schema(rng) for _ in range(count)]
    params = [
        SamplingParams(temperature=1.0, seed=rng.randrange(2**62), max_tokens=140, structured=Structured("json_schema", schema))
        for schema in schemas
    ]
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30) for seed in range(4)]
    found = both(llm, [*params, *free])
    cut = 0
    for schema, output in zip(schemas, found[:count], strict=True):
        if output.finish_reason == "length":
            cut += 1
            continue
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), schema)
    assert cut <= 0.06 * count
    assert sum(output.speculation["accepted"] for output in found[:count]) > 2 * count
    if number == 0:
        assert [o.token_ids for o in found[count:]] == [o.token_ids for o in outputs(llm, free, False)]


@pytest.mark.parametrize(
    "speculation",
    [
        "ngram:6:adaptive=false",
        "recycle:12:adaptive=false",
        "medusa:16:adaptive=false",
        "lookahead:24:adaptive=false",
        "cascade:6:adaptive=false:levels=ngram+draft_model",
        "early_exit:3:adaptive=false:exit_layer=9",
        "auto",
    ],
)
def test_every_drafter(speculation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the controller's costs are this machine's own
    params = [SamplingParams(seed=i, max_tokens=90, temperature=(0.0, 0.7, 1.0)[i % 3], structured=PERSON) for i in range(3)]
    both(LLM(speculation=speculation), params)


@pytest.mark.parametrize(
    ("structured", "matches"),
    [
        (Structured("regex", r"[A-Z][a-z]{1,8}, \d{2}"), lambda text: re.fullmatch(r"[A-Z][a-z]{1,8}, \d{2}", text)),
        (Structured("choice", ["yes", "no", "peut-être 🙂"]), lambda text: text in ("yes", "no", "peut-être 🙂")),
        (Structured("grammar", 'root ::= "(" root ")" | [0-9]'), lambda text: re.fullmatch(r"(\()*\d(\))*", text)),
        (
            Structured("lark", 'start: word ("+" word){0,3}\nword: /[a-z]{1,5}/'),
            lambda text: re.fullmatch(r"[a-z]{1,5}(\+[a-z]{1,5}){0,3}", text),
        ),
        (PERSON, json.loads),
    ],
    ids=["regex", "choice", "GBNF", "Lark", "schema"],
)
def test_every_kind_with_n_samples(structured: Structured, matches: Any) -> None:
    found = both(loaded(), [SamplingParams(n=4, seed=3, max_tokens=120, structured=structured)])
    assert all(output.finish_reason == "stop" and matches(output.text) for output in found)
    assert len({output.text for output in found}) > 1


def test_any_json_object() -> None:
    """Nothing bounds such a text, so many are cut; what is whole is an object."""
    params = [SamplingParams(seed=i, max_tokens=60, temperature=0.7, structured=Structured("json_object")) for i in range(8)]
    whole = [output for output in both(loaded("eagle tree"), params) if output.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(output.text), dict) for output in whole)


@pytest.mark.parametrize("method", ["draft_model", "eagle tree", "mixture"])
def test_with_every_other_parameter(method: str) -> None:
    base = SamplingParams(seed=5, max_tokens=120, structured=PERSON, logprobs=2)
    found = both(
        loaded(method),
        [
            replace(base, temperature=0.0),
            replace(base, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
            replace(base, top_k=3, top_p=0.9, min_p=0.01),
            replace(base, logit_bias={5: -100.0, 71: 50.0}, temperature=0.5),
            replace(base, bad_words=["red", "blue"]),
            replace(base, temperature=2.0, top_k=40),
            replace(base, stop=['"tags"']),
        ],
    )
    for output in found[:-1]:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), json.loads(PERSON.value))
        assert output.logprobs is not None
    assert "red" not in found[4].text
    assert found[-1].stop_reason == '"tags"'


def test_log_probabilities_are_of_the_raw_logits() -> None:
    """As without a grammar: what the model thought, whatever was allowed."""
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
    free = outputs(loaded(), [params])[0]
    bound = outputs(loaded(), [replace(params, structured=Structured("regex", "é+"))])[0]
    assert free.logprobs is not None
    assert bound.logprobs is not None
    top = {token: p for token, p in free.logprobs[0].items() if p.rank <= 3}
    assert {token: p for token, p in bound.logprobs[0].items() if p.rank <= 3} == top
    assert bound.logprobs[0][bound.token_ids[0]].rank > 3


@pytest.mark.parametrize("rule", ["rejection", "block", "lossy_typical"])
def test_the_other_rules_obey_too(rule: str) -> None:
    llm = LLM(speculation={"method": "draft_model", "draft_tokens": 4, "rule": rule})
    params = [SamplingParams(seed=i, max_tokens=120, structured=PERSON) for i in range(12)]
    found = outputs(llm, params)
    whole = [output for output in found if output.finish_reason == "stop"]
    assert len(whole) >= 10
    for output in whole:
        jsonschema.validate(json.loads(output.text), json.loads(PERSON.value))
    assert sum(output.speculation["accepted"] for output in found) > 20
    assert {output.speculation["fallback_reason"] for output in found} == {None}


def test_lookups_are_pruned_under_a_ratio_test() -> None:
    llm = LLM(speculation={"method": "suffix", "draft_tokens": 6, "rule": "rejection"})
    found = outputs(llm, [SamplingParams(seed=i, max_tokens=120, structured=PERSON) for i in range(6)])
    for output in found:
        jsonschema.validate(json.loads(output.text), json.loads(PERSON.value))


def test_preempted_in_the_middle() -> None:
    params = [SamplingParams(seed=i, max_tokens=90, structured=PERSON) for i in range(6)]
    page = 16 * loaded().engine.runner.pool.token_bytes
    llm = LLM(speculation=METHODS["draft_model"], kv_bytes=12 * page, page_size=16, max_model_len=128)
    found = outputs(llm, params)
    assert llm.engine.scheduler.preemptions > 0
    assert [o.token_ids for o in found] == [o.token_ids for o in outputs(loaded(), params, False)]


def test_streams() -> None:
    params = SamplingParams(seed=1, max_tokens=120, structured=PERSON)
    pieces = list(loaded().stream(PROMPT, params))
    assert "".join(piece.text for piece in pieces) == outputs(loaded(), [params], False)[0].text


# where the text ends


def test_min_tokens_keeps_a_grammar_going_and_then_waits_at_its_end() -> None:
    """An optional rest is written; where nothing but the end can come, the end is repeated up to min_tokens."""
    base = SamplingParams(temperature=0.0, max_tokens=60)
    longer = both(loaded(), [replace(base, min_tokens=12, structured=Structured("regex", "a(bc){0,24}"))])[0]
    assert longer.finish_reason == "stop"
    assert len(longer.token_ids) >= 12
    assert re.fullmatch("a(bc)+", longer.text)
    ended = both(loaded(), [replace(base, min_tokens=6, structured=Structured("choice", ["yes"]))])[0]
    assert (ended.text, ended.finish_reason, len(ended.token_ids)) == ("yes", "stop", 6)


def test_ignore_eos_repeats_the_end() -> None:
    params = SamplingParams(seed=2, max_tokens=12, ignore_eos=True, structured=Structured("choice", ["yes", "no"]))
    found = both(loaded(), [params])[0]
    assert found.text in ("yes", "no")
    assert (found.finish_reason, len(found.token_ids)) == ("length", 12)
    assert set(found.token_ids[4:]) == {0}


def test_a_stop_id_ends_a_complete_grammar() -> None:
    params = SamplingParams(
        seed=2, max_tokens=12, stop_token_ids=[9], structured=Structured("regex", "[a-c]{3}"), logit_bias={9: 100.0}
    )
    found = both(loaded(), [params])[0]
    assert (found.finish_reason, found.stop_reason, len(found.text)) == ("stop", 9, 3)


def test_dead_ends_are_told() -> None:
    digits = Structured("regex", "[0-9]{4}")
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    letters, numerals = list(tokenizer.encode_bare("abc")), [tokenizer.encode_bare(str(i))[0] for i in range(10)]
    dead, whole, free = both(
        loaded(),
        [
            SamplingParams(structured=digits, allowed_token_ids=letters, seed=1),
            SamplingParams(structured=digits, allowed_token_ids=numerals, seed=1),
            SamplingParams(seed=1, max_tokens=8),
        ],
    )
    assert (dead.finish_reason, dead.token_ids) == ("error", [])
    assert "no token can follow" in str(dead.stop_reason)
    assert (whole.finish_reason, len(whole.text)) == ("stop", 4)  # complete, though no end may be written
    assert len(free.token_ids) == 8


def test_refused_at_the_door() -> None:
    engine = loaded().engine
    for bad in (Structured("json_schema", {"type": "objekt"}), Structured("regex", "(")):
        with pytest.raises(InvalidParameter, match="response_format"):
            outputs(loaded(), [SamplingParams(), SamplingParams(structured=bad)])
        assert not engine.has_work


# the tests above can fail


def unguided(drafts: Drafts, _batch: Batch, _plan: Plan) -> Drafts:
    return drafts


def test_a_mask_missing_at_inner_nodes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Row.at.__func__  # type: ignore[attr-defined]

    def broken(cls, seq, path=()):  # type: ignore[no-untyped-def]
        row = real(cls, seq, path)
        return row._replace(allowed=None) if path else row

    monkeypatch.setattr(Row, "at", classmethod(broken))
    monkeypatch.setattr(engine_module, "guided", unguided)
    params = [SamplingParams(seed=i, max_tokens=60, structured=PERSON) for i in range(6)]
    with pytest.raises(AssertionError):
        both(loaded(), params)


def test_pruning_and_prescribing_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden nodes are never chosen and prescribed text always is: what a grammar does to drafts is speed alone."""
    monkeypatch.setattr(guide_module, "WAIT_S", 60.0)  # on a busy machine a late mask would cost a round
    params = [SamplingParams(seed=i, max_tokens=120, structured=PERSON) for i in range(6)]
    guided = both(loaded("suffix"), params)
    with monkeypatch.context() as patch:
        patch.setattr(Guide, "forced", lambda *_: [])
        pruned = outputs(loaded("suffix"), params)
    monkeypatch.setattr(engine_module, "guided", unguided)
    whole = outputs(loaded("suffix"), params)
    assert [o.token_ids for o in whole] == [o.token_ids for o in pruned] == [o.token_ids for o in guided]
    drafted, rounds = (
        [sum(o.speculation[key] for o in outputs) for outputs in (whole, pruned, guided)] for key in ("drafted", "rounds")
    )
    assert drafted[0] > drafted[1]
    assert rounds[0] == rounds[1] > rounds[2]
