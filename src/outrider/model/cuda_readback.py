"""Outputs of a graph on their way to the host: pinned memory, and an event that says when they are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback"]


class Readback:
    """The host's copy of outputs of one shape. The next start overwrites it."""

    def __init__(self, like: Tensor) -> None:
        self._host = torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self._done: Any = torch.cuda.Event() if like.is_cuda else None  # type: ignore[no-untyped-call]

    def start(self, outputs: Tensor) -> Callable[[], Tensor]:
        """Copy outputs when they are computed. What is returned waits for the copy."""
        self._host.copy_(outputs, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return self._wait

    def _wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host
