"""`python -m benchmarks.formats_llama`: forwards over quantised files, here and in llama.cpp, interleaved.

Both read the same file, of random blocks, which is deleted afterwards. llama.cpp is a process of its own, which waits while this
one computes; --packages names the folder where llama_cpp is installed, if it is not in this environment. A forward reads some
tokens after a context and makes the logits of each. Q8_0 is served as int8 here, other files as they are stored.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run
from benchmarks.loading_gguf import KINDS, SHAPES, write_file
from outrider.bench.bandwidth import reading
from outrider.bench.environment import environment
from outrider.cache import KVPool
from outrider.model import Feed, LoadOptions, Runner, open_decoder
from outrider.ops import find_core
from outrider.options import Threads, set_threads

__all__ = ["LlamaProcess", "bench_file"]

_ROWS = (1, 4, 8)
_CONTEXT = 256
_PAGE = 64
_READ_MB = 512  # of each measurement of the bandwidth
_DTYPES = {"Q8_0": "int8"}


class LlamaProcess:
    """llama.cpp with a file, in a process."""

    def __init__(self, path: Path, threads: int, packages: Path | None) -> None:
        worker = Path(__file__).parent / "baselines" / "llama_rows.py"
        paths = [] if packages is None else [str(packages.resolve())]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, str(worker), str(path), str(threads), str(_CONTEXT)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.version = str(self._answer()["version"])

    def seconds(self, rows: int) -> float:
        """Of one forward."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("llama.cpp ended; is llama_cpp installed? --packages names its folder")


def bench_file(shape: str, kind: str, repeats: int, threads: int, packages: Path | None) -> dict[str, Any]:
    """Tokens per second of both by row count, and the share of the memory's bandwidth that one row takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model.{kind}.gguf"
        size = write_file(path, shape, kind)
        llama = LlamaProcess(path, threads, packages)
        runner = _runner(path, _DTYPES.get(kind, "auto"))
    core, memory = find_core()[0], torch.ones(_READ_MB * 2**18)
    tokens = [i * 7919 % runner.decoder.spec.vocab for i in range(_CONTEXT + max(_ROWS))]
    pages = range(_CONTEXT // _PAGE + 1)
    runner.forward([Feed(pages, 0, tokens[:_CONTEXT])])
    works: dict[str, Callable[[], float]] = {"read": partial(_timed, reading(core, memory))}
    for rows in _ROWS:
        feed = [Feed(pages, _CONTEXT, tokens[:rows])]
        works[f"ours {rows}"] = partial(_timed, partial(runner.forward, feed, (), range(rows)))
        works[f"llama.cpp {rows}"] = partial(llama.seconds, rows)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):  # the first one warms up
        for name, work in works.items():
            seconds = work()
            if repeat:
                taken[name].append(seconds)
    llama.close()
    best = {name: min(seconds) for name, seconds in taken.items()}
    bandwidth = memory.nbytes / best["read"]
    rows_of = {
        rows: {
            "ours_ms": round(best[f"ours {rows}"] * 1e3, 3), "llama_ms": round(best[f"llama.cpp {rows}"] * 1e3, 3),
            "ours_median_ms": round(statistics.median(taken[f"ours {rows}"]) * 1e3, 3),
            "llama_median_ms": round(statistics.median(taken[f"llama.cpp {rows}"]) * 1e3, 3),
            "ratio": round(best[f"llama.cpp {rows}"] / best[f"ours {rows}"], 3),
        }
        for rows in _ROWS
    }  # fmt: skip
    return {
        "shape": shape, "file": kind, "file_bytes": size, "served_as": _DTYPES.get(kind, "as stored"),
        "bytes_read": runner.weight_bytes, "gb_s": round(bandwidth / 1e9, 2),
        "tok_s": round(1 / best["ours 1"], 2), "llama_tok_s": round(1 / best["llama.cpp 1"], 2),
        "bandwidth_share": round(runner.weight_bytes / best["ours 1"] / bandwidth, 3),
        "rows": rows_of, "over_one_row": {rows: round(best[f"ours {rows}"] / best["ours 1"], 3) for rows in _ROWS[1:]},
        "llama_cpp": llama.version,
    }  # fmt: skip


def _runner(path: Path, dtype: str) -> Runner:
    decoder = open_decoder(path, LoadOptions(dtype))
    c = decoder.spec
    runner = Runner(decoder, KVPool(c.depth, _CONTEXT // _PAGE + 2, c.kv_heads, _PAGE, c.head_dim))
    decoder.close()
    return runner


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main(
    shapes: Annotated[str, typer.Option(help=f"Some of {', '.join(SHAPES)}, with commas.")] = "1.1b,40m",
    files: Annotated[str, typer.Option(help=f"Some of {', '.join(KINDS)}, with commas.")] = ",".join(KINDS),
    repeats: Annotated[int, typer.Option(min=1, help="Times that each forward runs, interleaved.")] = 20,
    packages: Annotated[Path | None, typer.Option(help="Folder where llama_cpp is installed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the report here, beside the files it holds already.")] = None,
    threads: Threads = None,
) -> None:
    """Compare forwards over quantised files with llama.cpp's."""
    set_threads(threads)
    count = threads or torch.get_num_threads()
    conditions = environment() | {"threads": count, "load_average": os.getloadavg()[0], "context": _CONTEXT}
    for shape in shapes.split(","):
        for kind in files.split(","):
            row = conditions | bench_file(shape, kind, repeats, count, packages)
            print(json.dumps(row), flush=True)
            if out is not None:
                _write(out, row)


def _write(out: Path, row: dict[str, Any]) -> None:
    """Add a row to a report, in place of one of the same shape and file."""
    rows: Sequence[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else ()
    kept = [other for other in rows if (other["shape"], other["file"]) != (row["shape"], row["file"])]
    out.write_text(json.dumps([*kept, row], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
