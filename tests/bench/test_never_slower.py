"""The bench that compares `auto` with plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import LLM
from outrider.bench.never_slower import Case, Ratio, as_rows, cases, never_slower

ROW = Ratio("code", 0.0, 1, ratio=0.9, low=0.85, high=0.97, plain_tok_s=100.0, tokens_per_round=1.0)


def test_it_covers_text_that_can_and_cannot_be_guessed() -> None:
    assert {(c.workload, c.temperature) for c in cases([1, 8], quick=False)} == {("code", 0.0), ("random", 1.0), ("code", 1.5)}
    assert [(c.workload, c.batch) for c in cases([1, 8], quick=True)] == [("code", 1), ("code", 8), ("random", 1), ("random", 8)]


def test_slower_beyond_doubt_is_an_interval_below_the_floor() -> None:
    assert ROW.lost
    assert not replace(ROW, high=0.98).lost


def test_paired_runs_of_the_same_requests(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    (row,) = never_slower(LLM(speculation="auto:members=suffix", max_num_seqs=2), [Case("random", 1.0, 2)], tokens=6, pairs=3)
    assert 0 < row.low <= row.ratio <= row.high
    assert row.tokens_per_round >= 1.0
    assert {"workload", "temperature", "batch", "ratio", "low", "high"} <= set(as_rows([row])[0])
