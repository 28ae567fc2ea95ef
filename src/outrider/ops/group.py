"""The ranks that share a model's layers: parts of a sum are gathered from all of them and added in order of rank.

torch.distributed carries them (gloo between processors, NCCL between GPUs). Nothing here reduces on the way: an all-reduce adds
in whatever order its algorithm takes, and a sum would depend on the number of rows.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import RankDied

__all__ = ["Group", "backends", "listen", "missing_backend"]

_dist: Any = torch.distributed  # it exports less by its types than it has
LOCAL = "127.0.0.1"
_TIMEOUT = timedelta(seconds=300)  # for a rank that is alive and does not answer
_GATHER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)  # Gather of core.cpp


def missing_backend(device: str) -> str | None:
    """Why ranks on a device cannot talk to each other with this build of torch, if so."""
    if not _dist.is_available():
        return "this build of torch has no torch.distributed"
    if device == "cpu":
        return None if _dist.is_gloo_available() else "this build of torch has no gloo"
    return None if _dist.is_nccl_available() else "this build of torch has no NCCL"


def backends() -> str:
    """What of the two this build of torch has, in words."""
    having = {"gloo (processors)": missing_backend("cpu") is None, "NCCL (GPUs)": missing_backend("cuda") is None}
    return ", ".join(f"{name} {'available' if has else 'not in this build of torch'}" for name, has in having.items())


def listen(ranks: int, port: int = 0) -> Any:
    """Where ranks of this machine find each other; port 0 is any that is free."""
    return _dist.TCPStore(LOCAL, port, ranks, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


class Group:
    """One rank's end of the group. A group that has failed once raises RankDied at every later call."""

    def __init__(self, store: Any, rank: int, size: int, device: str = "cpu") -> None:
        self.rank, self.size = rank, size
        self.failure: BaseException | None = None
        self._store = store
        self._group = _gloo(store, rank, size) if device == "cpu" else _nccl(store, rank, size)
        self._native = _GATHER(self._gather_native)  # the core calls it for as long as this lives

    @classmethod
    def join(cls, port: int, rank: int, size: int, device: str = "cpu") -> Group:
        """The group whose first rank listens at a port of this machine."""
        return cls(_dist.TCPStore(LOCAL, port, size, is_master=False, timeout=_TIMEOUT), rank, size, device)

    @property
    def address(self) -> int:
        """Of the function by which the native core gathers parts."""
        return ctypes.cast(self._native, ctypes.c_void_p).value or 0

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, (ranks, *shape); every rank calls it with a part of the same shape."""
        self.check()
        part = part.contiguous()
        parts = torch.empty(self.size, part.numel(), dtype=part.dtype, device=part.device)
        try:
            self._group.allgather([list(parts.unbind())], [part.view(-1)]).wait()
        except BaseException as error:  # after an interruption, too, the others are one step ahead
            self.failure = error
            raise RankDied(f"a rank of the model did not answer ({error}); load the model again") from error
        return parts.view(self.size, *part.shape)

    def sum(self, part: Tensor) -> Tensor:
        """The parts of all ranks, added in order of rank."""
        parts = self.gather(part)
        total = parts[0]
        for rank in range(1, self.size):
            total = total + parts[rank]
        return total

    def check(self) -> None:
        """Raise RankDied where the group has failed."""
        if self.failure is not None:
            raise RankDied(f"a rank of the model is gone ({self.failure}); load the model again")

    def _gather_native(self, part: int, values: int, parts: int) -> int:
        """Called by the native core in the middle of a forward, on the thread that called the core. No exception may leave."""
        try:
            floats(parts, self.size * values).copy_(self.gather(floats(part, values)).view(-1))
        except BaseException as error:
            self.failure = self.failure or error
            return 0
        return 1


def floats(address: int, count: int) -> Tensor:
    """Memory as a tensor."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)))


def _gloo(store: Any, rank: int, size: int) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOCAL)]  # by default gloo looks this machine's name up
    options._timeout = _TIMEOUT
    return gloo(_dist.PrefixStore("outrider", store), rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    nccl = _dist.ProcessGroupNCCL
    return nccl(_dist.PrefixStore("outrider", store), rank, size)
