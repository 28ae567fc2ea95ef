"""`python -m benchmarks.gpu_rounds PART...`: rounds of many sequences on a GPU, with the synthetic 8B shape.

steady: plain decoding while all sequences run, by batch. beside: the time between tokens of running sequences while long prompts
are read. start: seconds until an engine for 256 sequences is ready, with a warm and with an empty kernel cache; memory: 256
sequences with a limit of 64k start and finish. auto: over plain decoding, by batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.synthetic import Synthetic, measure_batches
from outrider.config import EngineConfig
from outrider.core import Request, RoundReport
from outrider.engine.device import Device, share_memory
from outrider.engine.engine import Engine
from outrider.quantiles import quantile
from outrider.sampling import SamplingParams

__all__ = ["measure_beside", "measure_memory", "measure_start", "measure_steady"]

_STEADY = ((1, 256), (8, 256), (32, 256), (64, 256), (128, 256), (256, 256), (64, 2048))  # sequences and context
_PAGE = 64
_CONTEXT = 20_480  # of the model where prompts of 16k are read


class _Tokens:
    """When every round brought its tokens, and who got some."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, list[str]]] = []

    def observe(self, report: RoundReport) -> None:
        got = [seq.request.id for seq, part in zip(report.batch.sequences, report.sequences, strict=True) if part.kept]
        self.rounds.append((report.tokens_at, got))


