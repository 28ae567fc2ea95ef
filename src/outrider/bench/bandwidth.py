"""Memory bandwidth of a processor and of a GPU: no forward is faster than reading its weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.ops import Core, find_core

__all__ = ["device_seconds", "gpu_bandwidth", "processor_bandwidth", "reading"]


def reading(core: Core | None, memory: Tensor) -> Callable[[], object]:
    """A call that reads a tensor once: by the native core where there is one, as its forwards do."""
    if core is None:
        return memory.sum
    return lambda: core.read(memory.data_ptr(), memory.numel() * memory.element_size(), core.threads)


def processor_bandwidth(megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second that this process reads from memory, at best."""
    memory, best = torch.ones(megabytes * 2**18), 0.0
    read = reading(find_core()[0], memory)
    for _ in range(repeats):
        began = time.perf_counter()
        read()
        best = max(best, memory.numel() * memory.element_size() / (time.perf_counter() - began))
    return best


def gpu_bandwidth(size: int = 4 << 30) -> float:
    """Bytes per second that a matrix-vector product over a large matrix reads."""
    matrix = torch.empty(size // 2 // 8192, 8192, dtype=torch.bfloat16, device="cuda").normal_()
    vector = torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    return size / device_seconds(lambda: torch.mv(matrix, vector))


def device_seconds(work: Callable[[], object], repeats: int = 9) -> float:
    """The median time of some work on the device, as a graph where it is many launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)
