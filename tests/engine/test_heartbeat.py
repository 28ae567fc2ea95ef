"""The throughput log under load: its content, and when it is silent."""

from __future__ import annotations

import logging

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.tally import Heartbeat


def test_throughput_is_logged_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    llm, now = LLM(speculation="suffix:8:adaptive=false", max_model_len=256), [0.0]
    heart = Heartbeat(llm.engine, lambda: now[0])
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with caplog.at_level(logging.INFO, "outrider"):
        output = llm.generate("a = [1, 2, 3]\nb = [1, 2, 3]\nc = [1, 2, 3]\n", params)[0].outputs[0]
        now[0] = 9.9
        heart.beat()
        assert not caplog.records
        now[0] = 10.0
        heart.beat()
        first, second = (record.getMessage() for record in caplog.records)
        assert "Avg generation throughput: 4.0 tokens/s" in first
        assert "Running: 0 reqs, Waiting: 0 reqs" in first
        accepted = output.speculation["accepted"]
        assert accepted > 0
        assert f"Accepted: {accepted} tokens, Drafted: {output.speculation['drafted']} tokens" in second
        caplog.clear()
        now[0] = 20.0
        heart.beat()
        assert "Avg generation throughput: 0.0 tokens/s" in caplog.records[0].getMessage()
        assert len(caplog.records) == 1, "nothing was drafted"


def test_a_warning_says_that_hardly_anything_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    llm, now = LLM(speculation="none", max_model_len=256), [0.0]
    heart, tally = Heartbeat(llm.engine, lambda: now[0]), llm.engine.tally

    def beats(count: int, accepted: int) -> int:
        """The number of warnings in so many log lines, each after 1,000 drafted tokens."""
        caplog.clear()
        for _ in range(count):
            now[0] += 10.0
            tally.rounds, tally.drafts = tally.rounds + 250, tally.drafts + 250
            tally.drafted, tally.accepted = tally.drafted + 1000, tally.accepted + accepted
            heart.beat()
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    with caplog.at_level(logging.WARNING, "outrider"):
        assert beats(5, 99) == 0
        assert beats(1, 99) == 1
        assert "Fewer than 10% of the drafted tokens have been accepted for 60 s" in caplog.records[0].getMessage()
        assert beats(20, 99) == 0, "a warning is not repeated"
        assert beats(6, 100) == 0
        assert beats(6, 0) == 1


def test_an_output_states_why_nothing_was_drafted() -> None:
    llm = LLM(speculation="suffix:8:adaptive=false", max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    drafted = llm.generate("x = 1\nx = 1\nx = 1\n", params)[0].outputs[0].speculation
    off = llm.generate("x = 1\nx = 1\nx = 1\n", params, speculation=False)[0].outputs[0].speculation
    assert drafted["off_reason"] is None
    assert off["off_reason"] == "no drafter was asked for"
    undrafted = llm.generate([5, 900, 77], SamplingParams(temperature=0.0, max_tokens=1))[0].outputs[0].speculation
    assert undrafted["off_reason"] == "nothing was worth drafting"
