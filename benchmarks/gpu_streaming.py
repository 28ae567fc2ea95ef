"""`python -m benchmarks.gpu_streaming`: an 8B-shaped model on a GPU that may use 6 GB, plainly and with trees of a 1B draft.

Weights are synthetic, as in benchmarks.synthetic: the target's choice after a token is a permutation of the vocabulary. The
draft's first to fourth candidates after a token are that choice with planted probabilities, which are also what it says.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command import run
from benchmarks.gpu import gpu_environment
from benchmarks.synthetic import SHAPES, permutations
from outrider.checks import memory as memory_limit
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.draft_model import DraftModel
from outrider.draft.growth import TreeShape
from outrider.draft.none import NoDrafter
from outrider.engine.device import Device
from outrider.engine.engine import Engine
from outrider.model import Decoder, Feed, ModelSpec
from outrider.model.placement import embedding_on_host, sizes_of
from outrider.sampling import SamplingParams

PLANTED = (0.70, 0.12, 0.05, 0.03)  # chances that a draft's candidates are the target's choice
_PAGE, _CONTEXT, _PROMPT = 64, 512, 32
_KV_PAGES = 7  # of each sequence: its text, and a tree of 256 nodes
Part = Callable[[], Iterator[dict[str, Any]]]


class SyntheticSource:
    """Weights of a decoder on meta, made when they are asked for: layers share theirs, output projections are zero."""

    def __init__(self, spec: ModelSpec, embedding: Tensor, output: Tensor) -> None:
        self._spec, self._tables = spec, {"embedding": embedding, "output": output}
        self._parameters: dict[str, Tensor] = {}
        self._shared: dict[str, Tensor] = {}

    def attach(self, decoder: Decoder) -> Decoder:
        self._parameters = dict(decoder.named_parameters())
        decoder.source = self
        return decoder.eval()

    def read(self, name: str) -> Tensor:
        if name in self._tables:
            return self._tables[name]
        kind = name.rsplit(".", 1)[-1]
        if kind not in self._shared:
            shape = self._parameters[name].shape
            matrix = torch.zeros(shape, dtype=torch.bfloat16) if len(shape) == 2 else torch.ones(shape)
            if kind in ("qkv", "gate_up"):
                matrix.view(-1)[:: 1 + len(shape)] = 0.02
            self._shared[kind] = matrix
        return self._shared[kind]

    def grouped(self, name: str) -> None:
        """Nothing is quantised."""

    def packed(self, name: str) -> None:
        """Nothing is quantised."""

    def fill(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name))

    def close(self) -> None:
        """There are no files."""


def decoder_of(spec: ModelSpec, embedding: Tensor, output: Tensor) -> Decoder:
    """A decoder that reads synthetic weights one by one."""
    with torch.device("meta"):
        decoder = Decoder(spec, torch.bfloat16, torch.bfloat16)
    decoder.make_tables()
    decoder.requires_grad_(False)
    SyntheticSource(spec, embedding, output).attach(decoder)
    return decoder.materialise("norm")


def target_tables(spec: ModelSpec, perm: Tensor) -> tuple[Tensor, Tensor]:
    """An embedding, and the output matrix that maps every token to the next one."""
    generator = torch.Generator("cuda").manual_seed(1)
    embedding = torch.randn(spec.vocab, spec.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
    output = torch.empty_like(embedding)
    output[perm.cuda()] = embedding
    tables = embedding.cpu(), output.cpu()
    del embedding, output
    torch.cuda.empty_cache()
    return tables


def draft_tables(spec: ModelSpec, perm: Tensor, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Tables of a draft whose candidates after a token have about the planted chances, and are right as often.

    Embeddings are random signs, nearly orthogonal, and a candidate's output row is the sum of those of the tokens that it may
    follow, each times the candidate's logit. What the other terms add to a logit has a standard deviation of a half.
    """
    generator, vocab, hidden = torch.Generator().manual_seed(seed), spec.vocab, spec.hidden
    chances = torch.tensor(PLANTED)
    ranks = torch.multinomial(torch.cat((chances, 1 - chances.sum()[None])), vocab, replacement=True, generator=generator)
    logits = chances.log() + math.log(vocab / (1 - float(chances.sum())))
    for _ in range(9):  # the mass of all other tokens grows with the logits
        noise = float((logits**2).sum()) / hidden
        logits = chances.log() + math.log(vocab / (1 - float(chances.sum()))) + noise / 2
    signs = torch.randint(0, 2, (vocab, hidden), generator=generator, dtype=torch.int8).bfloat16() * 2 - 1
    output = torch.zeros(vocab, hidden)
    for candidate, logit in enumerate(logits.tolist()):
        named = torch.where(ranks == candidate, perm, torch.randint(0, vocab, (vocab,), generator=generator))
        output.index_add_(0, named, signs.float(), alpha=logit / hidden)
    return signs, output.bfloat16()


