"""`python -m benchmarks.gpu_formats`: synthetic models in quantised forms beside bf16 on a GPU, in one run.

Other processes compile the products first, side by side, while this one compiles what all forms share.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from benchmarks.synthetic import SHAPES, Synthetic, measure_engine
from benchmarks.synthetic_forms import FORMS, random_matrix
from outrider.engine.device import Device
from outrider.model.decoder import RopeTable
from outrider.model.placement import weights_on_gpu
from outrider.options import numbers

__all__ = ["PLAIN", "Sizes", "compile_all", "compile_products", "measure_form"]

_PROMPT, _PAGES = 64, 8  # pages of each sequence of a single forward
PLAIN = "bf16"
# Bytes of a weight in the files of such a checkpoint: scales are float16 for 128 inputs, zero points take four bits.
_STORED = {PLAIN: 2.0, "fp8": 1.0, "fp8_blocks": 1.0, "int8": 1.0, "int4": 0.516, "int4_zeros": 0.52}


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
    bench = Synthetic(layers=sizes.layers, pages=pages, shape=shape, form="" if form == PLAIN else form)
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


def compile_products(shape: str, form: str, rows: int, device_name: str = "cuda") -> None:
    """Run every product of a layer and the output matrix once, which puts their kernels into Triton's cache on disk."""
    from outrider.model.cuda_attention import turns_of
    from outrider.model.cuda_stack import kernel_shape
    from outrider.model.cuda_weights import Upload
    from outrider.ops.cuda.launch import AttentionMetadata, HeadForm, Kernels

    spec, device = SHAPES[shape], torch.device(device_name)
    a, m = spec.attention, spec.layers[0].mlp
    k, upload = Kernels(kernel_shape(spec, 64), torch.bfloat16), Upload(device, torch.bfloat16)

    def matrix(columns: int, inner: int, kind: str = form) -> Any:
        if kind == PLAIN:
            return upload.matrix(torch.randn(columns, inner, device=device))
        return upload.matrix(random_matrix(kind, columns, inner, device=device_name))

    def some(width: int) -> Tensor:
        return torch.randn(rows, width, device=device).bfloat16()

    none = torch.zeros(rows, dtype=torch.int32, device=device)
    meta = AttentionMetadata(none, none, none, none, none, none, none[None], none[:, None], none.float(), none.long())
    pool = tuple(torch.zeros(1, a.kv_heads, 64, a.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    heads = HeadForm(turns_of(RopeTable(spec.ropes[0], a.head_dim, 64), device))
    qkv, gate_up = matrix(a.qkv_width, spec.hidden), matrix(m.up_width, spec.hidden)
    k.qkv(some(spec.hidden), qkv, None, heads, some(a.q_width), pool, meta)  # type: ignore[arg-type]
    parts = k.parts(some(a.q_width), matrix(spec.hidden, a.q_width))
    read = k.finish_as(gate_up.reads, parts, None, torch.zeros(rows, spec.hidden, device=device), None)
    k.parts(k.activated(read, gate_up, None, m.activation, m.gated), matrix(spec.hidden, m.width))
    output = matrix(
        spec.vocab, spec.hidden, form if form == PLAIN or (form.startswith("fp8") and "block" not in form) else "int8"
    )
    k.linear(some(spec.hidden), output, None, torch.empty(rows, spec.vocab, device=device))


def compile_all(shape: str, forms: Sequence[str], sizes: Sizes) -> None:
    """Compile the products of all forms in processes of their own, and what they share here."""
    jobs = [(name, form, rows) for form in forms for name in (shape, *sizes.drafts) for rows in sizes.batches]
    jobs = [(name, form, rows) for name, form, rows in jobs if name == shape or rows == 1]
    command = [sys.executable, "-m", "benchmarks.gpu_formats", "--part"]
    processes = [subprocess.Popen([*command, f"{name},{form},{rows}"]) for name, form, rows in jobs]
    for _ in measure_form(shape, PLAIN, sizes._replace(layers=1, tokens=8, drafted=sizes.drafted[:1])):
        pass
    gc.collect()
    torch.cuda.empty_cache()
    for process in processes:
        process.wait()


def _planned(shape: str, form: str, layers: int | None) -> int:
    """Bytes that the planner expects of a checkpoint in this form."""
    spec = replace(SHAPES[shape], layers=SHAPES[shape].layers[:layers])
    return weights_on_gpu(replace(spec, layer_bytes=_STORED[form]))


def main(
    forms: Annotated[str, typer.Option(help=f"Comma-separated: {PLAIN}, {', '.join(FORMS)}.")] = ",".join((PLAIN, *FORMS)),
    shape: Annotated[str, typer.Option(help="8b or 70b.")] = "8b",
    drafts: Annotated[str, typer.Option(help="Comma-separated shapes of drafts, in the target's form.")] = "1b",
    batches: Annotated[str, typer.Option(help="Comma-separated rows of single forwards.")] = "1,32,64",
    drafted: Annotated[str, typer.Option(help="Comma-separated numbers of draft tokens.")] = "4",
    tokens: Annotated[int, typer.Option(help="Tokens of every text.")] = 192,
    layers: Annotated[int | None, typer.Option(help="Layers of the models; all by default.")] = None,
    part: Annotated[str, typer.Option(help="Compile the products of this shape, form and row count alone.", hidden=True)] = "",
) -> None:
    """Speed of quantised models with synthetic weights on a GPU; one JSON line per number."""
    Device.resolve("cuda")
    if part:
        name, form, rows = part.split(",")
        return compile_products(name, form, int(rows))
    named = [name for name in drafts.split(",") if name]
    sizes = Sizes(named, numbers("--drafted", drafted, int), numbers("--batches", batches, int), tokens, layers)
    begun = time.perf_counter()
    compile_all(shape, forms.split(","), sizes)
    print(json.dumps({"what": "compiled", "seconds": time.perf_counter() - begun}), flush=True)
    for form in forms.split(","):
        try:
            for row in measure_form(shape, form, sizes):
                print(json.dumps(row), flush=True)
        except Exception:
            print(json.dumps({"shape": shape, "form": form, "error": traceback.format_exc()[-1500:]}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    run(main)
