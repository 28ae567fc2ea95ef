"""`outrider plan --fleet`: loads, costs from files, measuring a replica, and mistakes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.bench.plan.fleet.load import FleetRequest, LoadShape, read_load
from outrider.bench.plan.fleet.measure import RoundSample, RoundTimes, costs_from, record_texts, replica_of
from outrider.bench.plan.fleet.replica_costs import read_replica, write_replica
from outrider.bench.plan.fleet.simulate import simulate
from outrider.cli import app
from outrider.control import Controller, Costs
from outrider.core import Arm
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams
from tests.support.fleet import guesser, paper


def invoke(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "--fleet", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def mistake(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--fleet", *arguments])
    assert isinstance(result.exception, InvalidParameter), result.output
    return str(result.exception)


def test_the_command_simulates_a_fleet_of_a_size() -> None:
    result = invoke("--arrival", "4", "--seconds", "5", "--tokens", "16", "--replicas", "2", "--replica-cost", "0.5")
    auto, none = result["fleets"]
    assert (auto["speculation"], none["speculation"]) == ("auto", "none")
    assert auto["requests"] == none["requests"] > 5
    assert auto["drafting"] > 0 == none["drafting"]
    assert auto["rounds_per_s"] > 0
    assert auto["cost_per_million"] > 0
    assert result["command"]


def test_the_command_finds_a_size_and_shows_tables() -> None:
    result = CliRunner().invoke(app, ["plan", "--fleet", "--arrival", "30", "--seconds", "4", "--tokens", "16", "--batch", "8"])
    assert result.exit_code == 0, result.output
    assert "what speculation is worth by load" in result.stdout
    assert "rounds/s" in result.stdout


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    assert "must be a positive number" in mistake("--arrival", "-1")
    assert "at most 5,000,000 are simulated" in mistake("--arrival", "1e9")
    assert "outrider plan --fleet --model other --save-costs" in mistake("--model", "other")
    assert "--save-costs FILE" in mistake("--costs", str(tmp_path / "none.json"))
    assert "known: auto" in mistake("--methods", "psychic", "--replicas", "1")
    assert "at most 10,000" in mistake("--replicas", "20000")
    assert "one request alone takes" in mistake("--ttft", "0.01")
    assert "--ttft" in mistake("--ttft", "0")
    (tmp_path / "costs.json").write_text('{"forward": {"1": 0.1}, "context": {}, "rest": {}, "propose": {}}')
    assert "how often drafts were accepted" in mistake("--costs", str(tmp_path / "costs.json"))
    (tmp_path / "costs.json").write_text("[]")
    assert "holds no costs of a replica" in mistake("--costs", str(tmp_path / "costs.json"))


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", "{}", '{"timestamp": 0, "input_length": 0, "output_length": 5}', '{"timestamp": 0, "input_length": 5}',
     '{"timestamp": "x", "input_length": 5, "output_length": 5}', '{"timestamp": -1, "input_length": 5, "output_length": 5}',
     '{"timestamp": NaN, "input_length": 5, "output_length": 5}', '{"timestamp": 0, "input_length": 1e12, "output_length": 5}'],
)  # fmt: skip
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 5, "input_length": 3, "output_length": 2}\n' + line + "\n")
    assert f"{path.name}:2 is no request" in mistake("--trace", str(path)).replace("\n", "")


def test_traces_keep_times_prefixes_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 700, "output_length": 4, "hash_ids": [1, 3], "tenant": "a", "conversation": "c"},
        {"timestamp": 3000, "input_length": 800, "output_length": 4, "conversation": "c", "temperature": 0.8},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second, third = read_load(path)
    assert [request.at for request in (first, second, third)] == [0.0, 1.0, 2.0]
    assert [len(request.prompt) for request in (first, second, third)] == [700, 600, 800]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    assert third.prompt[:704] == first.prompt + (1,) * 4
    assert (first.tenant, third.temperature) == ("a", 0.8)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "holds no requests" in mistake("--trace", str(empty))
    assert invoke("--trace", str(path), "--replicas", "1", "--methods", "none")["fleets"][0]["requests"] == 3


def test_made_up_loads_have_their_rate_lengths_and_bursts() -> None:
    def gaps(**shape: float) -> list[float]:
        times = [request.at for request in LoadShape(50.0, 60.0, **shape).requests()]  # type: ignore[arg-type]
        return [b - a for a, b in pairwise(times)]

    def variation(values: list[float]) -> float:
        return fmean((value / fmean(values) - 1) ** 2 for value in values)

    assert len(gaps()) == pytest.approx(3000, rel=0.06)
    assert variation(gaps()) == pytest.approx(1.0, rel=0.15)
    assert variation(gaps(burstiness=0.25)) == pytest.approx(4.0, rel=0.25)
    requests = list(LoadShape(50.0, 100.0, prompt=200, output=30).requests())
    assert fmean(len(request.prompt) for request in requests) == pytest.approx(200, rel=0.05)
    assert fmean(request.output for request in requests) == pytest.approx(30, rel=0.05)
    talks = list(LoadShape(50.0, 60.0, turns=4.0, pause=0.5).requests())
    assert len(talks) == pytest.approx(3_000, rel=0.1)
    assert all(a.at <= b.at for a, b in pairwise(talks))
    day = [request.at for request in LoadShape(0.05, 86_400.0, swing=0.8).requests()]
    assert len(day) == pytest.approx(4_320, rel=0.06)
    assert sum(21_600 < at < 64_800 for at in day) > 2.5 * sum(not 21_600 < at < 64_800 for at in day)


def test_a_replica_survives_the_disk(tmp_path: Path) -> None:
    costs = paper(4, [{"guesser": guesser(2, 4)}], context=300, request_s=0.01, plan_s=(1e-5, 1e-3))
    write_replica(tmp_path / "replica.json", costs)
    again = read_replica(tmp_path / "replica.json")
    load = list(LoadShape(50.0, 4.0).requests())
    assert again.arms == costs.arms
    assert again.texts == costs.texts
    assert simulate(load, again, 2).total_s == simulate(load, costs, 2).total_s


def test_the_controllers_own_file_serves_as_costs(tmp_path: Path) -> None:
    costs = Costs()
    for rows in (1, 2, 4, 8, 16, 64):
        costs.observe_forward(rows, 100, 0.005 + 0.0001 * rows)
        for _ in range(3):
            costs.observe_proposal("draft_model", 1, min(rows, 8), 0.0005 * min(rows, 8))
    costs.accepted = json.loads((bundled_model() / "acceptance.json").read_text())
    costs.save(tmp_path / "costs.json")
    replica = read_replica(tmp_path / "costs.json")
    assert [arm.name for arm in replica.arms] == ["draft_model"]
    requests = [FleetRequest(float(i), (8 + i, 9), 64, i) for i in range(32)]
    run = simulate(requests, replica, 1)
    gains = costs.accepted["0"]["draft_model"]["gains"]
    assert run.accepted / run.drafting == pytest.approx(sum(gains[:5]), rel=0.35)  # about five nodes pay


def test_recorded_rounds_become_costs() -> None:
    known = Costs()
    for rows in (1, 2, 4, 8, 64):
        known.observe_forward(rows, 0, 0.001 * rows)
    known.observe_proposal("a", 1, 4, 0.004)
    known.observe_rest(1, 1.0)

    def sample(rows: int, forward: float, users: list[tuple[str, int, int]], propose: float) -> RoundSample:
        return RoundSample(0.0, rows, 1, 50, rows > 64, users, 0, propose, forward, 0.002, 0.0, False)

    samples = [sample(2, 0.004, [], 0.0), sample(4, 0.008, [("a", 1, 4)], 0.012)] * 5 + [sample(100, 0.5, [], 0.0)]
    costs = costs_from(samples, known)
    assert costs.forward(2, 0) == pytest.approx(0.004)
    assert costs.forward(8, 0) == pytest.approx(0.016)  # did not occur: twice what is known, as the others
    assert costs.forward(100, 0) == pytest.approx(0.5)
    assert costs.rest(1) == pytest.approx(0.002)
    assert costs.proposal("a", 1, 4) == pytest.approx(0.012)
    with pytest.raises(InvalidParameter, match="no round was recorded"):
        costs_from([], known)


def test_a_measured_replica_drafts_on_paper_as_it_does() -> None:
    llm = LLM(speculation={"method": "draft_model", "draft_tokens": 6}, max_num_seqs=2, calibration_s=0)
    policy = llm.engine.policy
    assert isinstance(policy, Controller)
    times = RoundTimes(policy)
    llm.engine.listen(times)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True)
    prompts = ["def add(a, b):\n    ", "class Stack:\n    def __init__(self):\n        "]
    texts = record_texts(llm, prompts, params)
    assert llm.engine.policy is policy
    for text in texts:
        drafts = text["draft_model"].drafts
        assert drafts[0].at == 0
        assert sum(len(draft.path) + 1 for draft in drafts) in range(20, 26)
    llm.generate(prompts, params)
    replica = replica_of(llm, times.samples, texts)
    assert replica.arms == (Arm("draft_model", 6),)
    assert replica.context == llm.max_model_len
    run = simulate([FleetRequest(0.0, (8 + i, 9), 24, i) for i in range(2)], replica, 1)
    assert run.tokens == 48
