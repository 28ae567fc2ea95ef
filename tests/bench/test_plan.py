"""The planner: given costs, measured drafters, traces, the simulated controller and the adviser."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.bench.plan.costs import RoundCosts
from outrider.bench.plan.planner import assumed_costs, plan_chain, plan_rows, read_costs
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.recommend import Machine, rank_candidates, recommend
from outrider.bench.plan.simulate import Traffic, simulate
from outrider.bench.plan.subject import Subject
from outrider.bench.plan.trace import DraftRecord, Trace, read_traces, write_traces
from outrider.cli import app
from outrider.control import Costs
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.sampling import SamplingParams

PROMPTS = ["def add(a, b):\n    ", "import os\n\n\ndef walk(path):\n    ", "class Stack:\n    def __init__(self):\n        "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, seed=0, ignore_eos=True)


def make_costs(propose: float, rows: float = 0.0001, host: float = 0.0002) -> RoundCosts:
    costs = RoundCosts()
    for count in (1, 2, 3, 5, 9, 17, 33, 65, 513):
        costs.add("forward", 1, count, 0.003 + rows * (count - 1))
    for batch in (1, 64):
        costs.add("host", batch, batch, host)
        for length in (1, 2, 4, 8, 16):
            costs.add("propose", batch, length, propose * length)
    return costs


def constant(accepted: int, most: int, method: str = "twin", rounds: int = 40) -> Trace:
    """A drafter whose first `accepted` tokens are always accepted, with confidence that says so."""
    survival = [0.999**i if i < accepted else 0.001 for i in range(most)]
    draft = [
        DraftRecord(list(range(-1, most - 1)), survival, list(range(accepted)), i * (accepted + 1), 99) for i in range(rounds)
    ]
    return Trace(method, 8, most, draft)


def test_assumed_costs_give_the_formulas_speed_up() -> None:
    costs, plain = assumed_costs(draft=0.1, row=0.0, host=0.0)
    result = plan_chain(costs, plain, 0.8, max_length=8)
    assert result["speedup"][4] == pytest.approx((1 - 0.8**5) / 0.2 / 1.4)
    assert result["best_length"] == max(range(9), key=lambda k: (1 - 0.8 ** (k + 1)) / 0.2 / (1 + 0.1 * k))


def test_a_batch_pays_for_the_rows_of_all() -> None:
    costs = make_costs(0.0002)
    assert costs.round_s(4, 3, batch=4) == pytest.approx(4 * 0.0002 + 0.003 + 15 * 0.0001 + 0.0002)
    assert costs.round_s(0, 0, batch=16) == pytest.approx(0.003 + 15 * 0.0001 + 0.0002)


def test_rows_that_cost_end_it_at_some_batch() -> None:
    costs, plain = assumed_costs(draft=0.0, row=0.1, host=0.0)
    few, many = (plan_chain(costs, plain, chance, max_length=4)["break_even_batch"] for chance in (0.5, 0.9))
    assert 0 < few < many
    free, base = assumed_costs(draft=0.0, row=0.0, host=0.0)
    assert plan_chain(free, base, 0.5, max_length=4)["break_even_batch"] >= 4096


def test_a_proposal_for_more_sequences_costs_more() -> None:
    costs, _ = assumed_costs(draft=0.05, row=0.02, host=0.05)
    times = [costs.time("propose", batch, 4) for batch in (1, 16, 193, 1024, 4096)]
    assert times == sorted(times)
    assert times[1] == pytest.approx(4 * 0.05 * (1 + 0.02 * 15), rel=0.01)
    assert times[-1] > 3 * times[-2]
    for measured in ((0.004, 0.008), (0.004, 0.004)):  # at batches 4 and 16, the second in a moment of quiet
        costs = RoundCosts()
        for batch, seconds in zip((4, 16), measured, strict=True):
            costs.add("propose", batch, 4, seconds)
        grown = [costs.time("propose", batch, 4) for batch in (16, 64, 256, 2048)]
        assert all(b >= 1.9 * a for a, b in pairwise(grown))


def test_drafting_is_not_said_to_pay_where_proposals_cost_as_they_do() -> None:
    costs, plain = assumed_costs(draft=0.05, row=0.02, host=0.05)
    last = plan_chain(costs, plain, 0.8, max_length=32)["break_even_batch"]
    assert last < 193  # with proposals that cost the same for any batch
    assert max(plan_chain(costs, plain, 0.8, 32, batch=last)["speedup"][1:]) > 1.0
    assert max(plan_chain(costs, plain, 0.8, 32, batch=last + 1)["speedup"][1:]) <= 1.0


def test_a_profile_expects_what_its_traces_say() -> None:
    profile = Profile("twin", 8, [constant(3, 8)], make_costs(0.0002))
    plain = Profile("none", 0, costs=make_costs(0.0))
    assert [profile.tokens(k) for k in (1, 2, 3, 8)] == [2.0, 3.0, 4.0, 4.0]
    assert profile.best_length() == 3
    row = plan_rows(plain, [profile])[0]
    assert row.best_speedup == pytest.approx(4 * 0.0032 / (0.0032 + 3 * 0.0002 + 3 * 0.0001))
    assert row.tree is None
    assert profile.by_position()[:4] == [1.0, 1.0, 1.0, 0.0]


def test_a_trees_ranks_are_counted_by_claim() -> None:
    draft = DraftRecord([-1, -1, 0, 0], [0.6, 0.3, 0.2, 0.4], [0, 2], 0, 9)
    profile = Profile("tree", 4, [Trace("tree", 1, 4, [draft])])
    assert profile.ranks(3) == [0.5, 0.5, 0.0]  # the root's first child, then the second by confidence; the leaf has none
    assert draft.best(2) == (2, 1)
    assert draft.best(3) == (3, 1)
    assert draft.best(4) == (4, 2)


def test_the_simulation_of_a_constant_trace_is_the_formula() -> None:
    traces, table = [constant(4, 4)], {"none": make_costs(0.0), "twin": make_costs(0.0002)}
    tokens = 1 + 5 * 20
    plain, fixed, auto = (simulate(traces, table, Traffic(30, tokens, 1), profile) for profile in ("none", "twin", "auto"))
    read = 0.003 + 7 * 0.0001 + 0.0002
    per_round = 0.0032 + 4 * (0.0002 + 0.0001)
    assert plain.seconds == pytest.approx(30 * (read + 100 * 0.0032))
    assert fixed.seconds == pytest.approx(30 * (read + 20 * per_round))
    assert fixed.tokens_per_round == 5.0
    assert auto.tok_s == pytest.approx(fixed.tok_s, rel=0.03)  # less what it tries


def test_the_simulated_controller_stops_drafting_that_does_not_pay() -> None:
    traces, table = [constant(0, 8)], {"none": make_costs(0.0), "twin": make_costs(0.002)}
    plain, fixed, auto = (simulate(traces, table, Traffic(20, 100, 2), profile) for profile in ("none", "twin", "auto"))
    assert fixed.tok_s < 0.7 * plain.tok_s
    assert auto.tok_s > 0.97 * plain.tok_s


def test_requests_wait_for_their_turn() -> None:
    traces, table = [constant(4, 4)], {"none": make_costs(0.0), "twin": make_costs(0.0002)}
    slow = simulate(traces, table, Traffic(10, 50, 1, rate=0.5), "none")
    assert slow.seconds > 10  # it is idle between arrivals
    together = simulate(traces, table, Traffic(10, 50, 10), "none")
    one_by_one = simulate(traces, table, Traffic(10, 50, 1), "none")
    assert together.seconds < 0.5 * one_by_one.seconds
    assert together.latency_s < one_by_one.latency_s


def test_traces_survive_the_disk_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_traces(path, [constant(2, 3), constant(1, 3, "other")])
    assert read_traces(path) == [constant(2, 3), constant(1, 3, "other")]
    good = path.read_text()
    for bad in (
        '{"parents": [5]}',
        '{"parents": [5], "survival": [0.5], "path": [], "at": 0, "room": 1}',
        "nonsense",
        "[" * 9999,
    ):
        path.write_text(good + f'{{"method": "x", "prompt": 1, "most": 2, "rounds": [{bad}]}}\n')
        with pytest.raises(InvalidParameter, match=r"trace\.jsonl:3"):
            read_traces(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidParameter, match=r"trace\.jsonl cannot be read"):
        read_traces(path)


def test_the_controllers_own_file_serves_as_costs(tmp_path: Path) -> None:
    costs = Costs()
    for rows in (1, 2, 4, 8):
        costs.observe_forward(rows, 100, 0.002 + 0.0001 * rows)
        costs.observe_proposal("eagle", 1, rows, 0.0005 * rows)
    costs.save(tmp_path / "costs.json")
    table = read_costs(tmp_path / "costs.json")
    assert table["eagle"].round_s(4, 4) == pytest.approx(0.002 + 0.0020 + 0.00045, rel=0.1)
    for bad in ("[1]", "[" * 9999):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(InvalidParameter, match="no table of costs"):
            read_costs(tmp_path / "bad.json")


def test_what_a_drafter_needs_beside_the_target() -> None:
    profile = Subject(None, "draft_model:4").profile.memory
    assert profile.weights == 2 * 3_572_992
    assert profile.kv_per_token > 0
    assert Subject(None, "ngram:4").profile.memory.weights == 0


def test_the_adviser_reads_configurations_and_tokenizers() -> None:
    pyrite = bundled_model()
    (advice,) = recommend(pyrite, [pyrite / "draft", pyrite], Machine(bandwidth=20e9))
    assert advice.sizes == (advice.parameters // 200, int(advice.parameters / 2.5))
    draft, itself = advice.fits
    assert draft.tokens == itself.tokens == "same"
    assert 10 < draft.times_smaller < 12
    assert itself.times_smaller == 1.0
    assert "only 1.0 times smaller" in itself.says
    assert itself.estimates[0.8][1] == 1.0
    assert draft.estimates[0.9][1] > draft.estimates[0.6][1] > 1.0


def test_the_adviser_tells_tokenizers_apart(tmp_path: Path) -> None:
    pyrite = bundled_model()
    part = _other_tokenizer(tmp_path / "part", keep=6000)
    fits = recommend(pyrite, [part], Machine(bandwidth=20e9))[0].fits
    assert fits[0].tokens == "shared"
    assert "of 8192 tokens" in fits[0].says
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(json.loads((pyrite / "config.json").read_text()) | {"vocab_size": 77}))
    fit = recommend(pyrite, [bare], Machine(bandwidth=20e9))[0].fits[0]
    assert fit.tokens == "none"
    assert "holds no tokenizer" in fit.says


def test_candidates_are_ranked_by_a_run() -> None:
    pyrite = bundled_model()
    (advice,) = recommend(pyrite, [pyrite, pyrite / "draft"], Machine(bandwidth=20e9))
    ranked = rank_candidates(pyrite, advice.fits, PROMPTS[:1], 12, lambda _: None)
    by_path = {row["path"]: row for row in ranked}
    assert by_path[str(pyrite)]["by_position"][0] == 1.0  # no drafter agrees with it more
    assert by_path[str(pyrite / "draft")]["weights_bytes"] * 10 < by_path[str(pyrite)]["weights_bytes"]


def test_the_command_plans_from_what_is_given(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(
        app, ["plan", "--acceptance", "0.8", "--ranks", "0.7,0.2", "--draft-cost", "0.05", "--json", "--html", str(page)]
    )
    assert result.exit_code == 0, result.output
    assert "[d" not in result.output, "styles, not their names"
    result = json.loads(result.stdout.splitlines()[-1])
    assert result["tree"]["tokens"] > 1.0
    assert len(result["what_if"]["speedup"]["0.8"]) == 12
    assert "<svg" in page.read_text()
    assert "src=" not in page.read_text()
    assert "href=" not in page.read_text()


def test_the_command_records_and_replays(tmp_path: Path) -> None:
    files = [tmp_path / "trace.jsonl", tmp_path / "costs.json", tmp_path / "plan.html"]
    arguments = ["plan", "--methods", "suffix:6", "--limit", "2", "--tokens", "16", "--json", "--explain"]
    kept = ["--record", str(files[0]), "--save-costs", str(files[1]), "--html", str(files[2])]
    result = CliRunner().invoke(app, [*arguments, *kept])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout.splitlines()[-1])["rows"][0]
    assert row["method"] == "suffix:6"
    assert row["tokens_per_round"] >= 1.0
    assert len(read_traces(files[0])) == 2
    replay = CliRunner().invoke(app, ["plan", "--simulate", str(files[0]), "--costs", str(files[1]), "--requests", "4", "--json"])
    assert replay.exit_code == 0, replay.output
    assert [profile["policy"] for profile in json.loads(replay.stdout.splitlines()[-1])["outcomes"]] == [
        "none",
        "suffix:6",
        "auto",
    ]


def _other_tokenizer(directory: Path, keep: int) -> Path:
    """The bundled tokenizer with only its first tokens."""
    source = bundled_model()
    directory.mkdir()
    data = json.loads((source / "tokenizer.json").read_text())
    vocab = {token: i for token, i in data["model"]["vocab"].items() if i < keep}
    data["model"]["vocab"] = vocab
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "".join(pair) in vocab]
    (directory / "tokenizer.json").write_text(json.dumps(data))
    for name in ("tokenizer_config.json", "config.json"):
        (directory / name).write_text((source / name).read_text())
    return directory
