"""What a round costs beside the model's forward and the choice."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from outrider.core import Request, Scores
from outrider.engine.llm import LLM
from outrider.model import Feed, Hidden, Rows, Runner
from outrider.sampling import Key, SamplingParams, choose, draw
from outrider.verify import verify

__all__ = ["RoundCost", "measure_noise", "measure_round"]

_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Medians in microseconds, per plain round."""

    temperature: float
    batch: int
    queued: int  # requests waiting meanwhile
    rounds: int
    total_us: float
    forward_us: float  # the decoder and its output matrix
    choice_us: float
    outside_us: float  # everything else: scheduling, laying out rows, proposing, verification, commit
    layout_us: float  # of that, laying out the rows and planning their attention
    bookkeeping_us: float  # of that, scheduling, planning, committing and counting: what is left without scoring and verifying

    def as_dict(self) -> dict[str, Any]:
        own = {f"{part}_us_per_sequence": getattr(self, f"{part}_us") / self.batch for part in ("outside", "bookkeeping")}
        return asdict(self) | own


class _Stopwatch:
    """Time spent inside wrapped calls since it was last read."""

    def __init__(self) -> None:
        self.spent = 0.0

    def around(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **named)
        self.spent += time.perf_counter() - start
        return result

    def read_us(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent * 1e6


class _TimedRunner(Runner):
    """A runner that counts the time spent in the model itself."""

    watch: _Stopwatch
    layout: _Stopwatch
    checking: _Stopwatch

    def score(self, *given: Any) -> Scores:
        return self.checking.around(super().score, *given)  # type: ignore[no-any-return]

    def prepare(self, feeds: Sequence[Feed]) -> Rows | array[int]:
        return self.layout.around(super().prepare, feeds)  # type: ignore[no-any-return]

    def run(self, *given: Any, **named: Any) -> Hidden:
        return self.watch.around(super().run, *given, **named)  # type: ignore[no-any-return]

    def logits(self, last: Tensor, rows: Sequence[int]) -> Tensor:
        return self.watch.around(super().logits, last, rows)  # type: ignore[no-any-return]


def measure_round(
    model: str | Path | None, load_format: str, temperature: float, rounds: int = 200, batch: int = 1, queued: int = 0
) -> RoundCost:
    """Time plain rounds, and what of each is model and choice."""
    llm = LLM(model, load_format=load_format, max_num_seqs=batch)
    runner = _TimedRunner(llm.engine.runner.decoder, llm.engine.runner.pool, llm.engine.runner.ops)
    runner.watch, runner.layout, runner.checking, choosing = (_Stopwatch() for _ in range(4))
    llm.engine.runner = runner
    prompt = [i * 7919 % llm.config.vocab for i in range(64)]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=rounds + _WARM_UP, ignore_eos=True)
    samples: list[tuple[float, ...]] = []
    timed: dict[str, Any] = {own.__name__: partial(choosing.around, own) for own in (choose, draw)}
    checked = partial(runner.checking.around, verify)
    with mock.patch.multiple("outrider.verify.batch", **timed), mock.patch("outrider.engine.engine.verify", checked):
        for i in range(batch + queued):
            own = (*prompt, i % llm.config.vocab)
            llm.engine.submit(Request(f"bench-{i}", own, params, i, frozenset(), rounds + _WARM_UP), "none")
        for _ in range(rounds + _WARM_UP):
            start = time.perf_counter()
            llm.engine.round()
            total = (time.perf_counter() - start) * 1e6
            forward, choice, checking = (own.read_us() for own in (runner.watch, choosing, runner.checking))
            samples.append((total, forward, choice, total - forward - choice, runner.layout.read_us(), total - checking))
    kept = samples[_WARM_UP:]
    return RoundCost(temperature, batch, queued, len(kept), *map(statistics.median, zip(*kept, strict=True)))


def measure_noise(rows: int = 16, vocab: int = 8192, repeats: int = 300) -> dict[str, float]:
    """Cost of the noise: sampled draw against greedy draw of the same logits."""
    law = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 4
    watch, sampled, greedy = _Stopwatch(), [], []
    for i in range(repeats):
        watch.around(draw, law, [Key(1, i * rows + j) for j in range(rows)])
        sampled.append(watch.read_us())
        watch.around(draw, law, None)
        greedy.append(watch.read_us())
    noisy, plain = statistics.median(sampled), statistics.median(greedy)
    return {"rows": rows, "vocab": vocab, "sampled_us": noisy, "greedy_us": plain, "noise_us": noisy - plain}
