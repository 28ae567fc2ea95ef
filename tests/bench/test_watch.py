"""Rounds watched from outside: the phases add up, the forwards run again alone change nothing, and nothing stays wrapped."""

from __future__ import annotations

import time

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.watch import decode_rounds, watching
from outrider.heads.runners import EagleRunner
from outrider.model import Runner

PROMPTS = ["import os\n\n\ndef names(path):\n", "class Stack:\n"]


@pytest.mark.parametrize(
    "method", ["none", "eagle:12:beam=2:branch=3:depth=5", "draft_model:4", "early_exit:3:exit_layer=9", "medusa:8"]
)
def test_forwards_run_again_alone_leave_the_tokens_alone(method: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    llm = LLM(speculation=method, prefix_cache=False)
    expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, speculation=False)]
    begun = time.perf_counter()
    with watching(llm, alone=True) as watch:
        found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
    elapsed = time.perf_counter() - begun
    assert found == expected
    assert sum(own.wall + own.alone for own in watch.rounds) <= elapsed  # a round's time does not hold the second run
    rounds = decode_rounds(watch.rounds)
    assert 0 < len(rounds) < len(watch.rounds)
    assert all(own.alone > 0 and own.wall > own.verify > 0 and own.host > 0 and own.choose > 0 for own in rounds)
    assert all(own.rows == own.nodes + (2 if own.rows - own.nodes == 2 else 1) for own in rounds)
    if method == "none":
        assert not any(own.nodes for own in rounds)
    else:
        assert any(own.nodes and own.propose > 0 for own in rounds)
    assert len(watch.gaps) >= len(rounds)


def test_forwards_of_drafter_and_target_are_both_counted() -> None:
    llm = LLM(speculation="eagle:4")
    seen: list[str] = []
    real = {EagleRunner: EagleRunner.forward, Runner: Runner.run}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((EagleRunner, "forward"), (Runner, "run")):
            patch.setattr(owner, name, lambda *a, _owner=owner, **k: seen.append(_owner.__name__) or real[_owner](*a, **k))
        with watching(llm, alone=True):
            llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=6))
    assert seen.count("Runner") % 2 == seen.count("EagleRunner") % 2 == 0  # each once in the round, once alone
    assert "EagleRunner" in seen


def test_nothing_stays_wrapped() -> None:
    llm = LLM(speculation="ngram")
    before = (llm.engine.round, llm.engine.runner.score, Runner.run)
    with watching(llm, alone=True) as watch:
        assert Runner.run is not before[2]
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))
    count = len(watch.rounds)
    assert (llm.engine.round, llm.engine.runner.score, Runner.run) == before
    llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))
    assert len(watch.rounds) == count > 0
