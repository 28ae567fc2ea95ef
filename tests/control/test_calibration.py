"""Costs measured before service."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control import Calibration, Controller, Costs, Load, RoundStats
from outrider.core import Arm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def table_of(llm: LLM) -> dict[str, dict[str, object]]:
    assert isinstance(llm.engine.policy, Controller)
    return llm.engine.policy.costs.as_dict()


def test_calibration_fills_the_table_and_leaves_no_trace(cache: Path) -> None:
    llm = LLM(speculation="auto", max_model_len=512, calibration_s=0)
    policy = llm.engine.policy
    assert isinstance(policy, Controller)
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
    assert list(cache.rglob("*.json")), "kept for the next start"
    again = LLM(speculation="auto", max_model_len=512).engine.policy
    assert isinstance(again, Controller)
    assert set(map(int, again.costs.as_dict()["forward"])) == rows
    assert llm.generate("def f(x):\n", params)[0].outputs[0].token_ids == before


def test_calibration_is_skipped_where_the_context_is_too_short(cache: Path) -> None:
    llm = LLM(speculation="auto", max_model_len=64)
    llm.measure_costs()
    assert llm.engine.pages.used == 0
    assert not llm.engine.has_work


def test_the_first_start_is_calibrated_and_later_ones_are_not(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outrider.progress")
    first = table_of(LLM(speculation="auto", max_model_len=512))
    assert first["forward"]
    assert set(first["propose"]) == {"suffix", "draft_model", "eagle", "dflash"}
    assert len(caplog.messages) == 1
    assert table_of(LLM(speculation="auto", max_model_len=512)) == first
    assert len(caplog.messages) == 1


def test_a_drafter_that_was_never_timed_here_is_calibrated_too(cache: Path) -> None:
    LLM(speculation="auto:members=suffix", max_model_len=512)
    assert "eagle" in table_of(LLM(speculation="auto", max_model_len=512))["propose"]


def test_what_service_taught_is_saved_when_the_object_goes_away(cache: Path) -> None:
    llm = LLM(speculation="auto:members=suffix", calibration_s=0)
    llm.generate("for i in range(10):\n    print(i)\n" * 4, SamplingParams(temperature=0, max_tokens=200))
    assert not list(cache.rglob("*.json"))
    del llm
    gc.collect()
    (kept,) = cache.rglob("*.json")
    assert json.loads(kept.read_text())["forward"]


def test_the_command_line_saves_what_it_learnt(cache: Path) -> None:
    code = "import sys; from outrider.cli import main; sys.argv[1:] = ['generate', 'def f(x):', '--max-tokens', '40']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    (kept,) = cache.rglob("*.json")
    assert json.loads(kept.read_text())["accepted"], "written at the end, not by the calibration alone"
    assert "first start" in done.stderr


def test_calibration_stops_at_its_deadline_and_enters_what_it_has() -> None:
    now, costs = 0.0, Costs()
    arms = [Arm("eagle", 8), Arm("suffix", 8)]
    calibration = Calibration(arms, costs, deadline=30.0, clock=lambda: now)
    rounds = 0
    while not calibration.done:
        load = Load(room=[100], keys=["seq"], rows=1, context=64, emitting=1)
        plan = calibration.plan(load)
        calibration.observe(RoundStats([0], [()], 1 + plan.lengths[0], propose_s=0.5, forward_s=1.0))
        now, rounds = now + 1.0, rounds + 1
    assert 30 <= rounds <= 31
    assert costs.knows_forward
    assert costs.as_dict()["propose"].keys() == {"eagle", "suffix"}, "proposals are timed before most row counts"


@pytest.mark.parametrize("max_queue", [0, 2])
def test_calibration_fits_a_short_queue(cache: Path, max_queue: int) -> None:
    llm = LLM(speculation="auto:members=suffix", max_model_len=512, max_queue=max_queue, calibration_s=60.0)
    assert set(table_of(llm)["propose"].get("suffix", {})) == ({"1", "2"} if max_queue else set())
