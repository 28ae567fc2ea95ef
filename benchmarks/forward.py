"""`python -m benchmarks.forward`: what a forward costs by the number of its rows.

In the same run the processor reads as many bytes as one row needs, and multiplies as much as those rows need: the larger of
the two times is a floor for the products. Of a mixture of experts a row needs those that it goes through, and several rows need
more of them.

On a machine that others use too, a time says little when the scheduler took a core away meanwhile. Such samples are
recognised by the process's context switches and left out, as long as enough others are left.
"""

from __future__ import annotations

import json
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
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from outrider.bench.bandwidth import reading as reading_of
from outrider.bench.environment import environment
from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model import Feed, LlamaShape, LoadOptions, ModelSpec, Rope, Runner, load_decoder, write_config
from outrider.model.bundled import bundled_model
from outrider.ops import Blocked, Core, Native, find_core, one_torch_thread
from outrider.options import Threads, set_threads

__all__ = ["RANDOM_MODELS", "CallTimes", "bench_forward"]

_PAGE = 64
_ENOUGH = 5  # undisturbed samples
_STEPS = 100_000  # of the instruction whose speed is measured: half a millisecond
_LLAMA = {"architecture": "LlamaForCausalLM", "context": 2048, "rope": Rope(), "tied": True, "dtype": "bfloat16", "head_dim": 64}
RANDOM_MODELS: dict[str, ModelSpec] = {
    "40m": LlamaShape(vocab=8192, hidden=512, layers=12, heads=8, kv_heads=4, ffn=1408, **_LLAMA).spec(),  # type: ignore[arg-type]
    "150m": LlamaShape(vocab=8192, hidden=768, layers=24, heads=12, kv_heads=4, ffn=2048, **_LLAMA).spec(),  # type: ignore[arg-type]
    "1.1b": LlamaShape(vocab=32000, hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632, **_LLAMA).spec(),  # type: ignore[arg-type]
}
_MOE_1B = {  # 0.88 billion weights, of which a token uses 0.28
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 4096, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
_RANDOM = (*RANDOM_MODELS, "moe-1b")


@dataclass(frozen=True, slots=True)
class ForwardSetting:
    """What is measured: row counts after a context, interleaved, this often."""

    rows: Sequence[int] = (1, 2, 4, 8, 16, 32)
    context: int = 256
    repeats: int = 40


class CallTimes:
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


def bench_forward(models: Sequence[str], dtypes: Sequence[str], setting: ForwardSetting) -> dict[str, Any]:
    """One record per model and dtype, with the machine and the conditions."""
    where = environment()
    core, core_name = find_core(steady=True)
    if core is not None:
        core.take_threads()
    with one_torch_thread(Blocked() if core is None else Native(core)):
        measured = [_measure(core, model, dtype, setting) for dtype in dtypes for model in models]
    shared = {"core": core_name, "context": setting.context, "repeats": setting.repeats}
    return where | shared | {"results": measured}


def _measure(core: Core | None, model: str, dtype: str, setting: ForwardSetting) -> dict[str, Any]:
    runner = _runner(core, model, dtype, setting)
    rows, experts, reading, adding = _time_calls(core, runner, setting)
    ms, first = {count: watch.ms for count, watch in rows.items()}, min(rows)
    record: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "megabytes": round(runner.weight_bytes / 1e6, 2),
        "ms": {count: round(value, 4) for count, value in ms.items()},
        "undisturbed": {count: watch.undisturbed for count, watch in rows.items()},
        "ratio_to_one_row": {count: round(value / ms[first], 3) for count, value in ms.items()},
    }
    if any(experts.values()):
        record["experts_per_layer"] = {
            count: round(read / runner.decoder.spec.expert_layers, 2) for count, read in experts.items()
        }
    return record if core is None else record | _floors(core, runner, (ms, experts), reading, adding)


def _floors(
    core: Core, runner: Runner, measured: tuple[dict[int, float], dict[int, int]], reading: CallTimes, adding: CallTimes
) -> dict[str, Any]:
    """What the same processor needs in the same minutes to read the weights and to multiply them."""
    c, (ms, experts) = runner.decoder.spec, measured
    of_row = sum(
        c.hidden * (layer.attention.qkv_width + layer.attention.q_width)
        + layer.mlp.parameters(c.hidden, 1 if layer.mlp.router is None else layer.mlp.router.chosen)
        for layer in c.layers
    )
    done = core.multiply_add(c.dtype, _STEPS)
    arithmetic = adding.ms * (of_row + c.vocab * c.hidden) / done if done else 0.0
    sizes = {count: _bytes_read(runner, experts[count]) for count in ms}
    floor = {count: max(reading.ms * sizes[count] / sizes[min(ms)], count * arithmetic) for count in ms}
    return {
        "bandwidth_gb_s": round(sizes[min(ms)] / reading.ms / 1e6, 2),
        "bytes_ms": round(reading.ms, 4),
        "multiply_adds_g_s": round(done / adding.ms / 1e6, 1) if done else None,
        "row_arithmetic_ms": round(arithmetic, 4),
        "floor_ms": {count: round(value, 4) for count, value in floor.items()},
        "over_floor": {count: round(ms[count] / value, 3) for count, value in floor.items()},
        "one_row_over_bytes": round(ms[min(ms)] / reading.ms, 3),
    }


