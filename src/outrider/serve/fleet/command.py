"""`outrider serve --data-parallel-size N`: what each replica gets, and the server of the front door."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from outrider.checks import byte_size, memory
from outrider.engine.build import KV_SHARE_OF_MEMORY
from outrider.engine.device import Device
from outrider.errors import InvalidParameter
from outrider.platform import memory_bytes
from outrider.routing import Router
from outrider.serve.flags import ServeFlags
from outrider.serve.fleet.door import FrontDoor
from outrider.serve.fleet.local import NO_PROMISE, LocalFleet, LocalPlan
from outrider.serve.server import Reread, Server, run_server

__all__ = ["DoorServer", "plan_of", "serve_replicas"]


class DoorServer(Server):
    """The server of a front door. Keys and hosts are checked by the replicas."""

    def __init__(self, fleet: LocalFleet, flags: ServeFlags, reread: Reread | None = None) -> None:
        super().__init__(FrontDoor(fleet), flags, reread)
        self._fleet = fleet

    def reload(self) -> None:
        self._fleet.reload()


def serve_replicas(
    flags: ServeFlags, plan: LocalPlan, listener: socket.socket, reread: Reread, say: Callable[[str], None]
) -> None:
    """Serve until a signal. Raises if the replicas cannot be started."""

    def announce() -> None:
        shared = "share one fingerprint" if fleet.state()["same_tokens"] else f"differ: {NO_PROMISE}"
        say(f"{plan.replicas} replicas {shared}; {plan.capacity} sequences at once on each")

    fleet = LocalFleet(plan, flags, Router(), announce)
    run_server(DoorServer(fleet, flags, reread), listener)


def plan_of(flags: ServeFlags, arguments: Sequence[str]) -> LocalPlan:
    """The replicas' command lines: the same as this one, with their shares of threads and memory, or a GPU each."""
    number = flags.data_parallel_size
    flags_of_replica = ["--data-parallel-size", "1"]
    environments: list[dict[str, str]] = []
    if Device.resolve(flags.device).is_gpu:
        gpus = _gpus()
        if number > len(gpus):
            raise InvalidParameter("--data-parallel-size", f"must be at most {len(gpus)}, the number of GPUs; got {number}")
        environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:number]]
    else:
        threads = flags.threads or torch.get_num_threads()
        flags_of_replica += ["--threads", str(max(threads // number, 1)), *_memory_of_replica(flags, number)]
    return LocalPlan((*arguments, *flags_of_replica), number, flags.slots, environments)


def _memory_of_replica(flags: ServeFlags, number: int) -> list[str]:
    """The flags of a replica's part of the memory; by default of what KV takes."""
    if flags.memory is None:
        size = int(KV_SHARE_OF_MEMORY * memory_bytes()) if flags.kv_memory is None else byte_size("--kv-memory", flags.kv_memory)
        return ["--kv-memory", str(size // number)]
    limit = memory("--memory", flags.memory)
    total = int(limit * memory_bytes()) if isinstance(limit, float) else limit
    own_kv = [] if flags.kv_memory is None else ["--kv-memory", str(byte_size("--kv-memory", flags.kv_memory) // number)]
    return ["--memory", str(total // number), *own_kv]


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
