"""Decoding without the native core against Transformers: one row, the same weights, the same process, in turns.

    python -m benchmarks.torch_path [--models pyrite 150m] [--dtypes bfloat16 float32] [--tokens 24] [--turns 5]
        [--threads 1] [--out results/torch_path.json]

Both sides hold weights of the same dtype and take the same number of threads. A turn times a short and a long generation of
each side; what the additional tokens took is the time of decoding, without prompt and start. Times are of the processor, so
that other processes disturb them little; ratios are of the medians over all turns. ONEDNN_MAX_CPU_ISA=AVX512_CORE shows a
processor that emulates bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OUTRIDER_OPS"] = "torch"

import torch
import transformers

import outrider
from benchmarks.baselines.weights import export_model
from outrider import LLM, SamplingParams
from outrider.platform import cpu_name

PROMPT = list(range(20, 84))
SHORT = 4  # tokens whose time is taken off

Generate = Callable[[int], None]


def by_transformers(folder: Path, dtype: str) -> Generate:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])

    def generate(tokens: int) -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    return generate


def by_outrider(folder: Path, dtype: str) -> Generate:
    llm = LLM(folder, dtype=dtype, speculation="none", max_num_seqs=1, max_model_len=1024, prefix_cache=False)
    assert llm.engine.runner.stack is None, "the native core serves"
    return lambda tokens: void(llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)))


def void(_: object) -> None: ...


def seconds_per_token(generate: Generate, tokens: int) -> float:
    """Of decoding alone."""
    took = []
    for count in (SHORT, SHORT + tokens):
        start = time.process_time()
        generate(count)
        took.append(time.process_time() - start)
    return (took[1] - took[0]) / tokens


def compare(name: str, dtype: str, tokens: int, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = export_model(name, Path(folder))
        sides = {"transformers": by_transformers(model, dtype), "outrider": by_outrider(model, dtype)}
        seen: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(turns + 1):
            for side, generate in sides.items():
                took = seconds_per_token(generate, tokens)
                if turn:  # the first one warms up
                    seen[side].append(took)
    ms = {f"{side}_ms_per_token": round(1e3 * median(took), 3) for side, took in seen.items()}
    ratio = median(seen["transformers"]) / median(seen["outrider"])
    return {"model": name, "dtype": dtype, **ms, "speed_against_transformers": round(ratio, 3), "turns": turns, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["pyrite", "150m"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [compare(name, dtype, options.tokens, options.turns) for name in options.models for dtype in options.dtypes]
    result = {
        "command": " ".join(["python -m benchmarks.torch_path", *sys.argv[1:]]),
        "device": cpu_name(),
        "threads": options.threads,
        "onednn_max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        "versions": {"outrider": outrider.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "clock": "processor time of the process",
        "results": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
