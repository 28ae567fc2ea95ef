"""What speculation is worth for some prompts: the record that `LLM.benchmark` returns."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.engine.acceptance import acceptance_totals
from outrider.engine.intake import Prompt
from outrider.engine.outputs import CompletionOutput
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["BenchmarkResult", "benchmark"]


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """All prompts as one batch, with and without speculation; seconds are medians of the repeats."""

    speedup: float  # seconds without over seconds with speculation
    tokens_per_second: float
    acceptance_rate: float | None  # accepted over drafted tokens; None where nothing was drafted
    mean_acceptance_length: float | None  # tokens of a round that drafted, the bonus token included
    tokens_equal: bool | None  # to those without speculation; None where the baseline was a time and nothing was compared
    seconds: float
    baseline_seconds: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def benchmark(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], baseline_time: float | None, repeats: int
) -> BenchmarkResult:
    """Run the prompts `repeats` times each way, interleaved, after one run each to warm up."""
    if not prompts:
        raise InvalidParameter("prompts", "must hold at least one")
    seed = secrets.randbits(63)
    params = [replace(one, seed=seed) if one.seed is None else one for one in params]
    ways = (True,) if baseline_time is not None else (False, True)
    seconds: dict[bool, list[float]] = {way: [] for way in ways}
    ids: dict[bool, list[list[int]]] = {}
    outputs: list[CompletionOutput] = []
    for repeat in range(repeats + 1):
        for way in ways:
            begun = time.perf_counter()
            results = llm.generate(prompts, params, speculation={"enabled": way, "remember": False}, use_tqdm=False)
            if repeat:
                seconds[way].append(time.perf_counter() - begun)
            outputs = [output for result in results for output in result.outputs]
            ids[way] = [output.token_ids for output in outputs]
    fast = statistics.median(seconds[True])
    slow = statistics.median(seconds[False]) if baseline_time is None else baseline_time
    totals, tokens = acceptance_totals(outputs), sum(len(output.token_ids) for output in outputs)
    return BenchmarkResult(
        speedup=slow / fast,
        tokens_per_second=tokens / fast,
        acceptance_rate=totals["acceptance_rate"],
        mean_acceptance_length=totals["mean_acceptance_length"],
        tokens_equal=None if baseline_time is not None else ids[True] == ids[False],
        seconds=fast,
        baseline_seconds=slow,
        tokens=tokens,
    )
