"""Everything that is measured on a GPU, in parts: synthetic 8B and 1B shapes, the bundled model, Transformers beside them."""

from __future__ import annotations

import gc
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_choice import measure_choice
from benchmarks.gpu_rounds import measure_beside, measure_memory, measure_start, measure_steady
from benchmarks.synthetic import (
    Synthetic,
    measure_batches,
    measure_contexts,
    measure_engine,
    measure_shapes,
    measure_transformers,
)
from outrider.bench.environment import environment
from outrider.bench.workloads import find_prompts
from outrider.engine.acceptance import loops, read_prompts
from outrider.engine.llm import LLM
from outrider.sampling import SamplingParams

__all__ = ["gpu_environment", "measure_everything"]

_AGREEMENT = 0.8
_TOKENS, _PROMPT = 256, 128
Part = Callable[[], Iterator[dict[str, Any]]]


def gpu_environment(root: Path | None = None) -> dict[str, Any]:
    """The device, versions, command and commit."""
    import triton

    about = environment()
    about["device"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; {about['device']}"
    about["versions"] |= {"triton": triton.__version__}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return about | {"commit": commit.stdout.strip() or "unknown"}


def measure_everything(transformers: bool = True) -> Iterator[tuple[str, Part]]:
    """Names and parts, in order."""
    bench = Synthetic(_AGREEMENT)
    perm, prompt = bench.perm, bench.prompt(_PROMPT)
    yield "synthetic 8B, batch 1", lambda: measure_engine(bench, (2, 3, 4, 5), _TOKENS, _PROMPT)
    yield "other shapes, batch 1", lambda: measure_shapes(("qwen3-8b", "gemma-2-9b"), _TOKENS, _PROMPT)
    yield "exact and fast numerics", lambda: _numerics(bench)
    yield "bundled model", measure_bundled
    yield "choice", measure_choice
    yield "synthetic 8B, batches", lambda: measure_batches(bench, (1, 2, 4, 8, 16, 32, 64, 128, 256), 96)
    _free()
    yield "steady decoding by batch", measure_steady
    yield "prompts beside decoding", measure_beside
    yield "256 sequences with a limit of 64k", measure_memory
    yield "start-up", measure_start
    _free()
    yield "contexts, batch 1", measure_contexts
    _free()
    if transformers:
        yield "transformers", lambda: measure_transformers(perm, _AGREEMENT, _TOKENS, prompt)


def _numerics(bench: Synthetic) -> Iterator[dict[str, Any]]:
    """Prefill and single forwards, exact against `--numerics fast`."""
    exact = {n: bench.prefill_seconds(n) for n in (512, 2048)}
    forwards = {b: bench.forward_seconds(b, 300, b) for b in (1, 32)}
    fast = Synthetic(_AGREEMENT, exact=False, pages=400)
    for n, seconds in exact.items():
        other = fast.prefill_seconds(n)
        yield {"what": f"prefill of {n}", "exact_ms": seconds * 1e3, "fast_ms": other * 1e3, "speed_of_fast": other / seconds}
    for b, seconds in forwards.items():
        other = fast.forward_seconds(b, 300, b)
        yield {"what": f"forward at batch {b}", "exact_ms": seconds * 1e3, "fast_ms": other * 1e3, "cost": seconds / other - 1}


def measure_bundled(
    methods: tuple[str, ...] = ("draft_model:3", "draft_model:4", "suffix:12", "eagle:4", "auto"),
) -> Iterator[dict[str, Any]]:
    """Pyrite at batch 1, both with graphs: tokens per second over plain decoding, by prompt; loops are counted apart."""
    prompts = read_prompts(find_prompts("code"), 24)
    settings = [SamplingParams(temperature=t, seed=3, max_tokens=128, ignore_eos=True) for t in (0.0, 0.8)]
    plain = LLM(speculation="none", device="cuda", max_num_seqs=1, prefix_cache=False)
    for method in methods:
        llm = LLM(device="cuda", speculation=method, max_num_seqs=1, prefix_cache=False, share=False)
        for params in settings:
            base, fast = _speeds((plain, llm), prompts, params)
            ratios = [a[0] / b[0] for a, b in zip(fast, base, strict=True)]
            calm = [ratio for ratio, (_, tokens) in zip(ratios, base, strict=True) if not loops(tokens)]
            yield {
                "what": f"{method} at {params.temperature:g}", "plain_tok_s": statistics.median(run[0] for run in base),
                "speedup": statistics.median(ratios), "speedup_without_loops": statistics.median(calm) if calm else None,
                "prompts": len(ratios), "without_loops": len(calm),
                "equal": all(a[1] == b[1] for a, b in zip(fast, base, strict=True)),
            }  # fmt: skip


def _speeds(llms: tuple[LLM, LLM], prompts: list[str], params: SamplingParams) -> list[list[tuple[float, list[int]]]]:
    """Of each model, decode speed and tokens of each prompt, after one that warms up; the better of two runs, in turn."""
    for llm in llms:
        llm.generate(prompts[0], params)
    gc.collect()
    gc.freeze()  # a collection of all that torch and Triton keep takes longer than many rounds
    speeds: list[list[tuple[float, list[int]]]] = [[] for _ in llms]
    for prompt in prompts:
        runs = [[llm.generate(prompt, params)[0].outputs[0] for llm in llms] for _ in range(2)]
        for results, outputs in zip(speeds, zip(*runs, strict=True), strict=True):
            results.append((max(output.timings.decode_tokens_per_s for output in outputs), outputs[0].token_ids))
    gc.unfreeze()
    return speeds


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
