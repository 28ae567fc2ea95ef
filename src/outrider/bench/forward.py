"""What a forward costs by the number of its rows, against the time its bytes need at the bandwidth of the same run."""

from __future__ import annotations

import importlib.metadata
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider._version import __version__
from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model import Feed, LoadOptions, ModelConfig, Rope, Runner, load_decoder, write_config
from outrider.model.bundled import bundled_model
from outrider.ops import Core, find_core, threads_used
from outrider.platform import cpu_name

__all__ = ["RANDOM_MODELS", "bench_forward"]

_PAGE = 64
_LLAMA = {"architecture": "LlamaForCausalLM", "context": 2048, "rope": Rope(), "tied": True, "dtype": "bfloat16", "head_dim": 64}
RANDOM_MODELS: dict[str, ModelConfig] = {
    "40m": ModelConfig(vocab=8192, hidden=512, layers=12, heads=8, kv_heads=4, ffn=1408, **_LLAMA),  # type: ignore[arg-type]
    "150m": ModelConfig(vocab=8192, hidden=768, layers=24, heads=12, kv_heads=4, ffn=2048, **_LLAMA),  # type: ignore[arg-type]
    "1.1b": ModelConfig(vocab=32000, hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632, **_LLAMA),  # type: ignore[arg-type]
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: row counts after a context, interleaved, this often."""

    rows: Sequence[int] = (1, 2, 4, 8, 16, 32)
    context: int = 256
    repeats: int = 40


def bench_forward(models: Sequence[str], dtypes: Sequence[str], setting: Setting) -> dict[str, Any]:
    """One record per model and dtype, with the machine and the conditions."""
    core, found = find_core()
    return {
        "device": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"outrider": __version__, "torch": importlib.metadata.version("torch")},
        "core": found,
        "threads": threads_used(),
        "context": setting.context,
        "repeats": setting.repeats,
        "results": [_measure(core, model, dtype, setting) for dtype in dtypes for model in models],
    }


def _measure(core: Core | None, model: str, dtype: str, setting: Setting) -> dict[str, Any]:
    runner = _runner(model, dtype, setting)
    times, reads = _times(core, runner, setting)
    floor = statistics.median(reads) * 1e3
    ms = {rows: statistics.median(own) * 1e3 for rows, own in times.items()}
    best = {rows: sorted(own)[len(own) // 10] * 1e3 for rows, own in times.items()}
    first = min(ms)
    return {
        "model": model,
        "dtype": dtype,
        "megabytes": round(runner.weight_bytes / 1e6, 2),
        "bandwidth_gb_s": round(runner.weight_bytes / floor / 1e6, 2) if floor else None,
        "bytes_ms": round(floor, 4),
        "ms": {rows: round(value, 4) for rows, value in ms.items()},
        "ms_p10": {rows: round(value, 4) for rows, value in best.items()},
        "ratio_to_one_row": {rows: round(value / ms[first], 3) for rows, value in ms.items()},
        "one_row_over_bytes": round(ms[first] / floor, 3) if floor else None,
    }


def _times(core: Core | None, runner: Runner, setting: Setting) -> tuple[dict[int, list[float]], list[float]]:
    """Seconds of forwards with their logits by row count, and of reading as many bytes; all interleaved."""
    vocab, pages = runner.decoder.config.vocab, list(range(runner.pool.pages - 1))
    tokens = [i * 7919 % vocab for i in range(setting.context + max(setting.rows))]
    runner.forward([Feed(pages, 0, tokens[: setting.context])])
    times: dict[int, list[float]] = {rows: [] for rows in setting.rows}
    reads: list[float] = []
    memory = torch.ones(max(runner.weight_bytes // 4, 1))
    order, shuffle = list(setting.rows), random.Random(0)
    for _ in range(setting.repeats):
        shuffle.shuffle(order)
        for rows in order:
            feed = [Feed(pages, setting.context, tokens[:rows])]
            start = time.perf_counter()
            runner.logits(runner.forward(feed).last, range(rows))
            times[rows].append(time.perf_counter() - start)
        if core is not None:
            for _again in range(2):  # the first brings the buffer where the weights were
                start = time.perf_counter()
                core.read(memory.data_ptr(), memory.numel() * 4, threads_used())
                spent = time.perf_counter() - start
            reads.append(spent)
    return times, reads or [0.0]


def _runner(model: str, dtype: str, setting: Setting) -> Runner:
    pages = -(-(setting.context + max(setting.rows)) // _PAGE) + 1
    options = LoadOptions(dtype)
    with tempfile.TemporaryDirectory() as folder:
        if model in RANDOM_MODELS:
            write_config(RANDOM_MODELS[model], Path(folder))
            decoder = load_decoder(Path(folder), LoadOptions(dtype, "dummy"))
        elif model in ("pyrite", "draft"):
            decoder = load_decoder(bundled_model() if model == "pyrite" else bundled_model() / "draft", options)
        elif Path(model).is_dir():
            decoder = load_decoder(Path(model), options)
        else:
            known = ", ".join(("pyrite", "draft", *RANDOM_MODELS))
            raise InvalidParameter("--models", f"unknown {model!r}; a directory, or one of: {known}")
    c = decoder.config
    return Runner(decoder, KVPool(c.layers, pages, c.kv_heads, _PAGE, c.head_dim))
