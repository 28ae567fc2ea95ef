"""`outrider plan --memory`: what of a model would stay on a GPU, what would be streamed, and how fast that is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider import checks
from outrider.config import MAX_TREE_TOKENS, EngineConfig
from outrider.engine.device import missing_gpu, share_memory
from outrider.engine.placing import Machine, plan_streaming
from outrider.errors import InvalidParameter
from outrider.model import ModelSpec
from outrider.model.load import served_spec
from outrider.model.placement import Placement, matrices_of
from outrider.platform import memory_bytes

__all__ = ["PlannedMemory", "plan_memory_of", "show_memory"]

_ASSUMED_BUS = 25e9  # bytes a second, without a GPU to measure: PCIe 4.0 with 16 lanes
_LONG = 4096  # tokens of a sequence, unless the model's context is shorter
_LARGE_TREE = 256


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """How a model would be placed, and what its plain decoding takes."""

    model: str
    spec: ModelSpec
    limit: int
    max_model_len: int
    pages: int
    placement: Placement | None  # None: everything stays on the GPU
    bus: float  # bytes a second
    is_measured: bool

    @property
    def pass_seconds(self) -> float:
        """Seconds in which the streamed weights cross the bus."""
        return 0.0 if self.placement is None else self.placement.pass_bytes / self.bus

    def as_dict(self) -> dict[str, Any]:
        placed = self.placement
        return {
            "model": self.model,
            "memory": self.limit,
            "max_model_len": self.max_model_len,
            "kv_tokens": self.pages * 64,
            "streamed_bytes": 0 if placed is None else placed.pass_bytes,
            "resident_bytes": None if placed is None else placed.resident,
            "host_bytes": 0 if placed is None else placed.host,
            "bus_bytes_per_s": self.bus,
            "bus_is_measured": self.is_measured,
            "pass_ms": self.pass_seconds * 1e3,
            "plain_tok_s": 1 / self.pass_seconds if self.pass_seconds else None,
        }


def plan_memory_of(path: Path, draft: Path | None, memory: str, bus: float | None) -> PlannedMemory:
    """The placement of a model within a limit; nothing is loaded."""
    limit, spec = checks.memory("--memory", memory), served_spec(path)
    if isinstance(limit, float):
        if missing_gpu() is not None:
            raise InvalidParameter("--memory", "a share needs a GPU to be a share of; pass a size such as 8GiB")
        limit = int(limit * torch.cuda.get_device_properties(0).total_memory)
    specs: list[ModelSpec] = [spec, *([] if draft is None else [served_spec(draft)])]
    sizes = EngineConfig(max_model_len=min(spec.context, _LONG), max_num_seqs=1)
    share = share_memory(specs, limit, sizes.page_size, min(spec.context, _LONG))
    least = -(-min(spec.context, _LONG) // sizes.page_size)
    placement, pages = None, share.pages
    if share.pages < least:
        planned = plan_streaming(sizes, specs[0], specs[1:], Machine(limit, memory_bytes()))
        placement, pages = planned.placement, planned.pages
    measured = bus is None and missing_gpu() is None
    speed = bus or (_measured() if measured else _ASSUMED_BUS)
    return PlannedMemory(str(path), spec, limit, min(spec.context, _LONG), pages, placement, speed, measured)


def _measured() -> float:
    from outrider.model.cuda_streaming import bus_bandwidth

    return bus_bandwidth()


def show_memory(planned: PlannedMemory, console: Console) -> None:
    """The split by matrix, and the expected speed."""
    placed = planned.placement
    if placed is None:
        console.print(f"{planned.model}: all weights stay on the GPU, with KV for {planned.pages * 64:,} tokens")
        return
    how = "measured" if planned.is_measured else "assumed; --bus says what yours is"
    console.print(f"{planned.model}: {placed.describe(planned.bus)} (bus: {how}); KV for {planned.pages * 64:,} tokens")
    table = Table("layers", "on the GPU", "streamed", title="where the matrices lie", title_justify="left")
    for first, last, streamed in _runs(placed):
        names = list(matrices_of(planned.spec.layers[first]))
        moved = [names[i] for i in streamed]
        kept = [name for name in names if name not in moved]
        table.add_row(f"{first}" if first == last else f"{first}-{last}", ", ".join(kept) or "-", ", ".join(moved) or "-")
    console.print(table)
    console.print(
        f"checking {_LARGE_TREE} drafted tokens takes about as long as one: a draft model that stays on the GPU may draft trees "
        f"of up to {MAX_TREE_TOKENS} (docs/offloading.md)"
    )


def _runs(placed: Placement) -> list[tuple[int, int, tuple[int, ...]]]:
    """Layers that lie alike, side by side."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for index, streamed in enumerate(placed.streamed):
        if runs and runs[-1][2] == streamed:
            runs[-1] = (runs[-1][0], index, streamed)
        else:
            runs.append((index, index, streamed))
    return runs
