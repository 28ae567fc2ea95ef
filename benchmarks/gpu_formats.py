"""`python -m benchmarks.gpu_formats`: synthetic models in quantised forms beside bf16 on a GPU, in one run.

`--layers 1` compiles the kernels of everything that follows, so that several forms may do so side by side.
"""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.command import run
from benchmarks.synthetic import SHAPES, Synthetic, measure_engine
from benchmarks.synthetic_forms import FORMS
from outrider.engine.device import Device
from outrider.model.placement import weights_on_gpu
from outrider.options import numbers

__all__ = ["Sizes", "measure_form"]

_PROMPT, _PAGES = 64, 8  # pages of each sequence of a single forward
_PLAIN = "bf16"
# Bytes of a weight in the files of such a checkpoint: scales are float16 for 128 inputs, zero points take four bits.
_STORED = {_PLAIN: 2.0, "fp8": 1.0, "fp8_blocks": 1.0, "int8": 1.0, "int4": 0.516, "int4_zeros": 0.52}


class Sizes(NamedTuple):
    """How much is measured."""

    drafts: Sequence[str]  # shapes of draft models
    drafted: Sequence[int]
    batches: Sequence[int]
    tokens: int
    layers: int | None = None  # of the models; None: all


def measure_form(shape: str, form: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Memory of the weights, single forwards of several rows, and plain decoding and draft models at batch 1."""
    about, begun = {"shape": shape, "form": form}, torch.cuda.memory_allocated()
    pages = 64 + _PAGES * max(sizes.batches)
    bench = Synthetic(layers=sizes.layers, pages=pages, shape=shape, form="" if form == _PLAIN else form)
    kv = bench.target.pool.keys.nbytes + bench.target.pool.values.nbytes
    yield about | {
        "what": "memory", "weights_gb": (torch.cuda.memory_allocated() - begun - kv) / 1e9, "kv_gb": kv / 1e9,
        "read_gb": bench.target.weight_bytes / 1e9, "planned_gb": _planned(shape, form, sizes.layers) / 1e9,
    }  # fmt: skip
    for batch in sizes.batches:
        yield about | {"what": f"forward of {batch}", "ms": bench.forward_seconds(batch, 128, batch) * 1e3}
    for i, draft in enumerate(sizes.drafts or [""]):
        if draft:
            bench.use_draft(draft)
        for row in measure_engine(bench, sizes.drafted if draft else (), sizes.tokens, _PROMPT, lookups=()):
            if i == 0 or row["what"] != "plain":
                yield about | {"draft": draft} | row


def _planned(shape: str, form: str, layers: int | None) -> int:
    """Bytes that the planner expects of a checkpoint in this form."""
    spec = replace(SHAPES[shape], layers=SHAPES[shape].layers[:layers])
    return weights_on_gpu(replace(spec, layer_bytes=_STORED[form]))


def main(
    forms: Annotated[str, typer.Option(help=f"Comma-separated: {_PLAIN}, {', '.join(FORMS)}.")] = ",".join((_PLAIN, *FORMS)),
    shape: Annotated[str, typer.Option(help="8b or 70b.")] = "8b",
    drafts: Annotated[str, typer.Option(help="Comma-separated shapes of drafts, in the target's form.")] = "1b",
    batches: Annotated[str, typer.Option(help="Comma-separated rows of single forwards.")] = "1,32,64",
    drafted: Annotated[str, typer.Option(help="Comma-separated numbers of draft tokens.")] = "4",
    tokens: Annotated[int, typer.Option(help="Tokens of every text.")] = 192,
    layers: Annotated[int | None, typer.Option(help="Layers of the models; all by default.")] = None,
) -> None:
    """Speed of quantised models with synthetic weights on a GPU; one JSON line per number."""
    Device.resolve("cuda")
    named = [name for name in drafts.split(",") if name]
    sizes = Sizes(named, numbers("--drafted", drafted, int), numbers("--batches", batches, int), tokens, layers)
    for form in forms.split(","):
        try:
            for row in measure_form(shape, form, sizes):
                print(json.dumps(row), flush=True)
        except Exception:
            print(json.dumps({"shape": shape, "form": form, "error": traceback.format_exc()[-1500:]}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(main)
