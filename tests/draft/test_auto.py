"""Members of `auto` that nobody asks are detached, and attached again without harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.config import SpeculationConfig
from outrider.control import Load, RoundStats
from outrider.core import Drafts, Plan, Sequence
from outrider.draft.auto import AutoDrafter, arms_of, resolve_auto, with_large_trees
from outrider.draft.growth import TreeShape
from outrider.errors import InvalidParameter

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


class Script:
    """A policy that asks one arm in some rounds and nobody in the others."""

    def __init__(self, llm: LLM, arm: str, asked: range | set[int]) -> None:
        self.arms = llm.engine.policy.arms
        self._arm = [own.name for own in self.arms].index(arm)
        self._asked = asked
        self._drafter = llm.engine.drafter
        self.round = 0
        self.drafted: dict[int, int] = {}  # nodes by round
        self.taps: list[tuple[int, ...]] = []

    def arms_named(self, method: str) -> list[int]:
        return []

    def plan(self, load: Load) -> Plan:
        self.round += 1
        length = 4 if self.round in self._asked else 0
        return Plan(tuple(min(length, room) for room in load.room), arms=(self._arm,) * len(load.room))

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        self.drafted[self.round] = sum(drafts.counts)
        self.taps.append(self._drafter.needs.taps)
        return drafts

    def observe(self, stats: RoundStats) -> None:
        pass

    def forget(self, key: object) -> None:
        pass


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculation="auto", max_model_len=512)


@pytest.mark.grid(once=["arm"])
@pytest.mark.parametrize("arm", ["eagle", "dflash", "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_asked_after_a_long_silence(llm: LLM, arm: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=90, ignore_eos=True)
    plain = llm.generate([PROMPT, "import os\n"], params, speculation=False)
    script = Script(llm, arm, {*range(2, 6), *range(50, 60)})
    monkeypatch.setattr(llm.engine, "policy", script)
    outputs = llm.generate([PROMPT, "import os\n"], params)
    assert [own.outputs[0].token_ids for own in outputs] == [own.outputs[0].token_ids for own in plain]
    assert all(own.outputs[0].speculation["fallback_reason"] is None for own in outputs)
    assert sum(script.drafted[r] for r in range(3, 6)) > 0
    assert sum(script.drafted.get(r, 0) for r in range(51, 60)) > 0, "it woke"
    assert script.taps[40] == (), "nobody reads the target's rows meanwhile"
    if arm != "draft_model":
        assert script.taps[55]
    drafter = llm.engine.drafter.drafter
    assert isinstance(drafter, AutoDrafter)
    assert not any(drafter._follows), "no sequence is held"


def test_sequences_of_one_round_may_have_different_drafters(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(Script):
        def plan(self, load: Load) -> Plan:
            plan = super().plan(load)
            names = [arm.name for arm in self.arms]
            return plan._replace(
                arms=tuple(names.index(("draft_model", "suffix", "eagle")[b % 3]) for b in range(len(load.room)))
            )

        def observe(self, stats: RoundStats) -> None:
            for b, path in enumerate(stats.paths):
                accepted[b] = accepted.get(b, 0) + len(path)

    accepted: dict[int, int] = {}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [PROMPT, "x = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", PROMPT + "        self"]
    plain = llm.generate(prompts, params, speculation=False)
    monkeypatch.setattr(llm.engine, "policy", Both(llm, "suffix", range(2, 100)))
    outputs = llm.generate(prompts, params)
    assert [own.outputs[0].token_ids for own in outputs] == [own.outputs[0].token_ids for own in plain]
    assert all(own.outputs[0].speculation["fallback_reason"] is None for own in outputs)
    assert all(accepted[b] for b in range(3))


def test_detached_members_are_not_begun(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new sequence costs a detached member nothing."""
    drafter = llm.engine.drafter.drafter
    assert isinstance(drafter, AutoDrafter)
    monkeypatch.setattr(llm.engine, "policy", Script(llm, "suffix", set()))
    llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    begun: list[Sequence] = []
    readers = [member for member in drafter._members if member.needs.taps]
    assert readers
    for reader in readers:
        monkeypatch.setattr(reader, "begin", begun.append)
    llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=5))
    assert not begun


def test_a_sequence_that_begins_before_anybody_is_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members attached since the sequence before follow the next one from its prompt on, with or without a draft."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for asked in ({2, 3, 4, 5}, set(), {8, 9}):
        script = Script(llm, "eagle", asked)
        monkeypatch.setattr(llm.engine, "policy", script)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.speculation["fallback_reason"] is None
        assert script.taps[0] or 2 in asked, "attached since the first"
        assert (sum(script.drafted.values()) > 0) == bool(asked)


def test_drafts_that_need_many_rows_are_offered_where_rows_are_cheap_or_nothing_else_is(tmp_path: Path) -> None:
    for folder, on_cpu, on_gpu in (
        (None, ["suffix"], ["suffix", "recycle"]),
        ("medusa", ["suffix", "medusa"], ["suffix", "medusa"]),
        ("dflash", ["suffix", "dflash"], ["suffix", "dflash"]),
    ):
        if folder is not None:
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "config.json").write_text("{}")
        for there, methods in ((False, on_cpu), (True, on_gpu)):
            members = resolve_auto(SpeculationConfig("auto"), tmp_path, there).options["members"]
            assert [member.method for member in members] == methods


def test_on_a_gpu_one_head_is_a_member(tmp_path: Path) -> None:
    for name in ("draft", "eagle", "medusa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    cpu, gpu = (resolve_auto(SpeculationConfig("auto"), tmp_path, on_gpu).options["members"] for on_gpu in (False, True))
    assert [member.method for member in cpu] == ["suffix", "draft_model", "eagle"]
    assert [member.method for member in gpu] == ["suffix", "draft_model", "eagle"]
    TreeShape(**gpu[2].options).require_device()
    with pytest.raises(InvalidParameter, match="choose a smaller beam"):
        TreeShape(beam=64, branch=8).require_device()


def test_a_draft_model_grows_large_trees_where_rows_cost_nothing() -> None:
    members = (SpeculationConfig("suffix", draft_tokens=32), SpeculationConfig("draft_model", draft_tokens=12))
    chains = arms_of(members, on_gpu=True)
    assert [(arm.max_nodes, arm.can_overlap, arm.unit) for arm in chains] == [(32, False, 1), (12, True, 1)]
    config = with_large_trees(SpeculationConfig("auto", draft_tokens=256, options={"members": members}))
    trees = arms_of(config.nested(), on_gpu=True)
    assert [(arm.max_nodes, arm.can_overlap, arm.unit) for arm in trees] == [(32, False, 1), (1024, False, 32)]
    fewer = with_large_trees(SpeculationConfig("auto", draft_tokens=100, options={"members": members}))
    assert arms_of(fewer.nested(), on_gpu=True)[1].max_nodes == 100, "as far as the user allows"


def test_only_draft_models_with_trees_may_draft_hundreds() -> None:
    assert SpeculationConfig.parse("draft_model:1024:branch=8").draft_tokens == 1024
    for wrong in ("draft_model:1025:branch=8", "draft_model:257", "eagle:512:branch=8", "ngram:300"):
        with pytest.raises(InvalidParameter, match="draft_tokens"):
            SpeculationConfig.parse(wrong)
