"""`python -m benchmarks.loading_gguf`: how fast a GGUF file of Q4_K_M's types is read from a warm cache, and in how much memory.

The file has random blocks, the same ones in every layer, and is deleted afterwards. Each load is a process of its own; see
`benchmarks.loading` for what its memory is.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.command import run
from benchmarks.loading import load_in_a_process
from outrider.bench.environment import environment
from outrider.options import Threads, set_threads

__all__ = ["KINDS", "SHAPES", "bench_loading", "write_file"]

SHAPES = {  # hidden, layers, heads, KV heads, feed-forward, vocabulary
    "40m": (512, 12, 8, 4, 1536, 8192),
    "1.1b": (2048, 22, 32, 4, 5632, 32000),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
KINDS = ("Q4_K_M", "Q4_0", "Q8_0")  # of files
_BLOCKS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}  # values and bytes of a block
_SCALES = {  # float16 fields of a block, and usual values
    "Q4_0": {0: 0.004}, "Q8_0": {0: 0.0003}, "Q4_K": {0: 0.0004, 2: 0.003}, "Q6_K": {208: 0.00005},
}  # fmt: skip


def write_file(path: Path, shape: str, kind: str = "Q4_K_M") -> int:
    """A Llama of a shape in the types that llama.cpp gives a kind of file; its size in bytes."""
    import gguf

    hidden, layers, heads, kv_heads, ffn, vocab = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    most = "Q4_K" if kind == "Q4_K_M" else kind
    made: dict[tuple[int, int, str], Any] = {}

    def add(name: str, rows: int, columns: int, of: str = most) -> None:
        key = (rows, columns, of)
        made[key] = made[key] if key in made else _blocks(*key)
        writer.add_tensor(name, made[key], raw_dtype=gguf.GGMLQuantizationType[of])

    add("token_embd.weight", vocab, hidden)
    for layer in range(layers):
        wider = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        more = "Q6_K" if kind == "Q4_K_M" and wider else most
        for part, rows, columns, of in (
            ("attn_q", hidden, hidden, most), ("attn_k", kv_heads * hidden // heads, hidden, most),
            ("attn_v", kv_heads * hidden // heads, hidden, more), ("attn_output", hidden, hidden, most),
            ("ffn_gate", ffn, hidden, most), ("ffn_up", ffn, hidden, most), ("ffn_down", hidden, ffn, more),
        ):  # fmt: skip
            add(f"blk.{layer}.{part}.weight", rows, columns, of)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    add("output.weight", vocab, hidden, "Q8_0" if kind == "Q8_0" else "Q6_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def _blocks(rows: int, columns: int, kind: str) -> Any:
    """Blocks of random bits whose scales are of a usual size."""
    values, size = _BLOCKS[kind]
    random, count = np.random.default_rng(rows + columns), rows * columns // values
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at, value in _SCALES[kind].items():
        scales = (value * random.uniform(0.5, 1.5, count)).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def bench_loading(shape: str, repeats: int, threads: int, folder: Path | None = None) -> dict[str, Any]:
    """Seconds and memory of each load from a warm file cache."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / "model.Q4_K_M.gguf"
        size = write_file(path, shape)
        loads = [load_in_a_process(str(path), "auto", threads) for _ in range(repeats + 1)][1:]  # the first one warms the cache
    peak = max(load["peak_bytes"] for load in loads) / size
    conditions = {"threads": threads, "load_average": os.getloadavg()[0], "model": shape, "file_bytes": size}
    results = {"seconds": min(load["seconds"] for load in loads), "peak_over_file": round(peak, 3), "loads": loads}
    return environment() | conditions | results


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "8b",
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="Where the file is written; 8b takes 5 GB. Default: the temporary folder.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    threads: Threads = None,
) -> None:
    """Measure how a GGUF file is loaded."""
    set_threads(threads)
    report = json.dumps(bench_loading(model, repeats, threads or torch.get_num_threads(), folder), indent=1)
    print(report)
    if out is not None:
        out.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
