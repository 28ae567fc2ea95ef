"""Measured times become a monotone table that survives on disk."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outrider.bench.costs import show_costs
from outrider.control import Costs
from outrider.control.curve import Curve, Typical


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-5, 1.0)), min_size=1, max_size=40), st.data())
def test_more_never_costs_less(seen: list[tuple[int, float]], data: st.DataObject) -> None:
    curve = Curve()
    for size, seconds in seen:
        curve.observe(size, seconds)
    less = data.draw(st.integers(1, 3000))
    more = data.draw(st.integers(less, 4000))
    low, high = curve.time(less), curve.time(more)
    assert low is not None
    assert high is not None
    assert 0 < low <= high * (1 + 1e-9)


def test_between_two_sizes_time_is_between_theirs() -> None:
    curve = Curve()
    curve.observe(1, 0.001)
    curve.observe(16, 0.004)
    assert curve.time(1) == pytest.approx(0.001)
    assert curve.time(16) == pytest.approx(0.004)
    assert curve.time(8.5) == pytest.approx(0.0025)
    assert curve.time(31) == pytest.approx(0.007)


def test_what_is_far_off_is_not_told_by_two_neighbours() -> None:
    curve = Curve()
    curve.observe(32, 0.1)
    curve.observe(33, 0.1)
    assert (curve.time(512) or 0.0) >= 0.3


def test_padded_sizes_cost_what_is_run() -> None:
    costs = Costs((4, 8, 16))
    for _ in range(4):
        costs.observe_forward(3, 0, 0.004)
        costs.observe_forward(9, 0, 0.010)
        costs.observe_proposal("a", 3, 2, 0.001)
        costs.observe_proposal("a", 9, 2, 0.003)
    assert [costs.forward(rows, 0) for rows in (1, 4, 9, 16)] == pytest.approx([0.004, 0.004, 0.010, 0.010])
    assert costs.proposal("a", 1, 2) == costs.proposal("a", 4, 2) == pytest.approx(0.001)
    assert 0.002 < costs.proposal("a", 9, 2) == costs.proposal("a", 16, 2)
    assert 0.004 < costs.forward(5, 0) == costs.forward(8, 0) < 0.010
    assert costs.forward(17, 0) > 0.010


def test_a_stall_is_not_a_cost() -> None:
    curve = Curve()
    for _ in range(30):
        curve.observe(4, 0.002)
    curve.observe(4, 10.0)
    assert curve.time(4) < 0.0023  # type: ignore[operator]


def test_the_smallest_sizes_are_worth_a_try_until_they_are_measured() -> None:
    costs = Costs()
    costs.observe_forward(16, 100, 0.008)
    assert costs.forward(1, 100) < 0.004
    costs.observe_forward(1, 100, 0.007)
    assert costs.forward(1, 100) == pytest.approx(0.007)


def test_contexts_and_batches_are_told_apart() -> None:
    costs = Costs()
    costs.observe_forward(1, 100, 0.002)
    costs.observe_forward(1, 10_000, 0.005)
    assert costs.forward(1, 200) < costs.forward(1, 9_000)
    costs.observe_proposal("eagle", 1, 5, 0.001)
    costs.observe_proposal("eagle", 8, 5, 0.003)
    assert costs.proposal("eagle", 1, 5) < costs.proposal("eagle", 8, 5) <= costs.proposal("eagle", 32, 5)
    assert costs.proposal("unknown", 1, 5) == pytest.approx(costs.forward(1, 0))


def test_the_table_survives_and_a_broken_file_is_no_table(tmp_path: Path) -> None:
    costs = Costs()
    costs.observe_forward(3, 100, 0.002)
    costs.observe_proposal("suffix", 2, 8, 0.0001)
    costs.observe_switch("suffix", 100, 0.001)
    path = tmp_path / "deep" / "costs.json"
    costs.save(path)
    assert Costs.load(path).as_dict() == costs.as_dict()
    assert Costs.load(path).switch("suffix", 200) == pytest.approx(0.002)
    for text in ("", "[]", "{}", '{"forward": 3, "propose": {}}', '{"forward": {"x": {}}, "propose": {}}'):
        path.write_text(text)
        assert Costs.load(path).as_dict() == Costs().as_dict()
    assert Costs.load(tmp_path / "none").as_dict() == Costs().as_dict()
    costs.save(Path("/proc/nowhere/costs.json"))  # a machine that cannot keep it goes on


def test_reading_prompts_says_nothing_of_what_a_longer_context_adds() -> None:
    costs = Costs()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        costs.observe_forward(rows, 100, 0.001 * rows)
    for rows in (700, 900, 3000):  # dearer than the few say, each at first
        costs.observe_forward(rows, 1500, 0.007 * rows)
        assert costs.forward(32, 1500) == pytest.approx(0.032)
    for _ in range(400):
        costs.observe_forward(32, 1500, 0.040)
    assert costs.forward(32, 1500) == pytest.approx(0.040, rel=0.02)
    assert costs.forward(16, 1500) > costs.forward(16, 100)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    costs = Costs()
    for rows in (1, 2, 4, 8, 16):
        for _ in range(40):
            costs.observe_forward(rows, 100, 0.001 * rows)
    costs.observe_proposal("suffix", 1, 4, 0.002)
    for _ in range(100):
        costs.observe_forward(1, 100, 0.0015)  # the same work, in a slower minute
    assert costs.forward(1, 100) == pytest.approx(0.0015, rel=0.02)
    assert 0.010 < costs.forward(8, 100) < 0.013
    assert 0.0026 < costs.proposal("suffix", 1, 4) < 0.0031
    for _ in range(100):
        costs.observe_forward(8, 100, 0.008)  # and in a quick one, in which only the others are seen
    assert costs.forward(8, 100) == pytest.approx(0.008, rel=0.02)
    assert 0.0009 < costs.forward(1, 100) < 0.0013


def test_a_drafter_is_known_well_after_a_few_proposals_or_from_an_earlier_start() -> None:
    costs = Costs()
    found = []
    for _ in range(4):
        found.append((costs.knows_proposal("a"), costs.knows_proposal("a", well=True)))
        costs.observe_proposal("a", 1, 4, 0.001)
    assert found == [(False, False), (True, False), (True, False), (True, True)]
    once = Costs()
    once.observe_proposal("a", 1, 4, 0.001)
    assert Costs.from_dict(once.as_dict()).knows_proposal("a", well=True)


@pytest.mark.parametrize("slow", range(4))
def test_one_slow_time_counts_little_wherever_it_stands(slow: int) -> None:
    costs = Costs()
    for place in range(4):
        costs.observe_proposal("a", 1, 4, 0.010 if place == slow else 0.001)
        costs.observe_switch("a", 100, 0.010 if place == slow else 0.001)
    assert costs.proposal("a", 1, 4) < 0.0013
    assert costs.switch("a", 100) < 0.0013


def test_times_that_changed_for_good_are_followed_at_once() -> None:
    typical = Typical([0.001] * 16)
    for seconds in (0.003, 0.003):
        typical.observe(seconds)
    assert typical.mean < 0.0013
    typical.observe(0.003)
    assert typical.mean == pytest.approx(0.003)


def test_bytes_over_the_bus_are_kept_and_shown() -> None:
    costs = Costs()
    for _ in range(4):
        costs.observe_forward(1, 0, 0.25)
    assert "bus" not in costs.as_dict()
    costs.bus_bytes = 10 * 2**30
    assert costs.as_dict()["bus"] == {"bytes": 10 * 2**30, "bytes_per_s": pytest.approx(40 * 2**30, rel=1e-3)}
    assert Costs.from_dict(costs.as_dict()).bus_bytes == 10 * 2**30
    console = Console(record=True, width=120, file=io.StringIO())
    show_costs(costs, console)
    assert "10.00 GiB of weights cross the bus in every forward" in " ".join(console.export_text().split())
