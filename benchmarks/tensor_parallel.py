"""`python -m benchmarks.tensor_parallel`: the memory of each rank of a model, and speed beside one process.

Weights are random and read from files, which are deleted afterwards. Memory is the peak of a process (VmHWM, mapped files
included) over that of an idle rank: one of a model of 40M parameters, less its share of those. Every rank has one thread, and so
has the one process. On a machine that others use too the ratio of the interleaved runs says more than the seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import close_report, run
from benchmarks.forward import RANDOM_MODELS
from benchmarks.loading import write_checkpoint
from outrider import LLM, SamplingParams
from outrider.options import numbers

__all__ = ["BOUNDS", "bench_tensor_parallel"]

BOUNDS = {2: 0.6, 4: 0.35}  # of the packed weights that each rank may take, beside its share of the KV
_IDLE = "40m"
_CONTEXT = 512
_PROMPT = 200


def bench_tensor_parallel(model: str, dtypes: Sequence[str], ranks: Sequence[int], repeats: int, tokens: int) -> dict[str, Any]:
    """Memory by dtype and number of ranks, and tokens per second of each beside one process."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        large, idle = Path(folder) / model, Path(folder) / "idle"
        for name, directory in ((model, large), (_IDLE, idle)):
            directory.mkdir()
            write_checkpoint(RANDOM_MODELS[name], directory)
        for dtype in dtypes:
            for count in ranks:
                without = _in_a_process(_peaks, str(idle), dtype, count)
                held = _in_a_process(_peaks, str(large), dtype, count)
                speed = _in_a_process(_speed, str(large), dtype, count, repeats, tokens) if repeats else {}
                results.append(_memory(dtype, count, without, held) | speed)
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    conditions = {"threads_of_a_rank": 1, "load_average": os.getloadavg()[0]}
    return conditions | {"model": model, "results": results, "passed": all(result["memory_passed"] for result in results)}


def _memory(dtype: str, count: int, idle: dict[str, Any], held: dict[str, Any]) -> dict[str, Any]:
    """Each rank's memory over an idle one's, in shares of the packed weights of the whole model."""
    idle_bytes = [peak - idle["packed_bytes"] // count - idle["kv_bytes"] for peak in idle["peaks"]]
    over = [peak - before for peak, before in zip(held["peaks"], idle_bytes, strict=True)]
    shares = [(size - held["kv_bytes"]) / held["packed_bytes"] for size in over]
    return {
        "dtype": dtype, "ranks": count, "packed_bytes": held["packed_bytes"], "kv_bytes_of_a_rank": held["kv_bytes"],
        "idle_bytes": idle_bytes, "over_idle_bytes": over, "share_of_packed": [round(share, 3) for share in shares],
        "bound": BOUNDS[count], "memory_passed": max(shares) <= BOUNDS[count],
    }  # fmt: skip


def _in_a_process(work: Any, *arguments: Any) -> Any:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _load(folder: str, dtype: str, ranks: int, batch: int) -> LLM:
    torch.set_num_threads(ranks)
    sizes: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": _CONTEXT, "prefix_cache": False}
    return LLM(folder, speculation="none", dtype=dtype, tensor_parallel_size=ranks, device="cpu", **sizes)


def _peaks(folder: str, dtype: str, ranks: int) -> dict[str, Any]:
    """The peak of every rank after a prompt and some tokens; the packed bytes of all ranks together, and a rank's KV."""
    with _load(folder, dtype, ranks, 1) as llm:
        _generate(llm, 1, 8)
        runner: Any = llm.engine.runner
        pool = runner.pool
        return {
            "peaks": [_peak(process) for process in (os.getpid(), *runner.others.processes)],
            "packed_bytes": runner.weight_bytes * ranks,
            "kv_bytes": pool.keys.nbytes + pool.values.nbytes,
        }


def _speed(folder: str, dtype: str, ranks: int, repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens per second at batch 1 and 8, of one process and of all ranks, in turns."""
    speeds: dict[str, Any] = {}
    with _load(folder, dtype, 1, 8) as alone, _load(folder, dtype, ranks, 8) as shared:
        for batch in (1, 8):
            pairs = [[_generate(llm, batch, tokens) for llm in (alone, shared)] for _ in range(repeats + 1)][1:]
            one, many = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
            speeds[f"batch_{batch}"] = {
                "one_process_tok_s": round(one, 2), "ranks_tok_s": round(many, 2), "ranks_over_one": round(ratio, 3)
            }  # fmt: skip
    return speeds


def _generate(llm: LLM, batch: int, tokens: int) -> float:
    """Tokens per second after the first of each sequence."""
    prompts = [[(7 * i + 31 * b) % 8000 for i in range(_PROMPT // batch)] for b in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    first = time.perf_counter()
    llm.generate(prompts, params, max_tokens=1)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return batch * (tokens - 1) / (time.perf_counter() - began - (began - first))


def _peak(process: int) -> int:
    """The largest resident memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(RANDOM_MODELS)}.")] = "1.1b",
    dtypes: Annotated[str, typer.Option(help="What the weights are served in.")] = "bfloat16,int8",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    repeats: Annotated[int, typer.Option(min=0, help="Runs of each; 0 measures memory alone.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a run.")] = 24,
    out: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
) -> None:
    """Measure models that ranks share."""
    close_report(bench_tensor_parallel(model, dtypes.split(","), numbers("--ranks", ranks, int), repeats, tokens), out)


if __name__ == "__main__":
    run(main)
