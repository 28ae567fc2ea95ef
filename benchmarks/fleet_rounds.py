"""`python -m benchmarks.fleet_rounds`: real engines with Pyrite in the simulator's event loop, and the simulation of the same.

A real round counts with the CPU seconds of its thread, so that other work on the machine does not matter. What is compared are
costs, drafts and the controller; HTTP and the operating system are not: `benchmarks.fleet_check` has them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import torch
import typer

from benchmarks.command import close_report, errors, run
from benchmarks.fleet_check import requests_at, simulated_row
from outrider.bench.plan.fleet.load import FleetRequest
from outrider.bench.plan.fleet.measure import RoundTimes, record_texts, replica_of
from outrider.bench.plan.fleet.replica import Replica
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts, write_replica
from outrider.bench.plan.fleet.simulate import run_fleet, simulate
from outrider.bench.plan.trace import Trace
from outrider.bench.workloads import find_prompts
from outrider.control import Controller, Costs
from outrider.engine.acceptance import read_prompts
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams

__all__ = ["main"]

T = TypeVar("T")
_TOLERANCE = 0.15
_PROMPT_ROWS = (65, 96, 128, 192, 256, 384, 512)
_BATCHES = (1, 2, 4, 8)


class CpuClock:
    """Virtual seconds that go on with the CPU seconds of the thread."""

    def __init__(self) -> None:
        self._from, self._scale = 0.0, 1.0
        self._began = time.thread_time()

    @property
    def now(self) -> float:
        return self._from + (time.thread_time() - self._began) * self._scale

    def begin(self, now: float, scale: float) -> None:
        self._from, self._scale, self._began = now, scale, time.thread_time()

    def clock(self) -> float:
        return self.now

    def around(self, round_: Callable[[], T]) -> T:
        return round_()

    def scored(self) -> None:
        pass


def load_engine(slots: int) -> tuple[LLM, CpuClock]:
    """Pyrite with `auto` on one thread, which knows no costs yet."""
    llm, clock = LLM(speculation="auto", max_num_seqs=slots, calibration_s=0, share=False), CpuClock()
    llm.engine.profile(clock)
    _controller(llm).costs = Costs()
    return llm, clock


def _controller(llm: LLM) -> Controller:
    assert isinstance(llm.engine.policy, Controller)
    return llm.engine.policy


def measure(llm: LLM, prompts: Sequence[str], tokens: int) -> ReplicaCosts:
    """Texts and costs in CPU seconds."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens, ignore_eos=True)
    texts: list[dict[str, Trace]] = record_texts(llm, prompts, params)
    llm.measure_costs()
    times = RoundTimes(_controller(llm))
    stop = llm.engine.listen(times)
    for batch in _BATCHES * 3:
        for first in range(0, len(prompts), batch):
            llm.generate([prompts[(first + i) % len(prompts)] for i in range(batch)], params)
    for i, rows in enumerate(_PROMPT_ROWS * 3):
        llm.generate([list(range(100 + i, 100 + i + rows))], replace(params, max_tokens=1))
    stop()
    replica = replica_of(llm, times.samples, texts)
    how = {"how": "one thread, CPU seconds of the engine's thread", "command": "python -m benchmarks.fleet_rounds"}
    return replace(replica, measured=dict(replica.measured) | how)


def main(
    rates: Annotated[str, typer.Option(help="Requests per second of both replicas, comma-separated.")] = "6,14,22",
    seconds: Annotated[float, typer.Option(min=1, help="Virtual seconds of each.")] = 20.0,
    tokens: Annotated[int, typer.Option(min=8, help="New tokens of a request: half as many to this many.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 8,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that a replica runs at once.")] = 8,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write the costs, as `outrider plan --fleet --costs` reads them.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File for the result, as JSON.")] = Path("results/fleet_rounds.json"),
) -> None:
    """Two replicas of one thread, real and simulated, at three loads: throughput and median latency within 15 %."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, errors.status("measuring costs") as status:
        os.environ["OUTRIDER_CACHE"] = folder
        loaded = [load_engine(slots) for _ in range(2)]
        texts = read_prompts(find_prompts("code"), prompts)
        paper = measure(loaded[0][0], texts, tokens)
        for llm, _ in loaded:
            _controller(llm).costs = Costs.from_dict(paper.costs.as_dict())
        if save_costs is not None:
            write_replica(save_costs, paper)
        tokenizer = loaded[0][0].tokenizer
        assert tokenizer is not None
        ids = [tuple(tokenizer.encode(text)) for text in texts]
        rows = []
        for number, rate in enumerate(map(float, rates.split(","))):
            status.update(f"{rate:g} requests a second")
            rows.append(compare(requests_at(rate, seconds, ids, tokens, number), loaded, paper) | {"rate": rate})
    worst = max(abs(row["error"][name]) for row in rows for name in ("output_tok_s", "median_latency_ms"))
    what = "two one-thread engines with Pyrite in the simulator's event loop, in CPU seconds, and their simulation"
    report = {"what": what, "loads": rows, "worst_error": worst, "tolerance": _TOLERANCE, "passed": worst <= _TOLERANCE}
    close_report(report, output)


def compare(load: Sequence[FleetRequest], loaded: Sequence[tuple[LLM, CpuClock]], paper: ReplicaCosts) -> dict[str, Any]:
    """The same requests, run and simulated."""
    for llm, _ in loaded:
        llm.engine.reset_counts()
    fleet = [Replica(f"r{i}", llm.engine, clock, 0.0, paper.context) for i, (llm, clock) in enumerate(loaded)]
    real, simulated = simulated_row(run_fleet(load, fleet, paper)), simulated_row(simulate(load, paper, 2))
    error = {name: simulated[name] / real[name] - 1.0 for name in real}
    errors.print(f"{len(load)} requests: " + ", ".join(f"{name} {share:+.1%}" for name, share in error.items()), soft_wrap=True)
    lengths = median(request.output for request in load)
    return {"requests": len(load), "median_tokens": lengths, "measured": real, "simulated": simulated, "error": error}


if __name__ == "__main__":
    run(main)
