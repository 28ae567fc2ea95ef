"""The bench that compares `auto` with plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import LLM
from outrider.bench.never_slower import Case, Ratio, _in_turns, as_rows, cases, never_slower
from outrider.sampling import SamplingParams

ROW = Ratio("code", 0.0, 1, ratio=0.9, low=0.85, high=0.97, plain_tok_s=100.0, tokens_per_round=1.0)


def test_it_covers_text_that_can_and_cannot_be_guessed() -> None:
    texts = {(c.workload, c.temperature) for c in cases([1, 8], quick=False)}
    assert texts == {("code", 0.0), ("random", 1.0), ("code", 0.7), ("code", 1.2), ("code", 1.5)}
    quick = [(c.workload, c.batch) for c in cases([1, 8], quick=True) if c.method == "auto" and not c.tokens]
    assert quick == [("code", 1), ("code", 8), ("random", 1), ("random", 8)]


def test_it_covers_drafters_by_name_and_short_answers() -> None:
    whole = cases([1], quick=False)
    for method in ("draft_model", "eagle", "useless"):
        assert {c.batch for c in whole if c.method == method and not c.tokens} == {1, 4, 8, 16}
    assert {(c.prompt, c.tokens) for c in whole if c.tokens} == {(p, t) for p in (64, 2000) for t in (4, 16, 32)}


def test_slower_beyond_doubt_is_an_interval_below_the_floor() -> None:
    assert ROW.lost
    assert not replace(ROW, high=0.98).lost


def test_paired_runs_of_the_same_requests(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    (row,) = never_slower(LLM(speculation="auto:members=suffix", max_num_seqs=2), [Case("random", 1.0, 2)], tokens=6, pairs=3)
    assert 0 < row.low <= row.ratio <= row.high
    assert row.tokens_per_round >= 1.0
    assert {"workload", "temperature", "batch", "ratio", "low", "high"} <= set(as_rows([row])[0])


def test_whoever_is_behind_goes_on_and_all_share_weights_and_pages() -> None:
    plain = LLM(speculation="none", max_num_seqs=4, prefix_cache=False)
    fast = plain.beside("suffix:8:adaptive=false")
    assert fast.engine.runner is plain.engine.runner
    prompts, params = (
        ["x = [1, 2, 3]\nx = [1, 2, 3]\nx = [", "def f("],
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    )
    turns = _in_turns((plain, fast), prompts, [params] * 2)
    assert [each.emitted for each in turns] == [80, 80]
    assert turns[1].rounds < turns[0].rounds == 80
    assert plain.engine.pages is fast.engine.pages
    assert plain.engine.pages.used == 0
    outputs = [[each.outputs[0].token_ids for each in llm.generate(prompts, params)] for llm in (plain, fast)]
    assert outputs[0] == outputs[1]
