"""`python -m benchmarks.batching`: the same requests at once and one after another."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from benchmarks.command import run
from outrider.bench.environment import environment
from outrider.bench.workloads import find_prompts
from outrider.engine.acceptance import read_prompts
from outrider.engine.llm import LLM
from outrider.options import Model, Threads, set_threads
from outrider.sampling import SamplingParams

__all__ = ["batching"]


def batching(model: str | None, batch: int, tokens: int, repeats: int, method: str = "none") -> dict[str, Any]:
    """Median seconds of both, interleaved."""
    llm = LLM(model, speculation=method, max_num_seqs=batch, share=False)
    code = read_prompts(find_prompts("code"))
    prompts = [code[i % len(code)] for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    together: list[float] = []
    one_by_one: list[float] = []
    for repeat in range(repeats + 1):
        took = _timed(llm, [prompts], params), _timed(llm, [[prompt] for prompt in prompts], params)
        if repeat:
            together.append(took[0])
            one_by_one.append(took[1])
    both = statistics.median(together), statistics.median(one_by_one)
    return {
        "method": method,
        "batch": batch,
        "tokens": tokens,
        "together_s": both[0],
        "apart_s": both[1],
        "share": both[0] / both[1],
    }


def _timed(llm: LLM, groups: Sequence[Sequence[str]], params: SamplingParams) -> float:
    begun = time.perf_counter()
    for prompts in groups:
        llm.generate(prompts, params)
    return time.perf_counter() - begun


def main(
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times both ways run, interleaved; medians are shown.")] = 5,
    threads: Threads = None,
) -> None:
    """The same requests at once and one after another: what continuous batching brings, plainly and with `auto`."""
    set_threads(threads)
    print(json.dumps(environment() | {"rows": [batching(model, batch, tokens, repeats, method) for method in ("none", "auto")]}))


if __name__ == "__main__":
    run(main)
