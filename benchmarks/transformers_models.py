"""`speed_up` against Transformers' own loop: Pyrite's architecture by its Transformers class, without the native backend.

    python -m benchmarks.transformers_models [--dtypes float32] [--prompts 16] [--batch 4] [--tokens 64] [--turns 5] [--threads 1]
        [--out results/transformers_models.json]

Two measurements, both greedy, the sides in turns in one process. `loop`: milliseconds a token of plain decoding at batch 1, and
of the class's own forward with its cache alone; the difference is what the loop costs. `editing`: the bundled editing prompts in
batches, by `model.generate` and by `speed_up(model).generate` with prompt lookup; the time of whole calls, and whether the tokens
are equal. On one thread times are of the processor, so that other processes disturb them little. Ratios are medians over turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

import outrider
from benchmarks.baselines.weights import export_model
from outrider.bench.workloads import load_prompts
from outrider.engine.speed_up import SpedUpModel
from outrider.platform import cpu_name

PROMPT = list(range(20, 84))
LOOP_TOKENS = 32
LOOKUP = {"method": "ngram", "draft_tokens": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    result = {
        "command": " ".join(["python -m benchmarks.transformers_models", *sys.argv[1:]]),
        "device": cpu_name(),
        "threads": options.threads,
        "versions": {"outrider": outrider.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "clock": "processor time of the process" if options.threads == 1 else "wall time",
        "results": [measure(dtype, options) for dtype in options.dtypes],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = export_model("pyrite", Path(name))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    model.generation_config.eos_token_id = None
    with outrider.speed_up(model, tokenizer, LOOKUP, native=False, max_num_seqs=options.batch, prefix_cache=False) as fast:
        return {
            "model": "pyrite",
            "dtype": dtype,
            "guarantee": fast.guarantee.as_dict(),
            "turns": options.turns,
            "loop": compare_loop(model, fast, clock, options.turns),
            "editing": compare_editing(model, fast, editing_batches(tokenizer, options), clock, options),
        }


def compare_loop(model: Any, fast: SpedUpModel, clock: Callable[[], float], turns: int) -> dict[str, float]:
    """Milliseconds a token: the class's forward alone, and our plain decoding."""
    sides = {"forward": lambda: own_forwards(model, clock), "outrider": lambda: plain_tokens(fast, clock)}
    took = in_turns(sides, turns)
    ms = {f"{side}_ms_per_token": round(1e3 * median(seconds) / LOOP_TOKENS, 3) for side, seconds in took.items()}
    extra = [1e3 * (ours - theirs) / LOOP_TOKENS for theirs, ours in zip(took["forward"], took["outrider"], strict=True)]
    return {**ms, "loop_ms_per_token": round(median(extra), 3)}


@torch.inference_mode()
def own_forwards(model: Any, clock: Callable[[], float]) -> float:
    out = model(torch.tensor([PROMPT]), use_cache=True)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    begun = clock()
    for _ in range(LOOP_TOKENS):
        out = model(token, use_cache=True, past_key_values=out.past_key_values, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return clock() - begun


def plain_tokens(fast: SpedUpModel, clock: Callable[[], float]) -> float:
    """Of the tokens after the first: a stream whose first piece starts the clock."""
    pieces = fast.stream(PROMPT, speculation=False, temperature=0.0, max_tokens=LOOP_TOKENS + 1, ignore_eos=True)
    next(pieces)
    begun = clock()
    for _ in pieces:
        pass
    return clock() - begun


def editing_batches(tokenizer: Any, options: argparse.Namespace) -> list[Any]:
    texts = [text for prompts in load_prompts("editing").categories.values() for text in prompts][: options.prompts]
    cuts = range(0, len(texts), options.batch)
    return [tokenizer(texts[i : i + options.batch], return_tensors="pt", padding=True) for i in cuts]


def compare_editing(
    model: Any, fast: SpedUpModel, batches: list[Any], clock: Callable[[], float], options: argparse.Namespace
) -> dict[str, Any]:
    """Whole calls of both sides, and whether their tokens are equal."""
    written: dict[str, list[Tensor]] = {}

    def run(side: str, generate: Callable[..., Tensor]) -> float:
        begun = clock()
        written[side] = [generate(**batch, max_new_tokens=options.tokens, do_sample=False, pad_token_id=0) for batch in batches]
        return clock() - begun

    sides = {"transformers": lambda: run("transformers", model.generate), "outrider": lambda: run("outrider", fast.generate)}
    took = in_turns(sides, options.turns)
    ratios = [theirs / ours for theirs, ours in zip(took["transformers"], took["outrider"], strict=True)]
    pairs = [(a, b) for ours, theirs in zip(*written.values(), strict=True) for a, b in zip(ours, theirs, strict=True)]
    tokens = len(pairs) * options.tokens
    return {
        "batch": options.batch,
        "prompts": len(pairs),
        "tokens": options.tokens,
        **{f"{side}_tokens_per_s": round(tokens / median(seconds), 1) for side, seconds in took.items()},
        "speedup": round(median(ratios), 3),
        "equal_texts": sum(torch.equal(a, b) for a, b in pairs) / len(pairs),
    }


def in_turns(sides: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of each side by turn; a first turn warms up."""
    took: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns + 1):
        for side, run in sides.items():
            seconds = run()
            if turn:
                took[side].append(seconds)
    return took


if __name__ == "__main__":
    main()
