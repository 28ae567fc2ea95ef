"""`LLM.benchmark`: its figures follow from the outputs, and wrong arguments are refused."""

from __future__ import annotations

import pytest

from outrider import LLM
from outrider.engine import llm as llm_module
from outrider.errors import InvalidParameter

PROMPTS = ["def add(a, b):\n    ", "class Stack:\n    def __init__(self):\n        "]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculation="draft_model:4:adaptive=false")


def test_speed_acceptance_and_equality(llm: LLM) -> None:
    result = llm.benchmark(PROMPTS, max_tokens=24, temperature=0.8, repeats=2)
    assert result.tokens_equal is True
    assert result.speedup == pytest.approx(result.baseline_seconds / result.seconds)
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)
    assert 0.0 < result.acceptance_rate < 1.0
    assert 1.0 < result.mean_acceptance_length <= 5.0
    assert set(result.as_dict()) >= {"speedup", "tokens_per_second", "acceptance_rate", "tokens_equal"}


def test_a_known_baseline_is_not_run_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, real = [], llm_module.LLM.generate

    def noted(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
        ways.append(keywords["speculation"])
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(llm_module.LLM, "generate", noted)
    result = llm.benchmark(PROMPTS[0], 7.0, max_tokens=8, repeats=1)
    assert ways == [{"enabled": True, "remember": False}] * 2
    assert result.tokens_equal is None
    assert result.speedup == pytest.approx(7.0 / result.seconds)


def test_other_tokens_are_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm_module.LLM.generate

    def spoilt(self, *arguments, **keywords):  # type: ignore[no-untyped-def]
        results = real(self, *arguments, **keywords)
        results[0].outputs[0].token_ids[-1] += keywords["speculation"]["enabled"]
        return results

    monkeypatch.setattr(llm_module.LLM, "generate", spoilt)
    assert llm.benchmark(PROMPTS, max_tokens=8, repeats=1).tokens_equal is False


def test_the_acceptance_rate_of_an_output_is_accepted_over_drafted(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], max_tokens=24)[0].outputs
    stats = output.speculation
    assert stats["acceptance_rate"] == pytest.approx(stats["accepted"] / stats["drafted"], abs=1e-4)
    (plain,) = llm.generate(PROMPTS[0], max_tokens=4, speculation=False)[0].outputs
    assert plain.speculation["acceptance_rate"] is None


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    for arguments, message in (
        ({"prompts": []}, "at least one"),
        ({"prompts": "x", "baseline_time": 0.0}, "baseline_time"),
        ({"prompts": "x", "baseline_time": -1.0}, "baseline_time"),
        ({"prompts": "x", "repeats": 0}, "repeats"),
        ({"prompts": "x", "colour": 1}, "colour"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            llm.benchmark(**arguments)  # type: ignore[arg-type]