def _bytes_read(runner: Runner, experts: int) -> float:
    """Bytes of weights that a forward reads which goes through so many experts, over all layers."""
    mixtures = [] if runner.stack is None else [layer.experts for layer in runner.stack.layers if layer.experts is not None]
    if not mixtures:
        return runner.weight_bytes
    every = sum(matrix.bytes for mixture in mixtures for matrix in (*mixture.gate_up, *mixture.down))
    return runner.weight_bytes - every * (1.0 - experts / sum(mixture.router.experts for mixture in mixtures))


def _time_calls(
    core: Core | None, runner: Runner, setting: ForwardSetting
) -> tuple[dict[int, CallTimes], dict[int, int], CallTimes, CallTimes]:
    """Forwards with their logits and experts by row count, reads of one row's bytes, and multiply-adds; all interleaved."""
    vocab, pages = runner.decoder.spec.vocab, list(range(runner.pool.pages - 1))
    tokens = [i * 7919 % vocab for i in range(setting.context + max(setting.rows))]
    runner.forward([Feed(pages, 0, tokens[: setting.context])])
    watches, reading, adding = {count: CallTimes() for count in setting.rows}, CallTimes(), CallTimes()
    experts = {count: _experts_read(runner, [Feed(pages, setting.context, tokens[:count])]) for count in setting.rows}
    memory = _memory(int(_bytes_read(runner, experts[min(experts)])))
    order, shuffle = list(setting.rows), random.Random(0)
    for _ in range(setting.repeats):
        shuffle.shuffle(order)
        for count in order:
            feed = [Feed(pages, setting.context, tokens[:count])]
            watches[count].time(partial(runner.forward, feed, (), range(count)))
        if core is not None:
            read = reading_of(core, memory)
            read()  # brings the buffer where the weights were
            reading.time(read)
            adding.time(partial(core.multiply_add, runner.decoder.spec.dtype, _STEPS))
    return watches, experts, reading, adding


def _experts_read(runner: Runner, feeds: list[Feed]) -> int:
    """Distinct experts that a forward reads, over all layers."""
    before = 0 if runner.stack is None else runner.stack.touched[0]
    runner.forward(feeds)
    return 0 if runner.stack is None else runner.stack.touched[0] - before


def _memory(size: int) -> Tensor:
    """As many bytes as one row needs, in huge pages as the weights are."""
    pages = mmap.mmap(-1, max(size, 4), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32, count=max(size // 4, 1)).fill_(1.0)


def _switches() -> int:
    """How often this process has left a core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw + used.ru_nivcsw


def _runner(core: Core | None, model: str, dtype: str, setting: ForwardSetting) -> Runner:
    pages = -(-(setting.context + max(setting.rows)) // _PAGE) + 1
    dtype, _, kv = dtype.partition("/")
    options = LoadOptions(dtype)
    with tempfile.TemporaryDirectory() as folder:
        if model in RANDOM_MODELS:
            write_config(RANDOM_MODELS[model], Path(folder))
            decoder = load_decoder(Path(folder), LoadOptions(dtype, "dummy"))
        elif model == "moe-1b":
            (Path(folder) / "config.json").write_text(json.dumps(_MOE_1B))
            decoder = load_decoder(Path(folder), LoadOptions(dtype, "dummy"))
        elif model in ("pyrite", "draft"):
            decoder = load_decoder(bundled_model() if model == "pyrite" else bundled_model() / "draft", options)
        elif Path(model).is_dir():
            decoder = load_decoder(Path(model), options)
        else:
            known = ", ".join(("pyrite", "draft", *_RANDOM))
            raise InvalidParameter("--models", f"unknown {model!r}; a directory, or one of: {known}")
    c = decoder.spec
    ops = None if core is None else Native(core)
    return Runner(decoder, KVPool(c.depth, pages, c.kv_heads, _PAGE, c.head_dim, kv == "int8"), ops)


def main(
    models: Annotated[
        str, typer.Option(help="Comma-separated: pyrite, draft, random models 40m, 150m, 1.1b, moe-1b, or directories.")
    ] = "pyrite,draft,150m",
    dtypes: Annotated[
        str, typer.Option(help="Comma-separated: bfloat16, int8, float32; bfloat16/int8 keeps keys and values in int8.")
    ] = "bfloat16,int8",
    rows: Annotated[str, typer.Option(help="Comma-separated row counts.")] = "1,2,4,8,16,32",
    context: Annotated[int, typer.Option(min=1, help="Positions before the rows.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times each row count runs, interleaved; medians are shown.")] = 40,
    threads: Threads = None,
) -> None:
    """What a forward costs for 1 to 32 rows, beside the time its bytes and its arithmetic need here in the same run."""
    set_threads(threads)
    setting = ForwardSetting([int(count) for count in rows.split(",")], context, repeats)
    print(json.dumps(bench_forward(models.split(","), dtypes.split(","), setting)))


if __name__ == "__main__":
    run(main)
