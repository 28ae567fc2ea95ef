"""`python -m benchmarks.round`: what a plain round costs beside the model's forward and the choice."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.core import Request, RoundReport
from outrider.engine.llm import LLM
from outrider.ops.forwards import logging_to
from outrider.options import LoadFormat, Model, Threads, numbers, set_threads
from outrider.sampling import Key, SamplingParams, draw

__all__ = ["RoundCost", "measure_noise", "measure_round"]

_WARM_UP = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Medians in microseconds, per plain round."""

    temperature: float
    batch: int
    queued: int  # requests waiting meanwhile
    rounds: int
    total_us: float
    forward_us: float  # the decoder and its output matrix
    choice_us: float  # with the walk through the drafts
    outside_us: float  # everything else: scheduling, laying out rows, proposing, commit
    layout_us: float  # of that, laying out the rows and planning their attention
    bookkeeping_us: float  # of that, scheduling, planning, committing and counting: what is left without scoring and verifying

    def as_dict(self) -> dict[str, Any]:
        shares = {f"{part}_us_per_sequence": getattr(self, f"{part}_us") / self.batch for part in ("outside", "bookkeeping")}
        return asdict(self) | shares


@dataclass(slots=True)
class _RoundTimes:
    """Listens to plain rounds, and times the model's forward in each."""

    samples: list[tuple[float, ...]] = field(default_factory=list)
    _forward: float = 0.0

    def clock(self) -> float:
        return time.perf_counter()

    def around(self, round_: Callable[[], T]) -> T:
        self._forward = 0.0
        with logging_to(self):
            return round_()

    def scored(self) -> None:
        pass

    def run(self, forward: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = forward()
        self._forward += time.perf_counter() - start
        return result

    launch = run

    def observe(self, report: RoundReport) -> None:
        phases, forward = report.phases, self._forward
        outside = phases.wall - forward - phases.verify
        layout, bookkeeping = phases.forward - forward, phases.wall - phases.forward - phases.verify
        self.samples.append((phases.wall, forward, phases.verify, outside, layout, bookkeeping))


def measure_round(
    model: str | Path | None, load_format: str, temperature: float, rounds: int = 200, batch: int = 1, queued: int = 0
) -> RoundCost:
    """Time plain rounds, and how much of each is the model and the choice."""
    engine = LLM(model, speculation="none", load_format=load_format, max_num_seqs=batch).engine
    vocab = engine.runner.decoder.spec.vocab
    prompt = [i * 7919 % vocab for i in range(64)]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=rounds + _WARM_UP, ignore_eos=True)
    for i in range(batch + queued):
        engine.submit(Request(f"bench-{i}", (*prompt, i % vocab), params, i, frozenset(), rounds + _WARM_UP), "none")
    times = _RoundTimes()
    engine.listen(times)
    engine.profile(times)
    for _ in range(rounds + _WARM_UP):
        engine.round()
    kept = times.samples[_WARM_UP:]
    medians = [statistics.median(column) * 1e6 for column in zip(*kept, strict=True)]
    return RoundCost(temperature, batch, queued, len(kept), *medians)


def measure_noise(rows: int = 16, vocab: int = 8192, repeats: int = 300) -> dict[str, float]:
    """Cost of the noise: sampled draw against greedy draw of the same logits."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 4
    sampled, greedy = [], []
    for i in range(repeats):
        sampled.append(_seconds(logits, [Key(1, i * rows + j) for j in range(rows)]))
        greedy.append(_seconds(logits, None))
    noisy, plain = statistics.median(sampled) * 1e6, statistics.median(greedy) * 1e6
    return {"rows": rows, "vocab": vocab, "sampled_us": noisy, "greedy_us": plain, "noise_us": noisy - plain}


def _seconds(logits: Tensor, keys: list[Key] | None) -> float:
    start = time.perf_counter()
    draw(logits, keys)
    return time.perf_counter() - start


def main(
    model: Model = None,
    load_format: LoadFormat = "safetensors",
    rounds: Annotated[int, typer.Option(min=10, help="Rounds to time.")] = 200,
    batches: Annotated[str, typer.Option(help="Comma-separated numbers of running sequences.")] = "1",
    queued: Annotated[str, typer.Option(help="Comma-separated numbers of requests waiting meanwhile.")] = "0",
    threads: Threads = None,
) -> None:
    """What a plain round costs beside the model's forward and the choice, and what the noise costs."""
    set_threads(threads)
    sizes = [(t, b, q) for q in numbers("--queued", queued, int) for b in numbers("--batches", batches, int) for t in (0.0, 0.8)]
    rows = [measure_round(model, load_format, t, rounds, b, q).as_dict() for t, b, q in sizes]
    print(json.dumps(environment() | {"rounds": rows, "noise": measure_noise()}))


if __name__ == "__main__":
    run(main)
