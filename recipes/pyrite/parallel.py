"""Map a function over chunks with processes, in order, within a deadline."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

__all__ = ["chunked", "cores", "map_chunks"]

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chunked(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive slices of at most `size` items."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def map_chunks(
    function: Callable[[Sequence[T]], R], chunks: Sequence[Sequence[T]], workers: int, deadline: float | None = None
) -> Iterator[R]:
    """Results in order. Chunks not done by `deadline` (time.monotonic) are left out."""
    if workers <= 1 or len(chunks) <= 1:
        for chunk in chunks:
            if deadline is not None and time.monotonic() > deadline:
                return
            yield function(chunk)
        return
    # Spawned, not forked: the parent may hold torch and its threads.
    pool = ProcessPoolExecutor(min(workers, len(chunks)), mp_context=multiprocessing.get_context("spawn"))
    try:
        for future in [pool.submit(function, chunk) for chunk in chunks]:
            remaining_s = None if deadline is None else max(deadline - time.monotonic(), 0.01)
            try:
                yield future.result(timeout=remaining_s)
            except FutureTimeout:
                future.cancel()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
