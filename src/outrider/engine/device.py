"""Where a model runs, and how a GPU's memory is shared out at start."""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from outrider import checks
from outrider.config import GPU_SEQUENCES, EngineConfig
from outrider.control import Costs
from outrider.engine.placing import Machine, plan_streaming
from outrider.errors import InvalidParameter
from outrider.model import Decoder, ModelSpec, Runner
from outrider.model.memory import MemoryPlan, border_states, plan_states
from outrider.model.placement import weights_on_gpu
from outrider.ops.cuda.segments import scratch_slots
from outrider.platform import memory_bytes

__all__ = ["GPU_SIZES", "Device", "Share", "missing_gpu", "share_memory"]

_DEVICES = ("auto", "cpu", "cuda")
_NUMERICS = ("exact", "fast")
_SWITCH = ("on", "off")
_GIB = 2**30
_log = logging.getLogger("outrider")
GPU_SIZES: Mapping[str, Any] = {"max_num_seqs": GPU_SEQUENCES, "max_mixed_rows": 256}
_START_SECONDS = 8.0  # for capturing graphs before anything is served
_LEAST_CAPTURES = 2  # one sequence, and the largest round: it must fit
_MAX_PREFILL = 2048  # rows of a prompt that is run at start
_LONGEST_CHAIN = 12  # longer ones are captured when they are first asked for
_STREAMED_GRAPH_ROWS = 64
_CATCH_UP = 256  # rows in which a draft model reads what it has missed
_SHARE = 0.9  # of the memory, unless the user says otherwise
_BASE = _GIB  # of the reserve: the driver, libraries, graphs and the allocator's rounding


@dataclass(frozen=True, slots=True)
class Share:
    """A GPU's memory at start, in bytes."""

    total: int  # that this process may take
    weights: int
    reserve: int  # logits, the scratch of attention, graphs
    page: int  # one page of every model's KV

    @property
    def left(self) -> int:
        """What is left for KV."""
        return self.total - self.weights - self.reserve

    @property
    def pages(self) -> int:
        return self.left // self.page

    def sequences(self, tokens: int, page_size: int) -> int:
        """Sequences of so many tokens that fit at once."""
        return max(self.pages, 0) // -(-tokens // page_size)

    def __str__(self) -> str:
        sizes = {"of": self.total, "weights": self.weights, "reserve": self.reserve}
        return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in sizes.items())


