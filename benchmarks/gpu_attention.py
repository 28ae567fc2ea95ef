"""Seconds per layer of attention over paged KV on a GPU, for decode rows, draft trees and prompts of a Llama-8B shape.

    PYTHONPATH=src:. python -m benchmarks.gpu_attention [--only PART] [--set name=value ...]

Several pools take turns, so that the L2 cache does not serve what a model would read from memory. Prints one JSON line each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.ops.cuda import attention_launch
from outrider.ops.cuda.launch import AttentionMetadata, Kernels, Shape

HEADS, KV_HEADS, HEAD, PAGE = 32, 8, 128, 64
DECODE = [(1, 512), (1, 2048), (1, 8192), (1, 32768), (1, 60000), (8, 8192), (64, 512), (64, 4096), (256, 512), (256, 2048)]
TREES = [(4, 8192), (25, 2048), (61, 2048), (61, 32768)]  # rows of one sequence
PROMPTS = [2048, 8192, 32768]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "trees", "mixed", "prompts"))
    parser.add_argument("--set", nargs="*", default=[], help="attributes of AttentionKernels, or module constants, as name=value")
    options = parser.parse_args()
    settings = dict(pair.split("=") for pair in options.set)
    kernels = Kernels(Shape(HEADS, KV_HEADS, HEAD, PAGE), torch.bfloat16)
    for name, value in settings.items():
        owner = kernels._attention if hasattr(kernels._attention, name) else attention_launch
        setattr(owner, name, int(value))
    for part, measure in (("decode", decode), ("trees", trees), ("mixed", mixed), ("prompts", prompts)):
        if options.only in (None, part):
            for row in measure(kernels):
                print(json.dumps({"part": part} | row | settings), flush=True)


def decode(kernels: Kernels) -> list[dict[str, Any]]:
    return [{"rows": rows, "context": context} | time_rows(kernels, [context] * rows) for rows, context in DECODE]


def mixed(kernels: Kernels) -> list[dict[str, Any]]:
    """One long sequence among short ones."""
    return [{"rows": rows, "context": "1 x 60000, 512"} | time_rows(kernels, [60000] + [512] * (rows - 1)) for rows in (64, 256)]


def time_rows(kernels: Kernels, contexts: list[int]) -> dict[str, Any]:
    size = sum(contexts) * KV_HEADS * HEAD * 4
    widths = [context // PAGE + 1 for context in contexts]
    pools = pools_of(sum(widths), size)
    order = torch.randperm(sum(widths), device="cuda").int()
    table = torch.zeros(len(contexts), 64 * 1024 // PAGE, dtype=torch.int32, device="cuda")  # a limit of 64k
    for b, part in enumerate(torch.split(order, widths)):
        table[b, : len(part)] = part
    positions = torch.tensor(contexts, dtype=torch.int32, device="cuda") - 1
    meta = metadata(table, torch.arange(len(contexts)), positions, positions, positions[:, None])
    return time_layers(kernels, meta, pools, size)


def trees(kernels: Kernels) -> list[dict[str, Any]]:
    results = []
    for rows, context in TREES:
        width = context // PAGE + 3
        pools = pools_of(width, context * KV_HEADS * HEAD * 4)
        table = torch.zeros(1, 64 * 1024 // PAGE, dtype=torch.int32, device="cuda")
        table[0, :width] = torch.randperm(width).int()
        depths = torch.tensor([0] + [1 + i % 6 for i in range(rows - 1)], dtype=torch.int32, device="cuda")
        roots = torch.full_like(depths, context - 1)
        ancestors = torch.zeros(rows, 256, dtype=torch.int32, device="cuda")
        meta = metadata(table, torch.zeros(rows), roots + depths, roots, ancestors)
        size = context * KV_HEADS * HEAD * 4
        results.append({"rows": rows, "context": context} | time_layers(kernels, meta, pools, size))
    return results


def metadata(table: Tensor, sequences: Tensor, positions: Tensor, roots: Tensor, ancestors: Tensor) -> AttentionMetadata:
    zero = torch.zeros_like(positions)
    return AttentionMetadata(
        zero, sequences.int().cuda(), positions, roots, zero, zero, table, ancestors.contiguous(), zero.float(), zero.long()
    )


def pools_of(pages: int, size: int) -> list[tuple[Tensor, Tensor]]:
    copies = max(1, min(8, 400_000_000 // size + 1))
    shape = (pages, KV_HEADS, PAGE, HEAD)
    return [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(copies)]  # type: ignore[misc]


def time_layers(kernels: Kernels, meta: AttentionMetadata, pools: list[tuple[Tensor, Tensor]], size: int) -> dict[str, Any]:
    """A forward of 16 layers, its work listed once."""
    q = torch.randn(len(meta.tokens), HEADS * HEAD, device="cuda", dtype=torch.bfloat16)
    out, layers = torch.empty_like(q), 16

    def forward() -> None:
        once = meta.for_forward()
        for layer in range(layers):
            kernels.attend_rows(q, pools[layer % len(pools)], once, out, None)

    seconds = graph_seconds(forward) / layers
    return {"us": round(seconds * 1e6, 1), "TBps": round(size / seconds / 1e12, 2)}


def prompts(kernels: Kernels) -> list[dict[str, Any]]:
    return [{"tokens": length} | time_prompt(kernels, length) for length in PROMPTS]


def time_prompt(kernels: Kernels, length: int) -> dict[str, Any]:
    """One layer of a prompt that is read at once."""
    step, pages = kernels.chunk_tokens, length // PAGE
    pool = pools_of(pages, 10**12)[0]
    table = torch.randperm(pages, device="cuda").int()[None].contiguous()
    q = torch.randn(length, HEADS * HEAD, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    starts = reversed(range(0, length, step))  # the longest context first
    chunks = torch.tensor([(i, min(step, length - i), i, 0, 0) for i in starts], dtype=torch.int32, device="cuda")
    seconds = graph_seconds(lambda: kernels.attend_chunks(q, pool, table, chunks, out, None))
    work = 4 * HEADS * HEAD * length * (length + 1) / 2
    return {"us": round(seconds * 1e6, 1), "TFLOPs": round(work / seconds / 1e12)}


def graph_seconds(work: Callable[[], None], repeats: int = 5) -> float:
    """The median time of a captured graph's replay."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended) * 1e-3)
    return sorted(times[1:])[repeats // 2]


if __name__ == "__main__":
    main()
