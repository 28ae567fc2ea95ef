"""Where a model runs, and how a GPU's memory is shared out at start."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider import checks
from outrider.config import EngineConfig
from outrider.control import Costs
from outrider.engine.placing import Machine, plan_streaming
from outrider.errors import InvalidParameter
from outrider.model import Decoder, ModelSpec, Runner
from outrider.model.memory import MemoryPlan
from outrider.model.placement import Placement
from outrider.ops.cuda.segments import scratch_slots
from outrider.platform import memory_bytes

__all__ = ["Device", "Share", "missing_gpu", "share_memory"]

_DEVICES = ("auto", "cpu", "cuda")
_NUMERICS = ("exact", "fast")
_GIB = 2**30
_LONGEST_CHAIN = 12  # captured at start; a longer one is captured when it is first asked for
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
    def pages(self) -> int:
        return (self.total - self.weights - self.reserve) // self.page

    def __str__(self) -> str:
        sizes = {"of": self.total, "weights": self.weights, "reserve": self.reserve}
        return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in sizes.items())


@dataclass(frozen=True, slots=True)
class Device:
    """The processor, or a GPU with its settings."""

    name: str
    exact: bool = True
    memory: float | int | None = None  # a share (float) or the bytes (int) that everything may take

    @classmethod
    def resolve(cls, name: str, numerics: str = "exact", memory: float | int | str | None = None) -> Device:
        """From what the user asked for; "auto" is a GPU where torch and Triton find one."""
        checks.choice("device", name, _DEVICES)
        checks.choice("numerics", numerics, _NUMERICS)
        limit = None if memory is None else checks.memory("memory", memory)
        missing = missing_gpu()
        if name == "cuda" and missing:
            raise InvalidParameter("device", f"cuda cannot be used: {missing}")
        return cls("cpu" if name == "cpu" or missing else "cuda", numerics == "exact", limit)

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def limit(self, total: int) -> int | None:
        """The bytes that everything may take, of a total; None where the user set no limit."""
        return int(self.memory * total) if isinstance(self.memory, float) else self.memory

    def runner(
        self, decoder: Decoder, pages: int, page_size: int, target: Runner | None = None, placement: Placement | None = None
    ) -> Runner:
        """A model on the GPU, its KV in that many pages and one more for padding. A draft model knows its target."""
        from outrider.model.cuda_runner import CudaOptions, CudaRunner

        assert target is None or isinstance(target, CudaRunner)
        options = CudaOptions(exact=self.exact)
        if placement is not None:  # the logits of larger graphs would take what weights could, and their passes no less time
            options = CudaOptions(exact=self.exact, placement=placement, max_graph_rows=_STREAMED_GRAPH_ROWS)
        return CudaRunner(decoder, pages + 1, page_size, self.name, options, target)

    def warm_up(self, target: Runner, drafts: Sequence[Runner], taps: tuple[int, ...], batch: int, length: int) -> Costs:
        """Capture the graphs of so many sequences and drafted tokens, and time the target's: calibration times the drafts."""
        from outrider.model.cuda_runner import CudaRunner

        assert isinstance(target, CudaRunner)
        costs = Costs(target.sizes)
        target.warm_up(batch * (1 + length), taps, plain=batch)
        target.warm_up_prefill()
        rounds = target.round_seconds()
        if (max_rows := target.options.max_graph_rows) in rounds:
            rounds |= {turns * max_rows: turns * rounds[max_rows] for turns in (2, 3, 4)}  # more rows take several replays
        for rows, seconds in rounds.items():
            costs.observe_forward(rows, 0, seconds)
        for draft in drafts:
            assert isinstance(draft, CudaRunner)
            draft.warm_up(_CATCH_UP, batch=batch, length=min(length, _LONGEST_CHAIN))
            draft.warm_up_prefill()
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
        share = share_memory(models, room, engine.page_size, engine.max_model_len)
        pages = share.pages if engine.kv_bytes is None else min(share.pages, engine.kv_bytes // share.page)
        least = -(-engine.max_model_len // engine.page_size)
        if pages >= least:
            return MemoryPlan(min(pages, engine.max_num_seqs * least))
        planned = plan_streaming(engine, models[0], models[1:], Machine(room, memory_bytes()))
        return MemoryPlan(planned.pages, placement=planned.placement)


def share_memory(models: Sequence[ModelSpec], total: int, page_size: int, max_model_len: int, rows: int = 256) -> Share:
    """What models, their buffers and a page of their KV take. `rows` is the largest graph's."""
    weights = sum(2 * model.parameters for model in models)
    page = sum(2 * 2 * model.depth * model.kv_heads * model.head_dim * page_size for model in models)
    slots = scratch_slots(rows, max_model_len)
    reserve = _BASE
    for model in models:
        reserve += 4 * 4 * rows * model.vocab + 4 * slots * model.heads * (model.head_dim + 2) + 16 * rows * model.ffn
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