@dataclass(frozen=True, slots=True)
class Device:
    """The processor, or a GPU with its settings."""

    name: str
    exact: bool = True
    memory: float | int | None = None  # a share (float) or the bytes (int) that everything may take
    fp8_rows: bool = True  # products of weights in FP8 round rows to FP8 too

    @classmethod
    def resolve(
        cls, name: str, numerics: str = "exact", memory: float | int | str | None = None, fp8_activations: str = "on"
    ) -> Device:
        """From what the user asked for; "auto" is a GPU where torch and Triton find one."""
        checks.choice("device", name, _DEVICES)
        checks.choice("numerics", numerics, _NUMERICS)
        checks.choice("fp8_activations", fp8_activations, _SWITCH)
        limit = None if memory is None else checks.memory("memory", memory)
        missing = missing_gpu()
        if name == "cuda" and missing:
            raise InvalidParameter("device", f"cuda cannot be used: {missing}")
        return cls("cpu" if name == "cpu" or missing else "cuda", numerics == "exact", limit, fp8_activations == "on")

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def limit(self, total: int) -> int | None:
        """The bytes that everything may take, of a total; None where the user set no limit."""
        return int(self.memory * total) if isinstance(self.memory, float) else self.memory

    def runner(
        self, decoder: Decoder, memory: MemoryPlan, page_size: int, target: Runner | None = None
    ) -> Runner:  # fmt: skip
        """A model on the GPU, its KV in the planned pages and one more for padding. A draft model knows its target."""
        from outrider.model.cuda_runner import CudaOptions, CudaRunner

        assert target is None or isinstance(target, CudaRunner)
        options, placement = CudaOptions(self.exact, self.fp8_rows), memory.placement
        if placement is not None:  # the logits of larger graphs would take what weights could, and their passes no less time
            options = replace(options, placement=placement, max_graph_rows=_STREAMED_GRAPH_ROWS)
        return CudaRunner(decoder, memory.pages + 1, page_size, self.name, options, target, memory.pool)

    def warm_up(self, target: Runner, drafts: Sequence[Runner], taps: tuple[int, ...], sizes: EngineConfig, length: int) -> Costs:
        """Run the largest rounds, capture graphs, the likeliest first, and time the target's: calibration times the drafts.

        Graphs that are not captured within some seconds are captured when the engine is idle, or when they are needed.
        """
        from outrider.model.cuda_runner import CudaRunner

        assert isinstance(target, CudaRunner)
        began, batch = perf_counter(), sizes.max_num_seqs
        first, *later = target.captures(batch * (1 + length), taps)
        first()
        target.warm_up_prefill(min(sizes.max_batch_rows, _MAX_PREFILL))
        for draft in drafts:
            assert isinstance(draft, CudaRunner)
            later += draft.captures(_CATCH_UP, batch=batch, length=min(length, _LONGEST_CHAIN))
            draft.warm_up_prefill(_CATCH_UP)
        captures = 1
        while later and (captures < _LEAST_CAPTURES or perf_counter() - began < _START_SECONDS):
            later.pop(0)()
            captures += 1
        target.later.extend(later)
        costs = Costs(target.sizes)
        costs.bus_bytes = target.cuda.pass_bytes
        rounds = target.round_seconds()
        seconds, experts = rounds.get(max_rows := target.options.max_graph_rows, (0.0, 0.0))
        if max_rows in rounds and target.cuda.streams:
            rounds |= dict.fromkeys((256, 1024), (seconds, experts))  # one pass over the weights, however many rows
        elif max_rows in rounds:  # more rows take several replays
            rounds |= {turns * max_rows: (turns * seconds, turns * experts) for turns in (2, 3, 4)}
        for rows, (seconds, experts) in rounds.items():
            costs.observe_forward(rows, 0, seconds, experts)
        _log.info(
            "%d graphs captured in %.1f s; %d more will be when nothing runs or when they are needed",
            captures, perf_counter() - began, len(later),
        )  # fmt: skip
        return costs

    def bus_bandwidth(self) -> float:
        """Bytes a second from host memory to the GPU."""
        from outrider.model.cuda_streaming import bus_bandwidth

        return bus_bandwidth(self.name)

    def free_memory(self) -> None:
        """Give the driver back what nobody refers to any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def plan(self, engine: EngineConfig, models: Sequence[ModelSpec]) -> MemoryPlan:
        """Pages for every sequence at full length, or as many as fit beside the weights; where one sequence does not fit beside
        them, weights of the first model are streamed from host memory.
        """
        free, total = torch.cuda.mem_get_info()
        assert engine.max_model_len is not None
        limit = self.limit(total) or int(_SHARE * total)
        room = min(limit, free) if isinstance(self.memory, int) else limit - (total - free)
        pool = plan_states(models[0], engine, share_memory(models, room, engine.page_size, engine.max_model_len).left)
        room -= pool.bytes(models[0])
        share = share_memory(models, room, engine.page_size, engine.max_model_len)
        pool = pool._replace(borders=border_states(models[0], engine, share.left))
        share = replace(share, total=share.total - pool.borders * models[0].state_bytes)
        pages = share.pages if engine.kv_bytes is None else min(share.pages, engine.kv_bytes // share.page)
        least = -(-engine.max_model_len // engine.page_size)
        if pages >= least:
            alone = share_memory(models[:1], room, engine.page_size, engine.max_model_len)
            beside = f", {alone.sequences(engine.max_model_len, engine.page_size)} without drafters" if len(models) > 1 else ""
            fitting = share.sequences(engine.max_model_len, engine.page_size)
            _log.info("memory for %d sequences of %d tokens at once%s (%s)", fitting, engine.max_model_len, beside, share)
            return MemoryPlan(min(pages, engine.max_num_seqs * least), pool=pool)
        planned = plan_streaming(engine, models[0], models[1:], Machine(room, memory_bytes()))
        return MemoryPlan(planned.pages, pool=pool._replace(borders=0), placement=planned.placement)


def share_memory(models: Sequence[ModelSpec], total: int, page_size: int, max_model_len: int, rows: int = 256) -> Share:
    """What models, their buffers and a page of their KV take. `rows` is the largest graph's."""
    weights = sum(map(weights_on_gpu, models))
    page = sum(2 * 2 * len(model.kv_layers) * model.kv_heads * model.head_dim * page_size for model in models)
    slots = scratch_slots(rows, max_model_len)
    reserve = _BASE
    for model in models:
        reserve += 4 * 4 * rows * model.vocab + 4 * slots * model.heads * (model.head_dim + 2) + 16 * rows * model.ffn
        reserve += 32 * rows * max((recurrent.width for recurrent in model.recurrent), default=0)
    return Share(total, weights, reserve, page)


def missing_gpu() -> str | None:
    """Why no GPU can be used, if so."""
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU" if torch.version.cuda else "this build of torch is for processors alone"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than the kernels need (compute capability 8.0)"
    return None
