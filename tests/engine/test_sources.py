"""Where each token came from, and the engine's own counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.outputs import Run, sources_of
from outrider.engine.tally import GAP_BOUNDS, Tally
from outrider.model import Decoder
from outrider.sampling import SamplingParams as Params
from tests.support import Oracle, make_engine, make_request, random_decoder, run, write_family


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"), seed=1)


def test_runs_are_spelled_out_in_order() -> None:
    assert sources_of([Run("eagle", 2, 3), Run("suffix", 0, 1), Run("suffix", 1, 1)]) == [
        ("eagle", 0), ("eagle", 1), ("target", None), ("target", None), ("suffix", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("branches", [0, 3])
def test_sources_agree_with_the_flags_and_the_tally_with_both(decoder: Decoder, branches: int) -> None:
    requests = [make_request([5 + i, 9, 3], Params(temperature=0.9, seed=i, max_tokens=30), f"r{i}") for i in range(3)]
    plain = [writer.output() for writer in run(make_engine(decoder), requests, "none")]
    answers = {request.id: [*request.prompt_ids, *output.token_ids] for request, output in zip(requests, plain, strict=True)}
    engine = make_engine(decoder, Oracle(answers, 6, branches), length=6)
    outputs = [writer.output() for writer in run(engine, requests, "oracle")]
    for output in outputs:
        sources = sources_of(output.runs)
        assert len(sources) == len(output.token_ids)
        assert [position is not None for _, position in sources] == output.from_draft
        assert {name for name, _ in sources} == {"oracle", "target"}
    tally, stats = engine.tally, [output.speculation for output in outputs]
    assert tally.emitted == 90
    assert tally.accepted == sum(one["accepted"] for one in stats) == sum(sum(output.from_draft) for output in outputs)
    assert tally.by_source == {"oracle": [tally.drafted, tally.accepted]}
    for kind in ("accepted", "drafted"):
        summed = [sum(column) for column in zip(*(pad(one[f"{kind}_by_position"], 6) for one in stats), strict=True)]
        assert pad(getattr(tally, f"{kind}_by_position")(), 6) == summed
    assert sum(tally.gaps) == 90 - 3


@pytest.mark.parametrize("branches", [0, 3])
def test_rejected_nodes_are_kept_where_a_request_wants_them(decoder: Decoder, branches: int) -> None:
    silent = [make_request([5 + i, 9, 3], Params(temperature=0.9, seed=i, max_tokens=30), f"r{i}") for i in range(2)]
    plain = [writer.output() for writer in run(make_engine(decoder), silent, "none")]
    answers = {request.id: [*request.prompt_ids, *output.token_ids] for request, output in zip(silent, plain, strict=True)}
    answers["r1"] = [token if i % 7 else token ^ 1 for i, token in enumerate(answers["r1"])]  # the oracle errs now and then
    requests = [silent[0], replace(silent[1], return_rejected=True)]
    quiet, loud = (
        writer.output() for writer in run(make_engine(decoder, Oracle(answers, 6, branches), length=6), requests, "oracle")
    )
    assert [quiet.token_ids, loud.token_ids] == [output.token_ids for output in plain]
    assert not any(one.rejected for one in quiet.runs)
    assert any(one.rejected for one in loud.runs)
    stats, drafted, accepted = loud.speculation, [0] * 6, [0] * 6
    assert sum(len(one.rejected) for one in loud.runs) == stats["drafted"] - stats["accepted"]
    for one in loud.runs:
        for i, node in enumerate(one.rejected):
            assert node.parent < i
            assert node.parent < 0 or one.rejected[node.parent].position == node.position - 1
        reach = max([one.guessed, *(node.position + 1 for node in one.rejected)])
        for position in range(reach):
            drafted[position] += 1
            accepted[position] += position < one.guessed
    assert drafted == pad(stats["drafted_by_position"], 6)
    assert accepted == pad(stats["accepted_by_position"], 6)


def pad(values: list[int], length: int) -> list[int]:
    return values + [0] * (length - len(values))


def test_gaps_fall_into_their_buckets() -> None:
    tally = Tally()
    tally.note_gap(GAP_BOUNDS[0], 2)
    tally.note_gap(GAP_BOUNDS[0] * 1.01, 1)
    tally.note_gap(1e6, 4)
    assert (tally.gaps[0], tally.gaps[1], tally.gaps[-1]) == (2, 1, 4)


def test_under_auto_the_arm_of_the_round_is_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    llm = LLM(speculation="auto")
    names = {arm.name for arm in llm.engine.policy.arms}
    prompt = "x = [1, 2, 3]\n" * 12
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))[0].outputs[0]
    guessed = {name for name, position in sources_of(output.runs) if position is not None}
    assert guessed, "something was guessed"
    assert guessed <= names
    assert set(llm.engine.tally.by_source) <= names
