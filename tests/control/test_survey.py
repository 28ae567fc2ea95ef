"""Costs measured before service."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control import Adaptive


def test_a_survey_fills_the_table_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    llm = LLM(speculation="auto", max_model_len=512)
    policy = llm.engine.policy
    assert isinstance(policy, Adaptive)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20)
    before = llm.generate("def f(x):\n", params, speculation=False)[0].outputs[0].token_ids
    llm.measure_costs()
    table = policy.costs.as_dict()
    rows = set(map(int, table["forward"]))
    assert {1, 2, 8, 16, 32, 64} <= rows
    for arm in policy.arms:
        assert {"1", "8"} <= set(table["propose"][arm.name]), arm.name
        assert all(seconds > 0 for curve in table["propose"][arm.name].values() for seconds in curve.values())
    assert llm.engine.policy is policy
    assert llm.engine.pages.used == 0
    assert not llm.engine.has_work
    assert list(tmp_path.rglob("*.json")), "kept for the next start"
    again = LLM(speculation="auto", max_model_len=512).engine.policy
    assert isinstance(again, Adaptive)
    assert set(map(int, again.costs.as_dict()["forward"])) == rows
    assert llm.generate("def f(x):\n", params)[0].outputs[0].token_ids == before


def test_a_context_too_short_for_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    llm = LLM(speculation="auto", max_model_len=64)
    llm.measure_costs()
    assert llm.engine.pages.used == 0
    assert not llm.engine.has_work
