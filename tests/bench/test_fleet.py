"""The fleet on paper against closed forms, and what holds for every load."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from outrider.bench.plan.fleet.load import FleetRequest, LoadShape
from outrider.bench.plan.fleet.paper import CostTable, on_paper
from outrider.bench.plan.fleet.simulate import FleetRun, run_fleet, simulate
from outrider.bench.plan.fleet.sizing import FleetQuestion, choose_fleet, speculation_by_load, stops_paying
from outrider.bench.plan.fleet.summary import Slo, summarise
from outrider.bench.plan.fleet.texts import Texts
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.control import Controller
from outrider.core import Batch, Plan, Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.errors import InvalidParameter
from outrider.quantiles import quantile
from outrider.routing import Router
from outrider.sampling import SamplingParams
from tests.support.fleet import ROUND_S, guesser, paper

MIXED = LoadShape(rate=40.0, seconds=5.0, prompt=100, output=12, turns=3.0, pause=0.5, shared=64, tenants=2, seed=3)


def constant(rate: float, seconds: float, output: int = 4) -> list[FleetRequest]:
    return list(LoadShape(rate, seconds, prompt=10, output=output, spread=0.0, seed=1).requests())


def test_a_queue_of_equal_requests_waits_as_the_formula_says() -> None:
    load = 0.6
    requests = constant(load / (4 * ROUND_S), 120.0)
    run = simulate(requests, paper(), 1)
    wait = fmean(run.total_s) - 4 * ROUND_S
    assert wait == pytest.approx(load * 4 * ROUND_S / (2 * (1 - load)), rel=0.12)  # M/D/1
    assert run.busy_s == pytest.approx(len(requests) * 4 * ROUND_S)
    assert list(run.per_token_s) == pytest.approx([ROUND_S] * len(requests))


@pytest.mark.parametrize(("batch", "replicas"), [(1, 1), (4, 1), (4, 3)])
def test_a_full_fleet_emits_a_token_of_each_slot_in_every_round(batch: int, replicas: int) -> None:
    requests = [FleetRequest(0.0, (8 + i, 9), 20) for i in range(20 * batch * replicas)]
    run = simulate(requests, paper(batch), replicas)
    assert run.tokens / run.seconds == pytest.approx(batch * replicas / ROUND_S, rel=0.02)


def test_drafts_that_are_always_right_give_the_formulas_speed() -> None:
    costs = paper(texts=[{"guesser": guesser(4, 4)}], propose_s=0.0005)
    requests = [FleetRequest(0.0, (8 + i, 9), 101) for i in range(40)]
    run = simulate(requests, costs, 1)
    assert run.tokens / run.seconds == pytest.approx(5 / (ROUND_S + 4 * 0.0005), rel=0.05)  # less what is explored
    assert run.drafting / run.sequence_rounds > 0.9


def test_drafts_that_are_never_right_are_not_drawn_for_long() -> None:
    costs = paper(texts=[{"guesser": guesser(0, 4)}], propose_s=0.002)
    requests = [FleetRequest(0.0, (8 + i, 9), 101) for i in range(20)]
    auto, plain = (simulate(requests, costs.drafting(method), 1) for method in ("auto", "none"))
    assert auto.seconds < 1.04 * plain.seconds
    assert plain.drafting == 0


def test_the_same_load_gives_the_same_numbers() -> None:
    costs = paper(4, [{"guesser": guesser(2, 6)}, {"guesser": guesser(0, 6)}])
    runs = [simulate(MIXED.requests(), costs, 3) for _ in range(2)]
    assert list(MIXED.requests()) == list(MIXED.requests())
    for name in ("first_s", "total_s", "per_token_s", "rounds", "drafted", "prefix_hits", "seconds"):
        assert getattr(runs[0], name) == getattr(runs[1], name)


@pytest.mark.parametrize("pages", [0, 9])
def test_every_request_ends_once_and_its_tokens_are_counted(pages: int) -> None:
    costs = paper(6, [{"guesser": guesser(2, 6)}], pages=pages, context=512)
    requests = list(MIXED.requests())
    table, texts = CostTable(costs.costs), Texts(costs.texts, ["guesser"])
    made = [on_paper(f"r{i}", costs, table, texts) for i in range(2)]
    run = run_fleet(requests, made, costs)
    fit = [r for r in requests if len(r.prompt) + r.output <= 512]
    assert len(fit) < len(requests)  # conversations outgrow the context
    assert run.refused == len(requests) - len(fit)
    assert len(run.total_s) == len(fit)
    assert run.tokens == sum(request.output for request in fit)
    assert run.tokens == sum(replica.engine.tally.emitted for replica in made)
    assert all(first <= total for first, total in zip(run.first_s, run.total_s, strict=True))
    assert all(replica.engine.pages.used == 0 and replica.idle for replica in made)
    assert (run.preemptions > 0) == bool(pages)


def test_more_replicas_never_make_it_slower() -> None:
    costs = paper(2, [{"guesser": guesser(1, 4)}])
    tails = [quantile(simulate(constant(60.0, 5.0, 8), costs, n).total_s, 0.99) for n in (1, 2, 4, 8)]
    assert all(after <= 1.05 * before for before, after in pairwise(tails))
    assert tails[-1] < 0.5 * tails[0]


def test_conversations_find_their_pages_again_behind_the_router() -> None:
    costs = paper(8)
    one, four = (simulate(MIXED.requests(), costs, n) for n in (1, 4))
    hits = [run.prefix_hits / run.prefix_queries for run in (one, four)]
    assert hits[0] > 0.3
    assert hits[1] > 0.85 * hits[0]


def test_it_runs_the_parts_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, method in (
        (Scheduler, "next"),
        (Controller, "plan"),
        (Controller, "observe"),
        (Router, "choose"),
        (Engine, "round"),
    ):
        real = getattr(kind, method)
        name = f"{kind.__name__}.{method}"
        monkeypatch.setattr(kind, method, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    costs = paper(2, [{"guesser": guesser(2, 4)}])
    run = simulate(constant(20.0, 2.0), costs, 2)
    assert calls.count("Engine.round") == calls.count("Scheduler.next") == calls.count("Controller.plan") == run.rounds
    assert calls.count("Controller.observe") == run.rounds
    assert calls.count("Router.choose") == run.offered
    engine = on_paper("r", costs, CostTable(costs.costs), Texts(costs.texts, ["guesser"])).engine
    assert type(engine) is Engine
    assert type(engine.scheduler) is Scheduler


def test_overload_is_said_and_ends() -> None:
    costs = paper(2, queue=10)
    run = simulate(constant(200.0, 5.0), costs, 1)
    row = summarise(run, 2, "none", Slo(), 1.0)
    assert run.refused > 0
    assert run.offered == len(run.first_s) + run.refused
    assert row.overloaded
    assert not row.meets_slo
    waiting = summarise(simulate(constant(80.0, 5.0), paper(2), 1), 2, "none", Slo(1e3, 1e3))
    assert waiting.overloaded  # nobody was refused, and ever more wait


def test_replicas_of_one_machine_slow_each_other_down() -> None:
    requests = constant(10.0, 20.0)
    apart, together = (simulate(requests, paper(per_machine=n, alone=0.5), 2) for n in (1, 2))
    assert together.seconds < apart.seconds
    assert 0.5 * fmean(apart.total_s) < fmean(together.total_s) < 0.9 * fmean(apart.total_s)


def test_a_request_is_in_the_queue_after_its_way_there() -> None:
    run = simulate([FleetRequest(1.0, (8,), 2)], paper(request_s=0.25), 1)
    assert run.first_s[0] == pytest.approx(0.25 + ROUND_S)
    assert run.total_s[0] == pytest.approx(0.25 + 2 * ROUND_S)


def test_in_the_middle_of_a_recorded_draft_its_remainder_is_right() -> None:
    chain, tree = (
        DraftRecord([-1, 0, 1, 2], [0.9, 0.8, 0.7, 0.6], [0, 1], 0, 9),
        DraftRecord([-1, -1, 1], [0.3, 0.6, 0.5], [1, 2], 0, 9),
    )
    texts = Texts([{"a": Trace("a", 0, 4, [chain]), "b": Trace("b", 0, 4, [tree])}], ["a", "b"])
    assert [texts.draft(0, 0, at, 4).tokens for at in range(4)] == [[1, 1, 2, 2], [1, 2, 2, 2], [2, 2, 2, 2], [1, 1, 2, 2]]
    assert texts.draft(0, 0, 0, 1).tokens == [1]
    assert texts.draft(0, 1, 0, 3).tokens == [2, 1, 1]
    assert texts.draft(0, 1, 1, 3).tokens == [2, 1, 2]
    full = [DraftRecord([-1, 0], [0.9, 0.8], [0, 1], at, 9) for at in (0, 3)]  # all that was drafted was right
    assert Texts([{"a": Trace("a", 0, 2, full)}], ["a"]).draft(0, 0, 1, 2).tokens == [1, 1]


def test_the_smallest_fleet_is_found() -> None:
    shape = LoadShape(rate=150.0, seconds=3.0, prompt=20, output=10, spread=0.3)
    question = FleetQuestion(shape.requests, paper(4, [{"guesser": guesser(2, 4)}]), Slo(0.2, 0.02), 1.0)
    chosen = choose_fleet(question, "auto", 4)
    assert chosen.meets_slo
    assert not question.run(chosen.replicas - 1, "auto", 4).meets_slo
    assert chosen.cost_per_million == pytest.approx(chosen.replicas * 1e6 / 3600 / chosen.output_tok_s)
    assert choose_fleet(question, "none", 4).replicas > chosen.replicas
    rows = speculation_by_load(question, chosen)
    assert stops_paying(rows) is None  # rows cost nothing here
    assert rows[-1][1].mean_batch > rows[0][1].mean_batch


def test_what_no_fleet_can_do_is_an_error() -> None:
    shape = LoadShape(rate=5.0, seconds=10.0)
    with pytest.raises(InvalidParameter, match="one request alone takes"):
        choose_fleet(FleetQuestion(shape.requests, paper(), Slo(0.001, 0.001)), "none")
    with pytest.raises(InvalidParameter, match="exceed the replica's context of 16"):
        choose_fleet(FleetQuestion(shape.requests, paper(context=16), Slo()), "none")
    huge = LoadShape(rate=4e5, seconds=10.0, output=50, spread=0.0)
    with pytest.raises(InvalidParameter, match="overloads 10,000 replicas"):
        choose_fleet(FleetQuestion(huge.requests, paper(), Slo(10.0, 10.0)), "none")


def test_an_empty_run_has_numbers_too() -> None:
    assert summarise(FleetRun(1, 8), 8, "auto", Slo()).output_tok_s == 0


def test_a_draft_model_ends_a_draft_that_is_not_likely_to_survive() -> None:
    record = DraftRecord([-1, 0, 1, 2], [0.9, 0.4, 0.3, 0.2], [0, 1, 2], 0, 9)
    for name, nodes in (("draft_model", 2), ("suffix", 4)):
        costs = paper(texts=[{name: Trace(name, 0, 4, [record])}])
        engine = on_paper("r", costs, CostTable(costs.costs), Texts(costs.texts, [name])).engine
        processor = engine.submit(Request("r", (8, 9), SamplingParams(), 0, frozenset(), 8), "paper")
        engine.drafter.begin(processor.seq)
        drafts = engine.drafter.propose(Batch([processor.seq], [1]), Plan((4,), arms=(0,), confidence_threshold=0.5))
        assert drafts.counts == [nodes]
