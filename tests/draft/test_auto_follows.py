"""Members of `auto` that sleep and wake: what they read is asked for from the first round they follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.control import FixedLength, Load
from outrider.core import Plan


class _OneProbe(FixedLength):
    """Nobody drafts, except that one arm is asked once."""

    def __init__(self, arms, arm: int, at: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(0)
        self.arms, self._arm, self._at, self._round = arms, arm, at, 0

    def plan(self, load: Load) -> Plan:
        self._round += 1
        lengths = [min(2, room) if self._round == self._at and b == 1 else 0 for b, room in enumerate(load.room)]
        return Plan(tuple(lengths), arms=tuple(self._arm for _ in lengths))


def test_newcomers_after_a_probe_are_followed_with_hidden_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probed sequence ends, others ran on without its drafter: the next prompt must be read with its taps again."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    llm = LLM(speculation="auto:members=suffix+eagle", max_num_seqs=2, prefix_cache=False)
    names = [arm.name for arm in llm.engine.policy.arms]
    llm.engine.policy = _OneProbe(llm.engine.policy.arms, names.index("eagle"), at=46)
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in (60, 52)]
    for _ in range(2):
        for result in llm.generate(["import os\n", "def f(x):\n"], params):
            assert result.outputs[0].speculation["fallback_reason"] is None
