"""`python -m benchmarks.experts`: mixtures of experts at real sizes without real weights, on a GPU.

Plain decoding beside the time in which the device reads the bytes that its rows touch, and `auto` over plain by batch with a
draft that agrees on a share of the tokens. Routers are random, so every token has experts of its own; `--shared` also plants
experts in the embedding, so that a token has half of those of the token before it.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run
from benchmarks.synthetic import Synthetic, cycles, timed
from outrider.bench.bandwidth import gpu_bandwidth
from outrider.engine.device import Device
from outrider.model import Feed, ModelSpec
from outrider.options import numbers

__all__ = ["plant_experts", "touched_bytes"]

_STRENGTH = 8.0  # of a planted expert in an embedding of standard deviation one
_TOKENS, _PAIRS = 56, 3  # a text repeats after 64 tokens, and lookups would hit


def touched_bytes(spec: ModelSpec, experts: float, width: int = 2) -> float:
    """Bytes of the matrices that a forward reads where each layer reads so many experts; routers are float32."""
    read = spec.vocab * spec.hidden * width
    for layer in spec.layers:
        a, m = layer.attention, layer.mlp
        dense = spec.hidden * (a.qkv_width + a.q_width) + spec.hidden * (m.shared_up_width + m.shared)
        each = spec.hidden * (m.up_width + m.width)
        read += int(width * (dense + each * (experts if m.router else 1)) + 4 * spec.hidden * m.router_width)
    return float(read)


@torch.no_grad()
def plant_experts(bench: Synthetic, seed: int = 1) -> None:
    """Give each token the experts of two blocks of half as many, of which the next token of its cycle has one too."""
    from outrider.model.cuda_experts import CudaExperts  # needs Triton

    runner = bench.target
    router = runner.decoder.spec.layers[0].mlp.router
    assert router is not None
    half, device = router.chosen // 2, runner.device
    generator = torch.Generator(device).manual_seed(seed)
    count, hidden = router.experts // half, runner.decoder.spec.hidden
    matrix = torch.nn.functional.normalize(torch.randn(router.experts, hidden, generator=generator, device=device))
    order = cycles(len(bench.perm), torch.Generator().manual_seed(0)).to(device)
    blocks = torch.randint(0, count, tuple(order.shape), generator=generator, device=device)  # of each place in its cycle
    blocks = torch.where(blocks == blocks.roll(1, 1), (blocks + 1) % count, blocks)
    embedding = torch.randn(len(bench.perm), hidden, generator=generator, device=device)
    members = matrix.view(-1, half, matrix.shape[1]).sum(1) * _STRENGTH
    embedding[order.flatten()] += members[blocks.flatten()] + members[blocks.roll(-1, 1).flatten()]
    cuda = runner.cuda
    cuda.embedding.copy_(embedding)
    assert isinstance(cuda.output, torch.Tensor)
    cuda.output[bench.perm.to(device)] = cuda.embedding
    for layer in cuda.layers:
        assert isinstance(layer.mlp, CudaExperts)
        layer.mlp.router.matrix.copy_(matrix)


def measure_plain(bench: Synthetic, batches: Sequence[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    """Plain rounds, and their forwards alone, as shares of the speed that the touched bytes allow."""
    spec, engine = bench.target.decoder.spec, bench.engine()
    for batch in batches:
        prompts = [bench.scattered(32, 1000 + 64 * i) for i in range(batch)]
        bench.run(engine, prompts, _TOKENS)
        runs = sorted((bench.run(engine, prompts, _TOKENS) for _ in range(_PAIRS)), key=lambda one: one.seconds)
        best = runs[_PAIRS // 2]
        graph = bench.target.rounds.graph(batch)
        tokens = torch.randint(0, spec.vocab, (batch,), generator=torch.Generator().manual_seed(3)).tolist()
        inputs = graph.sides[0].inputs
        bench.target.fill(inputs, [Feed([2 * b, 2 * b + 1], 64, [token]) for b, token in enumerate(tokens)])
        inputs.send()
        forward, experts = timed(graph.replay, 20), bench.target.cuda.experts_read
        floor, wall = touched_bytes(spec, experts) / bandwidth, best.seconds / best.rounds
        yield {
            "what": f"plain, batch {batch}", "tok_s": best.tok_s, "round_ms": wall * 1e3, "forward_ms": forward * 1e3,
            "experts": experts, "touched_gb": touched_bytes(spec, experts) / 1e9, "of_bytes": floor / wall,
            "forward_of_bytes": floor / forward, "right": all(one.right for one in runs),
        }  # fmt: skip


def measure_auto(bench: Synthetic, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """`auto` over plain decoding, in turns."""
    plain, auto = bench.engine(), bench.auto(max(batches))
    gc.collect()
    gc.freeze()  # a collection of all that torch and Triton keep takes longer than many rounds
    for batch in batches:
        prompts = [bench.scattered(32, 1000 + 64 * i) for i in range(batch)]
        for engine in (plain, auto):
            bench.run(engine, prompts, _TOKENS)
        pairs = [(bench.run(plain, prompts, _TOKENS), bench.run(auto, prompts, _TOKENS)) for _ in range(_PAIRS)]
        yield {
            "what": f"auto, batch {batch}", "plain_tok_s": statistics.median(a.tok_s for a, _ in pairs),
            "auto_over_plain": statistics.median(b.tok_s / a.tok_s for a, b in pairs),
            "tokens_per_round": statistics.median(b.tokens / b.rounds / batch for _, b in pairs),
            "right": all(one.right for pair in pairs for one in pair),
        }  # fmt: skip
    gc.unfreeze()


def main(
    shape: Annotated[str, typer.Option(help="qwen3-30b-a3b or gpt-oss-20b.")] = "qwen3-30b-a3b",
    batches: Annotated[str, typer.Option(help="Comma-separated, of plain decoding.")] = "1,8,32",
    drafted: Annotated[str, typer.Option(help="Comma-separated batches of `auto`; empty: none.")] = "1,4,16,64",
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens the draft guesses right.")] = 0.8,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the shape has.")] = None,
    shared: Annotated[bool, typer.Option(help="Then tokens that have half of the experts of the token before.")] = True,
) -> None:
    """Speed of mixtures of experts with synthetic weights on a GPU; one JSON line per number."""
    Device.resolve("cuda")
    bandwidth = gpu_bandwidth()
    print(json.dumps({"what": "reads", "tb_s": bandwidth / 1e12, "device": torch.cuda.get_device_name()}), flush=True)
    bench = Synthetic(agreement, layers=layers, shape=shape, draft="two layers")

    def show(rows: Iterator[dict[str, Any]], **about: Any) -> None:
        try:
            for row in rows:
                print(json.dumps({"shape": shape} | about | row), flush=True)
        except (RuntimeError, ValueError, AssertionError) as error:  # what follows is measured all the same
            print(json.dumps({"shape": shape} | about | {"error": str(error)[:500]}), flush=True)

    sizes = numbers("--drafted", drafted, int) if drafted else []
    show(measure_plain(bench, numbers("--batches", batches, int), bandwidth))
    if sizes:
        show(measure_auto(bench, sizes))
    if shared:
        plant_experts(bench)
        show(measure_plain(bench, [1], bandwidth), router="half shared")
        if sizes:
            show(measure_auto(bench, [1, *sizes[1:2]]), router="half shared")


if __name__ == "__main__":
    run(main)
