"""Reports of rounds: one for each, with what was planned, drafted and accepted, told to every listener."""

from __future__ import annotations

import pytest

from outrider.core import RoundReport
from outrider.model import Decoder
from outrider.ops.forwards import active_log, logging_to
from outrider.sampling import SamplingParams as Params
from tests.support import Oracle, make_engine, make_request, random_decoder, run, write_family


class Listening:
    def __init__(self) -> None:
        self.reports: list[RoundReport] = []

    def observe(self, report: RoundReport) -> None:
        self.reports.append(report)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"), seed=1)


@pytest.mark.parametrize("branches", [0, 3])
def test_reports_add_up_to_what_requests_got(decoder: Decoder, branches: int) -> None:
    requests = [make_request([5 + i, 9, 3], Params(temperature=0.9, seed=i, max_tokens=30), f"r{i}") for i in range(3)]
    plain = [writer.output() for writer in run(make_engine(decoder), requests, "none")]
    answers = {r.id: [*r.prompt_ids, *output.token_ids] for r, output in zip(requests, plain, strict=True)}
    engine, listening = make_engine(decoder, Oracle(answers, 6, branches), length=6), Listening()
    engine.listen(listening)
    outputs = [writer.output() for writer in run(engine, requests, "oracle")]
    reports = listening.reports
    got = [seq for report in reports for seq in report.sequences]
    assert sum(seq.kept for seq in got) == sum(len(output.token_ids) for output in outputs) == engine.tally.emitted
    assert sum(len(seq.depths) for seq in got) == sum(output.speculation["drafted"] for output in outputs) > 0
    assert sum(seq.accepted for seq in got) == sum(output.speculation["accepted"] for output in outputs) > 0
    assert {seq.drafter for seq in got} == {"", "oracle"}
    assert sum(seq.emits for seq in got) == engine.tally.rounds
    assert sum(not seq.last_token for seq in got if seq.kept) == len(requests)  # the first tokens of each
    for report in reports:
        drafted = sum(len(tree.tokens) for tree in report.drafts.per_sequence)
        assert report.rows == sum(report.batch.feeds) + drafted
        assert report.prefill == (sum(report.batch.feeds) > len(report.batch.sequences))
        assert len(report.plan.lengths) == len(report.verdicts) == len(report.room) == len(report.sequences)
        assert min(report.phases) >= 0.0
        assert report.phases.wall == pytest.approx(sum(report.phases))
        assert report.began < report.tokens_at
    assert [report.began for report in reports] == sorted(report.began for report in reports)


def test_a_listener_that_left_is_told_nothing(decoder: Decoder) -> None:
    engine, first, second = make_engine(decoder), Listening(), Listening()
    stop = engine.listen(first)
    engine.listen(second)
    run(engine, [make_request([5, 9, 3], Params(max_tokens=4, seed=1), "a")], "none")
    stop()
    count = len(first.reports)
    run(engine, [make_request([5, 9, 3], Params(max_tokens=4, seed=1), "b")], "none")
    assert len(first.reports) == count > 0
    assert len(second.reports) == 2 * count


def test_the_controller_learns_what_the_report_says(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listening, stats = make_engine(decoder, Oracle({}, 0, 0), length=0), Listening(), []
    engine.listen(listening)
    monkeypatch.setattr(engine.policy, "observe", stats.append)
    run(engine, [make_request([5, 9, 3], Params(max_tokens=4, seed=1), "a")], "none")
    for report, told in zip(listening.reports, stats, strict=True):
        phases = report.phases
        assert told.rows == report.rows
        assert (told.propose_s, told.forward_s) == (phases.propose, phases.forward)
        assert told.rest_s == pytest.approx(phases.verify + phases.commit + phases.record)
        assert told.think_s == pytest.approx(phases.plan + phases.select + phases.learn)


def test_a_log_is_active_in_its_block_alone() -> None:
    class Log:
        run = launch = staticmethod(lambda call: call())

    log = Log()
    assert active_log() is None
    with logging_to(log):
        assert active_log() is log
        with logging_to(None):
            assert active_log() is None
    assert active_log() is None
