"""What a forward costs by the number of its rows, against what the processor needs in the same run to read the weights
and to multiply them with so many rows: the larger of the two is a floor for products alone.

On a machine that others use too, a time says little when the scheduler took a core away meanwhile. Such samples are
told by the process's context switches and left out, as long as enough others are left.
"""

from __future__ import annotations

import mmap
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.conditions import conditions
from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model import Feed, LoadOptions, ModelConfig, Rope, Runner, load_decoder, write_config
from outrider.model.bundled import bundled_model
from outrider.ops import Core, Native, find_core

__all__ = ["RANDOM_MODELS", "bench_forward"]

_PAGE = 64
_ENOUGH = 5  # undisturbed samples
_STEPS = 100_000  # of the instruction whose speed is measured: half a millisecond
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


class _Watch:
    """Times of one kind of call."""

    def __init__(self) -> None:
        self._all: list[float] = []
        self._undisturbed: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        before, start = _switches(), time.perf_counter()
        call()
        took = time.perf_counter() - start
        self._all.append(took)
        if _switches() == before:
            self._undisturbed.append(took)

    @property
    def undisturbed(self) -> int:
        return len(self._undisturbed)

    @property
    def ms(self) -> float:
        """The median, of undisturbed calls where there are a few."""
        return statistics.median(self._undisturbed if self.undisturbed >= _ENOUGH else self._all) * 1e3


def bench_forward(models: Sequence[str], dtypes: Sequence[str], setting: Setting) -> dict[str, Any]:
    """One record per model and dtype, with the machine and the conditions."""
    where = conditions()  # before the threads change hands
    core, found = find_core(steady=True)
    if core is not None:
        core.take_threads()
    measured = [_measure(core, model, dtype, setting) for dtype in dtypes for model in models]
    shared = {"core": found, "context": setting.context, "repeats": setting.repeats}
    return where | shared | {"results": measured}


def _measure(core: Core | None, model: str, dtype: str, setting: Setting) -> dict[str, Any]:
    runner = _runner(core, model, dtype, setting)
    rows, reading, adding = _watches(core, runner, setting)
    ms, first = {count: watch.ms for count, watch in rows.items()}, min(rows)
    record: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "megabytes": round(runner.weight_bytes / 1e6, 2),
        "ms": {count: round(value, 4) for count, value in ms.items()},
        "undisturbed": {count: watch.undisturbed for count, watch in rows.items()},
        "ratio_to_one_row": {count: round(value / ms[first], 3) for count, value in ms.items()},
    }
    return record if core is None else record | _floors(core, runner, ms, reading, adding)


def _floors(core: Core, runner: Runner, ms: dict[int, float], reading: _Watch, adding: _Watch) -> dict[str, Any]:
    """What the same processor needs in the same minutes to read the weights and to multiply them."""
    c = runner.decoder.config
    a_layer = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads) + 3 * c.hidden * c.ffn
    done = core.multiply_add(c.dtype, _STEPS)
    arithmetic = adding.ms * (c.layers * a_layer + c.vocab * c.hidden) / done if done else 0.0
    floor = {count: max(reading.ms, count * arithmetic) for count in ms}
    return {
        "bandwidth_gb_s": round(runner.weight_bytes / reading.ms / 1e6, 2),
        "bytes_ms": round(reading.ms, 4),
        "multiply_adds_g_s": round(done / adding.ms / 1e6, 1) if done else None,
        "row_arithmetic_ms": round(arithmetic, 4),
        "floor_ms": {count: round(value, 4) for count, value in floor.items()},
        "over_floor": {count: round(ms[count] / value, 3) for count, value in floor.items()},
        "one_row_over_bytes": round(ms[min(ms)] / reading.ms, 3),
    }


def _watches(core: Core | None, runner: Runner, setting: Setting) -> tuple[dict[int, _Watch], _Watch, _Watch]:
    """Forwards with their logits by row count, reads of as many bytes, and multiply-adds; all interleaved."""
    vocab, pages = runner.decoder.config.vocab, list(range(runner.pool.pages - 1))
    tokens = [i * 7919 % vocab for i in range(setting.context + max(setting.rows))]
    runner.forward([Feed(pages, 0, tokens[: setting.context])])
    watches, reading, adding = {count: _Watch() for count in setting.rows}, _Watch(), _Watch()
    memory = _memory(runner.weight_bytes)
    order, shuffle = list(setting.rows), random.Random(0)
    for _ in range(setting.repeats):
        shuffle.shuffle(order)
        for count in order:
            feed = [Feed(pages, setting.context, tokens[:count])]
            watches[count].time(partial(runner.forward, feed, (), range(count)))
        if core is not None:
            read = partial(core.read, memory.data_ptr(), memory.numel() * 4, core.threads)
            read()  # brings the buffer where the weights were
            reading.time(read)
            adding.time(partial(core.multiply_add, runner.decoder.config.dtype, _STEPS))
    return watches, reading, adding


def _memory(size: int) -> Tensor:
    """As many bytes as the weights have, in huge pages as they are."""
    pages = mmap.mmap(-1, max(size, 4), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32, count=max(size // 4, 1)).fill_(1.0)


def _switches() -> int:
    """How often this process has left a core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def _runner(core: Core | None, model: str, dtype: str, setting: Setting) -> Runner:
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
    ops = None if core is None else Native(core)
    return Runner(decoder, KVPool(c.layers, pages, c.kv_heads, _PAGE, c.head_dim), ops)
