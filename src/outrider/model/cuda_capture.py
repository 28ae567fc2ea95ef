"""Captures of CUDA graphs: one at a time in a process, because waiting for the whole device would end one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture_graph", "wait_for_device"]

_DEVICE = threading.RLock()  # held while a graph is captured, and by who waits for the device


def wait_for_device() -> None:
    """Wait until the GPU has done all of its work, while nobody captures."""
    with _DEVICE:
        torch.cuda.synchronize()


def capture_graph(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of the work, which has run before. Graphs of one `memory` share it."""
    with _DEVICE, _no_collection():
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """No cyclic garbage is collected meanwhile: to free a graph or an event would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
