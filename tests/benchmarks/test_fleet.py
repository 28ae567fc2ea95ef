"""The fleet's benchmarks: the parts of them that need no server."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fleet_check import Busy, recorded_costs, requests_at, simulated_row
from benchmarks.fleet_scale import CASES, markdown, picture
from outrider.bench.plan.fleet.measure import RoundSample
from outrider.bench.plan.fleet.simulate import simulate
from outrider.bench.plan.fleet.summary import Slo, summarise
from tests.support.fleet import paper


def test_costs_come_from_the_rounds_of_both_and_the_ratio_from_those_of_one(tmp_path: Path) -> None:
    def sample(at: float, seconds: float) -> RoundSample:
        return RoundSample(at, 1, 1, 50, False, [], 0, 0.0, seconds, 0.001, 0.0, False)

    known = {"forward": {"1": 0.002}, "context": {}, "rest": {"1": 0.001}, "propose": {}, "accepted": {}}
    rounds = [
        sample(0.5, 9.0),
        *[sample(1.0 + i / 10, 0.004) for i in range(5)],
        *[sample(2.0 + i / 10, 0.003) for i in range(5)],
    ]
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for path in files:
        path.write_text(json.dumps({"costs": known, "samples": rounds}))
    costs, crowded, alone = recorded_costs(files, Busy((1.0, 2.0), 0, 0, []), Busy((2.0, 3.0), 0, 0, []))
    assert costs.forward(1, 50) == pytest.approx(0.004)
    assert len(crowded) == 10
    assert alone == pytest.approx(0.75)


def test_the_scale_is_shown_as_a_table_and_a_picture() -> None:
    rows = {}
    for name in ("r1", "r3", "r10", "hour"):
        case = replace(CASES[name], load=replace(CASES[name].load, seconds=1.0, rate=20.0))
        run = simulate(case.load.requests(), paper(4), case.replicas)
        rows[name] = summarise(run, 4, "auto", Slo()).as_dict() | {"load": {"rate": 20.0}, "wall_s": run.wall_s}
    assert [line.split("|")[1].strip() for line in markdown(rows).splitlines()[2:]] == ["`r1`", "`r3`", "`r10`", "`hour`"]
    drawn = ET.fromstring(picture(rows))
    assert len(drawn.findall(".//{*}polyline")) == 4
    day = CASES["day"].load
    assert day.rate * day.seconds == pytest.approx(1e6)


def test_requests_of_a_run_have_their_rate_and_lengths() -> None:
    load = requests_at(50.0, 10.0, [(8, 9), (10,)], 40, 0)
    assert len(load) == pytest.approx(500, rel=0.15)
    assert {request.prompt for request in load} == {(8, 9), (10,)}
    assert {request.output for request in load} <= set(range(20, 41))
    assert simulated_row(simulate(load, paper(64), 1))["busy"] > 0.5
