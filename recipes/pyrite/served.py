"""Served acceptance of Pyrite's drafters on every prompt of a file, over many processes of one thread each.

    PYTHONPATH=src:. python -m recipes.pyrite.served humaneval.jsonl --out results/pyrite_acceptance.json --processes 12

The definitions are those of `outrider bench acceptance --check`. Prompts are divided among the processes, and the outputs of
one method at one temperature are joined before anything is counted. A row is written when it is complete, so a run that is
stopped keeps its rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.outputs import CompletionOutput

METHODS = (
    "draft_model:5,eagle:5,eagle:24:beam=6:branch=6:depth=7,medusa:64:dynamic=0,medusa:64,medusa:24:dynamic=0,medusa:24,ngram:8"
)
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Job:
    """One method at one temperature on some of the prompts."""

    method: str
    temperature: float
    prompts: tuple[str, ...]
    max_tokens: int


def main() -> None:
    args = _arguments()
    from outrider.engine.acceptance import read_prompts

    prompts = read_prompts(args.data, args.limit)
    methods, temperatures = args.methods.split(","), [float(text) for text in args.temperatures.split(",")]
    shards = [tuple(prompts[i :: args.shards]) for i in range(args.shards)]
    order = [(method, temperature) for temperature in temperatures for method in (PLAIN, *methods)]
    jobs = [Job(method, temperature, shard, args.max_tokens) for method, temperature in order for shard in shards if shard]
    done: dict[tuple[str, float], dict[str, CompletionOutput]] = {pair: {} for pair in order}
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.processes, _start) as pool:
        for job, outputs in pool.imap_unordered(serve, jobs):
            done[job.method, job.temperature] |= outputs
            for row in _complete(done, prompts, {(row["method"], row["temperature"]) for row in rows}):
                rows.append(row)
                print(f"{row['method']} at {row['temperature']:g}: {row['tokens_per_round']}, equal {row['equal']}", flush=True)
                _write(args, sys.argv[1:], len(prompts), rows)


def serve(job: Job) -> tuple[Job, dict[str, CompletionOutput]]:
    """Generate for every prompt of a job, one at a time."""
    from outrider import LLM, SamplingParams
    from outrider.config import pinned

    llm = LLM(speculation=pinned(job.method), share=False)
    params = SamplingParams(temperature=job.temperature, seed=0, max_tokens=job.max_tokens)
    return job, {prompt: llm.generate([prompt], params)[0].outputs[0] for prompt in job.prompts}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="prompts, as `outrider bench acceptance` reads them")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--limit", type=int, default=None, help="only the first prompts")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--shards", type=int, default=6, help="parts the prompts are cut into")
    return parser.parse_args()


def _start() -> None:
    """Before a worker's first job: one thread, no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)


def _complete(
    done: dict[tuple[str, float], dict[str, CompletionOutput]], prompts: list[str], known: set[tuple[str, float]]
) -> list[dict[str, Any]]:
    """New rows: all outputs and all plain outputs exist, and the row is not in `known`."""
    from outrider.engine.acceptance import summarise

    rows = []
    for (method, temperature), outputs in done.items():
        plain = done[PLAIN, temperature]
        if method == PLAIN or (method, temperature) in known or min(len(outputs), len(plain)) < len(set(prompts)):
            continue
        figures = summarise([outputs[prompt] for prompt in prompts], temperature).as_dict()
        del figures["tok_s"]  # other processes ran at the same time
        equal = sum(outputs[prompt].token_ids == plain[prompt].token_ids for prompt in prompts) / len(prompts)
        rows.append({"method": method} | figures | {"equal": equal})
    return rows


def _write(args: argparse.Namespace, command: list[str], prompts: int, rows: list[dict[str, Any]]) -> None:
    import torch

    data = {
        "what": f"served tokens per round of Pyrite's drafters: {prompts} prompts, {args.max_tokens} new tokens, batch 1, "
        "seed 0, counted on outputs in which no 8-gram occurs more than three times; equal: share of outputs whose token ids "
        "are those of plain decoding",
        "device": f"CPU, {args.processes} processes of one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python -m recipes.pyrite.served", *command]),
        "rows": sorted(rows, key=lambda row: (row["temperature"], row["method"])),
    }
    part = args.out.with_name(args.out.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(args.out)


if __name__ == "__main__":
    main()
