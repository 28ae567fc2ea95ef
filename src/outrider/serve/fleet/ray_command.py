"""`outrider serve --data-parallel-backend ray`: the replicas on Ray, from the machine that this runs on.

Without RAY_ADDRESS a cluster of this machine alone is started, and ended with the server.
"""

from __future__ import annotations

import enum
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidParameter, OutriderError
from outrider.options import json_object
from outrider.serve.address import listen
from outrider.serve.flags import ServeFlags

__all__ = ["arguments_of", "load_ray", "serve_on_ray"]

_NOT_OF_REPLICAS = ("data_parallel_size", "data_parallel_backend", "data_parallel_config", "port", "uds", "config", "limits")
_GPU_SHARE = {"num_gpus": 1.0, "num_cpus": 1.0}


def serve_on_ray(flags: ServeFlags, say: Callable[[str], None]) -> None:
    """Serve until a signal."""
    listener = listen(flags.host, flags.port)  # Ray would start without its port, and say so in a log file
    port = listener.getsockname()[1]
    listener.close()
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0"} | os.environ)
    ours = load_ray()
    ray, serve = ours.ray, ours.serve

    arguments = arguments_of(flags, torch.get_num_threads())
    stopped = threading.Event()
    say(f"listening on http://{flags.host}:{port}; starting replicas of {flags.model_name} on Ray")
    with tempfile.TemporaryDirectory(prefix="outrider-ray-", ignore_cleanup_errors=True) as folder:
        try:
            _open_cluster(ray, arguments, folder)
            for number in (signal.SIGTERM, signal.SIGINT):  # now, because Ray has set handlers of its own
                signal.signal(number, lambda *_: stopped.set())
            serve.start(http_options={"host": flags.host, "port": port})
            serve.run(ours.build(arguments), name="outrider", route_prefix="/")
            say(f"ready on http://{flags.host}:{port}")
            stopped.wait()
            serve.delete("outrider")  # the front door and the replicas finish what they have begun
        except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
            raise OutriderError(f"Ray: {error}; `serve status` and the logs of Ray's session say more") from error
        finally:
            _close(ray, serve)


def load_ray() -> Any:
    """Our module for Ray, or an error that says what to install."""
    return import_module("outrider.serve.fleet.ray")


def arguments_of(flags: ServeFlags, threads: int) -> dict[str, Any]:
    """The arguments of the application that serves as these flags say."""
    config = {} if flags.data_parallel_config is None else json_object("--data-parallel-config", flags.data_parallel_config)
    if "flags" in config:
        raise InvalidParameter("--data-parallel-config", "holds no flags; pass them to outrider serve")
    number = flags.data_parallel_size
    share = max((flags.threads or threads) // number, 1)
    resources = _GPU_SHARE if flags.device == "cuda" else {"num_cpus": float(share)}
    scaling = {"min_replicas": number, "max_replicas": number} | dict(config.pop("scaling", {}))
    passed = {
        field.name: _plain(value)
        for field in fields(ServeFlags)
        if field.name not in _NOT_OF_REPLICAS and (value := getattr(flags, field.name)) != field.default
    }
    return {"flags": {**passed, "host": flags.host}, "scaling": scaling, **resources, **config}


def _open_cluster(ray: Any, arguments: dict[str, Any], folder: str) -> None:
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, configure_logging=False)
        return
    replicas = arguments["scaling"]["max_replicas"]
    cpus = max(os.cpu_count() or 1, int(replicas * arguments.get("num_cpus", 1.0)))
    settings = {"_temp_dir": folder, "_node_ip_address": "127.0.0.1", "object_store_memory": 128 * 2**20}
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, **settings)


def _close(ray: Any, serve: Any) -> None:
    try:
        if ray.is_initialized():
            serve.shutdown()
    finally:
        ray.shutdown()


def _plain(value: Any) -> Any:
    """A flag as a config file holds it."""
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
