"""`python -m benchmarks.formats`: what each format takes on disk and in memory, what it costs in quality, and how fast it runs.

The model is written in every format that `outrider quantize` knows, and served as it is stored. GPTQ is calibrated with files of
Python's standard library. Loss is that of held-out text by the runner that serves. Forwards of all formats are interleaved.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import errors, run
from benchmarks.forward import CallTimes
from outrider.bench.environment import environment
from outrider.cache import KVPool
from outrider.model import Feed, LoadOptions, Runner, locate, open_decoder
from outrider.model.bundled import bundled_model
from outrider.options import Model, Threads, set_threads
from outrider.quantize.folder import quantise_folder
from outrider.quantize.loss import encoded, mean_loss, read_texts
from outrider.quantize.scheme import Scheme

__all__ = ["bench_formats"]

_PAGE, _CONTEXT, _ROWS = 64, 256, (1, 4, 8)
_LONGEST, _CALIBRATION_FILES = 512, 40


@dataclass(frozen=True, slots=True)
class _Format:
    """A format: what is served, as which dtype, and how it was written."""

    name: str
    dtype: str = "auto"
    scheme: Scheme | None = None  # None: the model's own folder
    by_gptq: bool = False


_FORMATS = (
    _Format("bfloat16", "bfloat16"),
    _Format("dtype=int8", "int8"),
    _Format("dtype=int4", "int4"),
    _Format("int8", scheme=Scheme("int8")),
    _Format("fp8", scheme=Scheme("fp8")),
    _Format("int4", scheme=Scheme("int4")),
    _Format("int4", scheme=Scheme("int4", 32)),
    _Format("int4, GPTQ", scheme=Scheme("int4"), by_gptq=True),
    _Format("int4, GPTQ", scheme=Scheme("int4", 32), by_gptq=True),
)


def bench_formats(model: Path, text: Path | None, calibration_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """One row per format; `change` of the loss is against the first."""
    texts = encoded(model, read_texts(text), _LONGEST)
    calibration = encoded(model, [_standard_library()], _LONGEST, calibration_tokens)
    rows: list[dict[str, Any]] = []
    runners: list[Runner] = []
    with tempfile.TemporaryDirectory() as root:
        for i, form in enumerate(_FORMATS):
            folder, group_size = model if form.scheme is None else Path(root) / str(i), 0
            if form.scheme is not None:
                written = quantise_folder(model, folder, form.scheme, calibration if form.by_gptq else ())
                group_size = written.scheme.group_size
            loss = mean_loss(folder, texts, form.dtype)
            errors.print(f"{form.name}: loss {loss:.4f}")
            runners.append(_runner(folder, form.dtype))
            stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            rows.append({
                "format": form.name, "group_size": group_size, "file_bytes": None if form.scheme is None else stored,
                "loss": round(loss, 5), "change": round(loss / rows[0]["loss"] - 1, 6) if rows else 0.0,
                "bytes_read": runners[-1].weight_bytes,
            })  # fmt: skip
        for row, times in zip(rows, _times(runners, repeats) if repeats else (), strict=False):
            row["ms"] = {count: round(watch.ms, 4) for count, watch in times.items()}
    return rows


def _times(runners: Sequence[Runner], repeats: int) -> list[dict[int, CallTimes]]:
    """Forwards of some rows with their logits, by row count."""
    watches = [{count: CallTimes() for count in _ROWS} for _ in runners]
    pages, order, shuffle = range(_CONTEXT // _PAGE + 1), list(range(len(runners))), random.Random(0)
    tokens = [i * 7919 % runners[0].decoder.spec.vocab for i in range(_CONTEXT + max(_ROWS))]
    for runner in runners:
        runner.forward([Feed(pages, 0, tokens[:_CONTEXT])])
    for _ in range(repeats):
        shuffle.shuffle(order)
        for i in order:
            for count in _ROWS:
                feed = [Feed(pages, _CONTEXT, tokens[:count])]
                watches[i][count].time(partial(runners[i].forward, feed, (), range(count)))
    return watches


def _runner(folder: Path, dtype: str) -> Runner:
    decoder = open_decoder(folder, LoadOptions(dtype))
    c = decoder.spec
    runner = Runner(decoder, KVPool(c.depth, _CONTEXT // _PAGE + 2, c.kv_heads, _PAGE, c.head_dim))
    decoder.close()
    return runner


def _standard_library() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_CALIBRATION_FILES]
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/quantisation.md."""
    lines = ["| format | file | read for a token | loss | 1 row | 4 rows | 8 rows |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        groups = f", groups of {row['group_size']}" if row["group_size"] else ""
        stored = f"{row['file_bytes'] / 1e6:.1f} MB" if row["file_bytes"] else ""
        change = f"{row['change']:+.2%}".replace("+", "+ ").replace("-", "- ").replace("%", " %")
        loss = f"{row['loss']:.3f}" if row is rows[0] else change
        cells = [row["format"] + groups, stored, f"{row['bytes_read'] / 1e6:.1f} MB", loss]
        cells += [f"{row['ms'][count]:.2f} ms" if "ms" in row else "" for count in _ROWS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    model: Model = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text, or JSONL of texts. Default: bundled code.")] = None,
    calibration_tokens: Annotated[int, typer.Option(min=2, help="Tokens that GPTQ reads.")] = 16384,
    repeats: Annotated[int, typer.Option(min=0, help="Times that each forward runs, interleaved; 0 measures no time.")] = 60,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/quantisation.md instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    threads: Threads = None,
) -> None:
    """Size, loss and speed of a model in every format."""
    set_threads(threads)
    source = bundled_model() if model is None else locate(model)
    conditions = {"threads": threads or torch.get_num_threads(), "load_average": os.getloadavg()[0], "context": _CONTEXT}
    rows = bench_formats(source, text, calibration_tokens, repeats)
    report = json.dumps(environment() | conditions | {"rows": rows}, indent=1)
    print(as_table(rows) if markdown else report)
    if out is not None:
        out.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
