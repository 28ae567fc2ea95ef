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

__all__ = ["SHAPES", "bench_loading", "write_file"]

SHAPES = {  # hidden, layers, heads, KV heads, feed-forward, vocabulary
    "40m": (512, 12, 8, 4, 1536, 8192),
    "1.1b": (2048, 22, 32, 4, 5632, 32000),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
_BLOCK_BYTES = {"Q4_K": 144, "Q6_K": 210}
_SCALES = {"Q4_K": {0: 0.0004, 2: 0.003}, "Q6_K": {208: 0.00005}}  # float16 fields of a block, and usual values
_BLOCK = 256  # values


def write_file(path: Path, shape: str) -> int:
    """A Llama of a shape in the types that llama.cpp gives Q4_K_M; its size in bytes."""
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
    made: dict[tuple[int, int, str], Any] = {}

    def add(name: str, rows: int, columns: int, kind: str = "Q4_K") -> None:
        key = (rows, columns, kind)
        made[key] = made[key] if key in made else _blocks(*key)
        writer.add_tensor(name, made[key], raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", vocab, hidden)
    for layer in range(layers):
        more = "Q6_K" if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 else "Q4_K"
        for part, rows, columns, kind in (
            ("attn_q", hidden, hidden, "Q4_K"), ("attn_k", kv_heads * hidden // heads, hidden, "Q4_K"),
            ("attn_v", kv_heads * hidden // heads, hidden, more), ("attn_output", hidden, hidden, "Q4_K"),
            ("ffn_gate", ffn, hidden, "Q4_K"), ("ffn_up", ffn, hidden, "Q4_K"), ("ffn_down", hidden, ffn, more),
        ):  # fmt: skip
            add(f"blk.{layer}.{part}.weight", rows, columns, kind)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    add("output.weight", vocab, hidden, "Q6_K")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def _blocks(rows: int, columns: int, kind: str) -> Any:
    """Blocks of random bits whose scales are of a usual size."""
    random, count = np.random.default_rng(rows + columns), rows * columns // _BLOCK
    blocks = random.integers(0, 256, (count, _BLOCK_BYTES[kind]), dtype=np.uint8)
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
