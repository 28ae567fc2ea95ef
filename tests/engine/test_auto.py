"""The controller chooses; the tokens do not change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.config import RequestSpeculation, speculation_of_flags
from outrider.control import Controller, Costs, FixedLength
from outrider.engine.costs_file import ACCEPTANCE, known_acceptance
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model

PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
]


class Flat(Costs):
    """A machine on which drafts cost next to nothing: what the controller chooses does not hang on the clock."""

    def forward(self, rows: float, context: int, drafter: str = "") -> float:
        return 1.0

    def proposals(self, drafter: str, batch: int, lengths: Sequence[float], context: int = 0) -> list[float]:
        return [0.01 * length for length in lengths]


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        llm = LLM(speculation="auto")
    assert isinstance(llm.engine.policy, Controller)
    llm.engine.policy = Controller(llm.engine.policy.arms, Flat())
    return llm


def ids(llm: LLM, params: SamplingParams, **settings: object) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, **settings)]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_emits_what_plain_decoding_does(auto: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, repetition_penalty=1.05, logprobs=1)
    outputs = [result.outputs[0] for result in auto.generate(PROMPTS, params)]
    plain = [auto.generate(prompt, params, speculation=False)[0].outputs[0] for prompt in PROMPTS]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert [output.logprobs for output in outputs] == [output.logprobs for output in plain]
    assert sum(output.speculation["accepted"] for output in outputs) > 0
    assert all(output.speculation["fallback_reason"] is None for output in outputs)
    assert auto.engine.pages.used == 0


def test_where_prompts_run_by_code_of_their_own_they_say_nothing_of_rounds(auto: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(auto.engine.runner, "separate_prefill", True)
    monkeypatch.setattr(auto.engine.policy, "observe", lambda stats: seen.append(stats.rows))
    ids(auto, SamplingParams(temperature=0.0, max_tokens=8))
    assert seen[0] == 0
    assert min(seen[1:]) > 0


def test_everything_the_model_has_is_an_arm(auto: LLM) -> None:
    assert isinstance(auto.engine.policy, Controller)
    names = {arm.name for arm in auto.engine.policy.arms}
    assert names == {"suffix", "draft_model", "eagle", "dflash"}


def test_a_request_may_ask_for_a_method_a_limit_or_nothing(auto: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    wanted = ids(auto, params, speculation=False)
    for asked in (True, {"method": "suffix"}, {"method": "eagle", "max_tokens": 3}, {"enabled": False}, {"max_tokens": 1}):
        assert ids(auto, params, speculation=asked) == wanted, asked
    named = auto.generate(PROMPTS[1], params, speculation={"method": "draft_model", "max_tokens": 2})[0].outputs[0]
    assert named.speculation["method"] == "draft_model"
    assert len(named.speculation["drafted_by_position"]) <= 2
    none = auto.generate(PROMPTS[1], params, speculation={"method": "none"})[0].outputs[0]
    assert none.speculation["drafted"] == 0


@pytest.mark.parametrize(
    "asked",
    [{"method": "telepathy"}, {"method": 3}, {"max_tokens": -1}, {"max_tokens": True}, {"enabled": 1}, {"speed": 2}, "auto"],
)
def test_requests_that_ask_for_the_impossible(auto: LLM, asked: object) -> None:
    with pytest.raises(InvalidParameter, match="speculation"):
        auto.generate(PROMPTS[0], SamplingParams(max_tokens=2), speculation=asked)  # type: ignore[arg-type]


def test_what_was_measured_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    first = LLM(speculation="auto:members=suffix")
    first.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=20))
    assert isinstance(first.engine.policy, Controller)
    first.save_costs()
    assert len(list(tmp_path.rglob("*.json"))) == 1
    second = LLM(speculation="auto:members=suffix")
    assert isinstance(second.engine.policy, Controller)
    assert second.engine.policy.costs.as_dict() == first.engine.policy.costs.as_dict()


def test_the_first_start_knows_what_the_model_s_drafters_are_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its folder says counts until rounds on this machine say something else. What drafts cost here must be found out."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fresh = LLM(speculation="auto")
    first = fresh.engine.policy
    assert isinstance(first, Controller)
    for bucket in ("0", "1", "2", "3"):
        assert first.accepted[bucket].keys() == {arm.name for arm in first.arms}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    assert fresh.generate(PROMPTS[0], params)[0].outputs[0].speculation["drafted"] > 0
    fresh.save_costs()
    (path,) = tmp_path.rglob("*.json")
    table = json.loads(path.read_text())
    table["accepted"]["0"]["suffix"] = _spoilt(first.accepted["0"]["suffix"])
    path.write_text(json.dumps(table))
    second = LLM(speculation="auto").engine.policy
    assert isinstance(second, Controller)
    assert second.accepted["0"]["suffix"]["gains"][0] == 0.0, "what was seen here comes first"


def _spoilt(record: dict[str, object]) -> dict[str, object]:
    return record | {"gains": [0.0] * len(record["gains"])}  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_a_folder_without_a_sound_record_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / ACCEPTANCE).write_text(text)
    assert known_acceptance(tmp_path) == {}


def test_auto_verifies_by_match_alone() -> None:
    with pytest.raises(InvalidParameter, match="match"):
        LLM(bundled_model(), speculation={"method": "auto", "rule": "rejection"})


def test_a_request_s_settings_are_read_once() -> None:
    assert RequestSpeculation.parse(None) == RequestSpeculation.parse(True) == RequestSpeculation()
    assert RequestSpeculation.parse({"num_speculative_tokens": 4}).draft_tokens == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"speculation": "draft_model:4"},
        {"speculation": {"method": "eagle", "draft_tokens": 4}},
        {"speculative_config": {"method": "medusa", "num_speculative_tokens": 4}},
        {"speculation": "suffix", "num_speculative_tokens": 4},
        {"speculative_model": str(bundled_model() / "draft"), "num_speculative_tokens": 4},
    ],
)
def test_a_named_method_drafts_up_to_its_tokens_or_none_and_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    llm = LLM(max_model_len=512, **settings)
    policy = llm.engine.policy
    assert isinstance(policy, Controller)
    (arm,) = policy.arms
    assert policy.costs.knows_forward
    assert policy.costs.knows_proposal(arm.name, well=True)
    params = SamplingParams(temperature=0, max_tokens=30)
    output = llm.generate(PROMPTS[1], params)[0].outputs[0]
    assert output.token_ids == llm.generate(PROMPTS[1], params, speculation=False)[0].outputs[0].token_ids
    assert len(output.speculation["drafted_by_position"]) <= 4


def test_a_pinned_method_has_no_controller() -> None:
    assert isinstance(LLM(speculation="suffix:4:adaptive=false").engine.policy, FixedLength)
    assert isinstance(LLM(speculation={"method": "suffix", "rule": "rejection"}).engine.policy, FixedLength)


def test_auto_may_be_given_a_draft_model_or_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--method auto --draft-model DIR`: what DIR holds takes the place of what lies beside the target."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    for folder, method in (("draft", "draft_model"), ("eagle", "eagle")):
        speculation = speculation_of_flags("auto", str(bundled_model() / folder), None)
        llm = LLM(speculation=speculation, max_model_len=512, calibration_s=0)
        assert isinstance(llm.engine.policy, Controller)
        assert {"suffix", method} <= {arm.name for arm in llm.engine.policy.arms}
        member = next(one for one in llm.speculation.nested() if one.method == method)
        assert member.model == str(bundled_model() / folder)
        params = SamplingParams(temperature=0, max_tokens=20)
        named = llm.generate(PROMPTS[1], params, speculation={"method": method})[0].outputs[0]
        assert named.token_ids == llm.generate(PROMPTS[1], params, speculation=False)[0].outputs[0].token_ids
