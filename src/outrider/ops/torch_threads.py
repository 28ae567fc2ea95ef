"""Torch's threads beside the native core's.

Torch's threads spin after every operation, on the processors that the core's threads need: a round with a few small torch
operations in it took seven times as long. So torch has one thread where the core runs rounds, and only there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.ops.plain import Ops

__all__ = ["keep_one_torch_thread", "one_torch_thread", "set_torch_threads_here"]


def keep_one_torch_thread(ops: Ops) -> None:
    """Leave torch one thread on the calling thread from now on, where the native core runs."""
    if ops.core is not None:
        set_torch_threads_here(1)


def set_torch_threads_here(count: int) -> None:
    """Set torch's threads for the calling thread; other threads keep theirs.

    Torch keeps the count for each thread that has used it, and one for threads that have not; setting it changes both. So
    another thread sets the second one back.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
        restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
        restorer.start()
        restorer.join()


@contextmanager
def one_torch_thread(ops: Ops) -> Iterator[None]:
    """Leave torch one thread while the native core runs rounds on the calling thread."""
    before = torch.get_num_threads()
    if ops.core is None or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