class Limited:
    """The target with streamed weights and the draft beside it, within a limit of the GPU's memory."""

    def __init__(self, limit: int, batch: int) -> None:
        self.limit = limit
        target, draft = (replace(SHAPES[name], context=_CONTEXT) for name in ("8b", "1b"))
        self.perm, _ = permutations(target.vocab, 1.0)
        tables, drafted = target_tables(target, self.perm), draft_tables(draft, self.perm)
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.device = Device("cuda", memory=limit)
        self.sizes = EngineConfig(
            page_size=_PAGE, max_num_seqs=batch, max_batch_rows=512, max_model_len=_CONTEXT, prefix_cache=False,
            kv_bytes=_KV_PAGES * batch * _PAGE * sum(4 * spec.depth * spec.kv_heads * spec.head_dim for spec in (target, draft)),
        )  # fmt: skip
        plan = self.device.plan(self.sizes, [target, draft])
        assert plan.placement is not None, "the limit is too large to stream anything"
        self.placement = plan.placement
        self.target: Any = self.device.runner(decoder_of(target, *tables), plan, _PAGE)
        beside = plan._replace(placement=embedding_on_host(sizes_of(draft)))
        self.draft: Any = self.device.runner(decoder_of(draft, *drafted), beside, _PAGE, self.target)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - begun

    def engine(self, drafter: Drafter | None = None, length: int = 0) -> Engine:
        return Engine(self.target, None, drafter or NoDrafter(), FixedLength(length), self.sizes)

    def prompts(self, batch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(5)
        return torch.randint(0, len(self.perm), (batch, _PROMPT), generator=generator).tolist()

    def decode(self, engine: Engine, batch: int, tokens: int) -> dict[str, Any]:
        """Speed after the first token, tokens and seconds of a round, and whether the text is the permutation's."""
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=tokens, ignore_eos=True)
        requests = [Request(f"r{i}", tuple(p), params, i, frozenset(), tokens) for i, p in enumerate(self.prompts(batch))]
        writers = [engine.submit(request, "bench") for request in requests]
        while engine.has_work and not all(writer.first_token for writer in writers):
            engine.round()
        begun, before = time.perf_counter(), sum(writer.seq.output_len for writer in writers)
        crossed, rounds = self.target.cuda.streaming.crossed, 0
        while engine.has_work:
            engine.round()
            rounds += 1
        seconds = time.perf_counter() - begun
        emitted = sum(writer.seq.output_len for writer in writers) - before
        crossed = self.target.cuda.streaming.crossed - crossed
        texts = [torch.tensor(writer.seq.tokens[_PROMPT - 1 :]) for writer in writers]
        right = all(torch.equal(self.perm[text[:-1]], text[1:]) for text in texts)
        return {
            "batch": batch, "tok_s": emitted / seconds, "tokens_per_round": emitted / rounds / batch,
            "round_ms": seconds / rounds * 1e3, "bytes_per_round": crossed / rounds, "bus_gb_s": crossed / seconds / 1e9,
            "right": right,
        }  # fmt: skip

    def bus(self) -> dict[str, Any]:
        """Bytes a second of small copies, and of the streamed units one behind the other."""
        streaming = self.target.cuda.streaming
        units = [streaming._units[index].memory.bytes for index in streaming._order]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for number, unit in enumerate(units):
            streaming._buffers[number % 2][: len(unit)].copy_(unit, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        streaming._is_ready = False  # the buffers hold others than the first units now
        return {"units_gb_s": sum(map(len, units)) / seconds / 1e9, "copies_gb_s": self.device.bus_bandwidth() / 1e9}

    def verify_seconds(self, batch: int, nodes: int) -> float:
        """One forward of trees alone: chains of so many nodes."""
        share = self.target.pool.pages // (batch + 1)
        pages = [list(range(b * share, (b + 1) * share)) for b in range(batch)]
        parents = [max(i // 4 - 1, -1) for i in range(nodes)]
        feeds = [Feed(pages[b], _PROMPT, [5], [7] * nodes, parents) for b in range(batch)]
        rows = list(range(batch * (nodes + 1)))
        return _timed(lambda: self.target.forward(feeds, wanted=rows[:128]), 3)

    def growth_seconds(self, branch: int) -> float:
        """The graphs of the last trees, one behind the other."""
        replays = self.draft.trees.replays(self.draft.trees.rows_run, branch)
        return _timed(lambda: [replay() for replay in replays], 5)


def _timed(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(limit: int, batches: Sequence[int], nodes: Sequence[int], tokens: int) -> Iterator[tuple[str, Part]]:
    """Names and parts, in order."""
    bench = Limited(limit, max(batches))
    plain: dict[int, dict[str, Any]] = {}
    bus: dict[str, Any] = {}

    def start() -> Iterator[dict[str, Any]]:
        bus.update(bench.bus())
        yield {"load_s": bench.load_s, "placement": bench.placement.describe(bus["units_gb_s"] * 1e9), **bus}

    def plainly() -> Iterator[dict[str, Any]]:
        for batch in batches:
            engine = bench.engine()
            bench.decode(engine, batch, 3)  # captures the graph
            plain[batch] = bench.decode(engine, batch, 9)
            yield plain[batch] | {"of_bus": plain[batch]["bus_gb_s"] / max(bus.values())}

    def with_trees(batch: int, count: int) -> Iterator[dict[str, Any]]:
        engine = bench.engine(DraftModel(bench.draft, TreeShape(branch=len(PLANTED))), count)
        bench.decode(engine, batch, 12)
        run = bench.decode(engine, batch, tokens)
        alone = bench.verify_seconds(batch, count), bench.growth_seconds(len(PLANTED))
        yield run | {
            "nodes": count, "speedup": run["tok_s"] / plain[batch]["tok_s"], "verify_ms": alone[0] * 1e3,
            "draft_ms": alone[1] * 1e3, "efficiency": sum(alone) * 1e3 / run["round_ms"],
            "steps": len(bench.draft.trees.rows_run),
        }  # fmt: skip

    def peak() -> Iterator[dict[str, Any]]:
        reached = torch.cuda.max_memory_allocated()
        yield {"peak_bytes": reached, "limit_bytes": limit, "within": reached <= limit}
        bench.target.close()

    yield "start", start
    yield "plain", plainly
    for batch, count in [(batches[0], nodes[0]), *((b, nodes[0]) for b in batches[1:]), *((batches[0], n) for n in nodes[1:])]:
        yield f"trees of {count}, batch {batch}", lambda batch=batch, count=count: with_trees(batch, count)  # type: ignore[misc]
    yield "memory", peak


def main(
    limit: Annotated[str, typer.Option(help="What everything may take of the GPU.")] = "6000000000",
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a text with trees.")] = 90,
    quick: Annotated[bool, typer.Option("--quick", help="Batch 1 and trees of 256 alone.")] = False,
) -> None:
    """Plain streamed decoding and large trees, beside the bus of the same run; one JSON line per number."""
    Device.resolve("cuda")
    where = gpu_environment()
    print(json.dumps(where), flush=True)
    size = memory_limit("--limit", limit)
    assert isinstance(size, int), "the limit is a size"
    gc.freeze()
    for name, part in measure(size, (1,) if quick else (1, 4), (256,) if quick else (256, 512), tokens):
        begun = time.perf_counter()
        try:
            for row in part():
                print(json.dumps({"part": name} | row), flush=True)
        except Exception:
            print(json.dumps({"part": name, "error": traceback.format_exc()[-1500:]}), flush=True)
        print(json.dumps({"part": name, "seconds": round(time.perf_counter() - begun, 1)}), flush=True)


if __name__ == "__main__":
    run(main)
