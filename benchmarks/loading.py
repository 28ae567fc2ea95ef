"""`python -m benchmarks.loading`: how fast weights are read from warm files and packed, and how much memory that takes.

Each load is a process of its own. Memory is what the process holds beside mapped files (RssAnon), sampled while it loads; the
checkpoint of random weights is deleted afterwards. On a machine that others use too, processor time says more than seconds; on
virtual machines system time is mostly memory that the process is the first to touch.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from benchmarks.command import run
from benchmarks.forward import RANDOM_MODELS
from outrider.bench.environment import environment
from outrider.cache import KVPool
from outrider.model import LoadOptions, ModelSpec, Runner, open_decoder, write_config
from outrider.model.decoder import Decoder
from outrider.model.families import places_of
from outrider.model.files import INDEX
from outrider.options import Threads, set_threads

__all__ = ["bench_loading", "load_in_a_process", "write_checkpoint"]

_SAMPLE_S = 0.004


def write_checkpoint(spec: ModelSpec, directory: Path) -> int:
    """Random bf16 weights of a spec, a shard per layer; the bytes that were written. All layers hold the same numbers."""
    with torch.device("meta"):
        parameters = dict(Decoder(spec, torch.bfloat16).named_parameters())
    shards: dict[str, dict[str, torch.Tensor]] = {}
    made: dict[tuple[int, ...], torch.Tensor] = {}
    for name, place in places_of(spec).items():
        shape = place.shape(parameters[place.parameter])
        if shape not in made:
            made[shape] = (torch.randn(shape) * 0.02).bfloat16() if len(shape) == 2 else torch.ones(shape)
        part = ".".join(place.parameter.split(".")[:2]) if place.parameter.startswith("layers.") else place.parameter
        shards.setdefault(part, {})[name] = made[shape]
    write_config(spec, directory)
    for part, tensors in shards.items():  # tensors of one file may not share memory
        apart = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(apart, directory / f"{part}.safetensors")
    weight_map = {name: f"{part}.safetensors" for part, tensors in shards.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def bench_loading(model: str, dtypes: list[str], repeats: int, threads: int) -> dict[str, Any]:
    """Seconds and memory of each load, with the best of each dtype as bytes per second."""
    spec, results = RANDOM_MODELS[model], []
    with tempfile.TemporaryDirectory() as folder:
        stored = write_checkpoint(spec, Path(folder))
        for dtype in dtypes:
            loads = [load_in_a_process(folder, dtype, threads) for _ in range(repeats + 1)][1:]  # the first one warms the files
            best = min(load["seconds"] for load in loads)
            results.append({"dtype": dtype, "gb_per_s": round(stored / best / 1e9, 3), "loads": loads})
    conditions = {"threads": threads, "load_average": os.getloadavg()[0]}
    return (
        environment() | conditions | {"model": model, "parameters": spec.parameters, "stored_bytes": stored, "results": results}
    )


def load_in_a_process(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Load a folder or file once, in a process that ends with it."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_load, (folder, dtype, threads))


def _load(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Load once; memory is over what the process held before, and `over_packed` over what the loaded model holds."""
    set_threads(threads)
    before, peak, done = _held_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            peak[0] = max(peak[0], _held_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    decoder = open_decoder(Path(folder), LoadOptions(dtype))
    c = decoder.spec
    runner = Runner(decoder, KVPool(c.depth, 2, c.kv_heads, 64, c.head_dim))
    decoder.close()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    done.set()
    watcher.join()
    held = _held_bytes()
    largest = max(place.numel() for place in decoder.parameters()) * 2
    return {
        "seconds": round(seconds, 3), "user_seconds": round(after.ru_utime - used.ru_utime, 3),
        "system_seconds": round(after.ru_stime - used.ru_stime, 3), "weight_bytes": runner.weight_bytes,
        "held_bytes": held - before, "peak_bytes": max(peak[0], held) - before,
        "peak_over_held_in_largest_tensors": round((max(peak[0], held) - held) / largest, 2),
    }  # fmt: skip


def _held_bytes() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(RANDOM_MODELS)}.")] = "1.1b",
    dtypes: Annotated[str, typer.Option(help="What the weights are served in.")] = "bfloat16,int8",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    threads: Threads = None,
) -> None:
    """Measure loading."""
    report = json.dumps(bench_loading(model, dtypes.split(","), repeats, threads or torch.get_num_threads()), indent=1)
    print(report)
    if out is not None:
        out.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