def measure_steady(
    bench: Synthetic | None = None, cases: Sequence[tuple[int, int]] = _STEADY, rounds: int = 60
) -> Iterator[dict[str, Any]]:
    """Tokens per second while all sequences decode, and the milliseconds of a round."""
    bench = bench or Synthetic(pages=4000)
    for batch, context in cases:
        gc.collect()
        gc.freeze()  # a collection of all that torch and Triton keep takes longer than many rounds
        engine, tokens = bench.engine(), _Tokens()
        _submit(engine, [bench.scattered(context, 5 + i) for i in range(batch)], 3 * rounds)
        engine.listen(tokens)
        while engine.has_work:
            engine.round()
            full = [at for at, got in tokens.rounds if len(got) == batch]
            if len(full) > 20 + rounds:
                break
        seconds = (full[-1] - full[20]) / (len(full) - 21)
        alone = bench.forward_seconds(batch, context, batch) if batch * (context // _PAGE + 2) < 4000 and context < 512 else None
        yield {"batch": batch, "context": context, "tok_s": batch / seconds, "round_ms": seconds * 1e3,
               "replay_ms": alone and alone * 1e3}  # fmt: skip
        _drain(engine)


def measure_beside(
    bench: Synthetic | None = None,
    running: int = 32,
    prompt: int = 16_384,
    row_budgets: Sequence[int] = (512, 384, 320, 256),
    prompts: int = 2,
) -> Iterator[dict[str, Any]]:
    """Milliseconds between the tokens of running sequences while prompts are read beside them, by the rows a round may read."""
    bench = bench or Synthetic(pages=4000, context=_CONTEXT)
    for rows in row_budgets:
        engine, tokens = bench.engine(max_batch_rows=rows), _Tokens()
        short = [bench.scattered(256, 5 + i) for i in range(running)]
        _submit(engine, short, 4000)
        while any(processor.seq.output_len < 8 for processor in engine._processors.values()):
            engine.round()
        engine.listen(tokens)
        readers = _submit(engine, [bench.scattered(prompt, 900 + i) for i in range(prompts)], 4, "long")
        began = time.perf_counter()
        while any(reader.seq.finish_reason is None for reader in readers):
            engine.round()
        seconds = time.perf_counter() - began
        times: dict[str, list[float]] = {}
        for at, got in tokens.rounds:
            for name in got:
                times.setdefault(name, []).append(at)
        gaps = sorted(b - a for name, ats in times.items() if name.startswith("r") for a, b in pairwise(ats))
        p50, p99 = quantile(gaps, 0.5), quantile(gaps, 0.99)
        yield {"row_budget": rows, "running": running, "prompt": prompt, "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3,
               "max_ms": gaps[-1] * 1e3, "prompt_tok_s": prompts * prompt / seconds}  # fmt: skip
        _drain(engine)


def measure_start(modes: Sequence[str] = ("cold", "warm")) -> Iterator[dict[str, Any]]:
    """Seconds from the weights on the device to an engine for 256 sequences, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            command = [sys.executable, "-m", "benchmarks.gpu_rounds", "ready"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            yield {"kernel_cache": mode} | (json.loads(lines[0]) if lines else {"error": done.stderr[-800:]})


def measure_auto() -> Iterator[dict[str, Any]]:
    """`auto` with a draft model of agreement 0.8 against plain decoding, by batch."""
    return measure_batches(Synthetic(0.8, pages=2400), (1, 8, 32, 64, 128, 256), 96, pairs=3)


def _ready() -> Iterator[dict[str, Any]]:
    bench = Synthetic(pages=4000)
    torch.cuda.synchronize()
    began = time.perf_counter()
    sizes = EngineConfig(page_size=_PAGE, max_num_seqs=256)
    Device("cuda").warm_up(bench.target, [], (), sizes, 0)
    engine = bench.engine()
    _submit(engine, [bench.scattered(64, 5)], 4)
    _drain(engine)
    ready = time.perf_counter() - began
    captured = len(bench.target.capture_seconds)
    while bench.target.capture_next():
        pass
    yield {"ready_s": ready, "captured": captured, "all_s": time.perf_counter() - began,
           "all": len(bench.target.capture_seconds)}  # fmt: skip


def measure_memory(limit: int = 65_536, batch: int = 256) -> Iterator[dict[str, Any]]:
    """As many pages as there is room for beside the 8B shape, a limit of 64k, and 256 sequences that start and finish."""
    from benchmarks.synthetic import SHAPES

    free, total = torch.cuda.mem_get_info()
    share = share_memory([SHAPES["8b"]], int(0.9 * total) - (total - free), _PAGE, limit)
    bench = Synthetic(pages=share.pages, context=limit)
    began = time.perf_counter()
    Device("cuda").warm_up(bench.target, [], (), EngineConfig(page_size=_PAGE, max_num_seqs=batch, max_model_len=limit), 0)
    engine = bench.engine()
    processors = _submit(engine, [bench.scattered(200 + i, 5 + i) for i in range(batch)], 96)
    _drain(engine)
    left, _ = torch.cuda.mem_get_info()
    yield {"pages": share.pages, "full_length_sequences": share.pages // (limit // _PAGE), "batch": batch, "limit": limit,
           "finished": sum(p.seq.finish_reason == "length" for p in processors), "seconds": time.perf_counter() - began,
           "free_gib": left / 2**30}  # fmt: skip


def _submit(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, name: str = "r") -> list[Any]:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=tokens, ignore_eos=True)
    requests = [Request(f"{name}{i}", tuple(prompt), params, i, frozenset(), tokens) for i, prompt in enumerate(prompts)]
    return [engine.submit(request, "bench") for request in requests]


def _drain(engine: Engine) -> None:
    """End what still runs: by itself where it is nearly over, else at once."""
    while engine.has_work and all(p.seq.max_length - len(p.seq.tokens) < 200 for p in engine._processors.values()):
        engine.round()
    for processor in list(engine._processors.values()):
        engine.abort(processor)


def measure_final() -> Iterator[dict[str, Any]]:
    """The figures that matter most, in one process."""
    bench = Synthetic(pages=4000, context=_CONTEXT)
    torch.cuda.synchronize()
    began = time.perf_counter()
    Device("cuda").warm_up(bench.target, [], (), EngineConfig(page_size=_PAGE, max_num_seqs=256), 0)
    yield {"ready_s": time.perf_counter() - began, "captured": len(bench.target.capture_seconds)}
    yield from measure_steady(bench, ((256, 256), (128, 256), (64, 2048), (64, 256), (1, 256)), rounds=40)
    yield from measure_beside(bench, row_budgets=(320, 512), prompts=1)


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "steady": measure_steady,
    "beside": measure_beside,
    "start": measure_start,
    "ready": _ready,
    "memory": measure_memory,
    "auto": measure_auto,
    "final": measure_final,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS], default=["steady"])
    for name in parser.parse_args().parts:
        began = time.perf_counter()
        try:
            for row in PARTS[name]():
                print(json.dumps({"part": name} | row), flush=True)
        except Exception:
            print(json.dumps({"part": name, "error": traceback.format_exc()[-1500:]}), flush=True)
        print(json.dumps({"part": name, "seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
