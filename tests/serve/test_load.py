"""The parts of the load benchmark, for a second, against a server in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load import LoadPlan, check_texts, passed, run_load, summarise
from tests.support.server import Running


@dataclass
class Here:
    port: int

    def resident_mib(self) -> float:
        return 100.0


def test_a_short_load_run_passes_and_the_report_finds_faults(server_with: Callable[..., Running]) -> None:
    server = server_with(max_queue=6)
    plan = LoadPlan(streams=6, seconds=1.0, cancel=0.4, tokens=12, seed=1, kinds=6)
    seen, idle = asyncio.run(run_load(Here(server.port), plan, 4 + 6))
    assert not seen.failures
    assert seen.finished
    assert len(seen.refusals_s) == 50
    assert server.is_idle()
    unequal, runs = check_texts(None, plan, seen)
    assert unequal == 0
    assert 1 <= runs <= 6
    quick = {"health_ms": {"p99": 1.0}, "refusal_ms": {"p99": 1.0}, "exit_code": 0}
    report = summarise(plan, seen, idle, unequal) | quick
    assert passed(report)
    for fault in ({"unequal": 1}, {"failed": {"500": 1}}, {"exit_code": 1}, {"health_ms": {"p99": 200.0}}, {"finished": 0}):
        assert not passed(report | fault)
    which, text, tokens = seen.finished[0]
    seen.finished[0] = (which, text + "x", tokens)
    assert check_texts(None, plan, seen)[0] == 1
