"""`python -m benchmarks.hybrid`: a hybrid model of Qwen3.5-4B's shape with synthetic weights on a GPU, one JSON line a figure.

Plain decoding beside its floor, an MTP head that guesses right by a chosen share, rounds by context and batch, prompts, and the
recurrence alone by tiles. A part that fails does not stop the others.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks.command import run
from benchmarks.synthetic import SHAPES, permutations, synthetic_decoder, timed
from outrider.bench.bandwidth import gpu_bandwidth
from outrider.cache import KVPool, Past, SequenceState
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.eagle import EagleDrafter
from outrider.draft.none import NoDrafter
from outrider.engine.engine import Engine
from outrider.heads import MTP, Borrowed, EagleConfig, EagleHead
from outrider.model import Feed
from outrider.model.memory import StateSizes
from outrider.options import numbers
from outrider.sampling import SamplingParams

_PAGE, _TOKENS, _PROMPT = 64, 192, 128
Row = dict[str, Any]


class Hybrid:
    """A target of Qwen3.5-4B's shape, and an MTP head for it."""

    def __init__(self, agreement: float, context: int, sequences: int) -> None:
        from outrider.model.cuda_runner import CudaRunner

        spec = replace(SHAPES["qwen3.5-4b"], context=context)
        self.sequences = sequences
        self.perm, self._drafted = permutations(spec.vocab, agreement)
        pages = context // _PAGE + sequences * 8 + 8
        states = StateSizes(4 * sequences + 2, 8, 16 * sequences)
        self.target = CudaRunner(synthetic_decoder(spec, self.perm), pages, _PAGE, "cuda", states=states)

    @torch.no_grad()
    def mtp(self) -> Drafter:
        """A head whose guess after token t is the drafted permutation of t."""
        from outrider.heads.cuda_runners import CudaEagleRunner

        target, spec = self.target, self.target.decoder.spec
        shape = replace(spec, layers=spec.layers[-1:])
        config = EagleConfig(shape, spec.hidden, (spec.depth,), MTP, own_output=True, norm_output=True)
        with torch.device("cuda"):
            head = EagleHead(config, Borrowed.of(target.decoder)).to(torch.bfloat16)
        for name, parameter in head.requires_grad_(False).named_parameters():
            if parameter.dim() == 2 and name != "output":
                parameter.zero_() if name.endswith(("out", "down")) else parameter.normal_(std=0.02)
        head.fc.zero_()
        head.fc[:, : spec.hidden].fill_diagonal_(1.0)
        head.output[self._drafted.to("cuda")] = target.cuda.embedding
        pool = KVPool(1, 1, spec.kv_heads, _PAGE, spec.head_dim)
        return EagleDrafter(head, pool, target.ops, runner=CudaEagleRunner(head, target))

    def engine(self, drafter: Drafter, length: int) -> Engine:
        config = EngineConfig(page_size=_PAGE, max_num_seqs=self.sequences, max_batch_rows=2048, prefix_cache=False)
        return Engine(self.target, None, drafter, FixedLength(length), config)

    def generate(self, engine: Engine, batch: int, tokens: int = _TOKENS, prompt: int = _PROMPT) -> Row:
        """Generate for a batch of prompts: seconds a token after the first, and rounds."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        writers = [
            engine.submit(Request(f"r{i}", tuple(self._text(5 + i, prompt)), params, i, frozenset(), tokens), "bench")
            for i in range(batch)
        ]
        begun = time.perf_counter()
        while engine.has_work:
            engine.round()
        first, last = min(w.first_token for w in writers), max(w.last_token for w in writers)
        texts = [writer.seq.tokens[writer.seq.prompt_len - 1 :] for writer in writers]
        right = all(self.perm[torch.tensor(text[:-1])].tolist() == list(text[1:]) for text in texts)
        count, rounds = batch * (tokens - 1), max(writer.seq.stats.rounds for writer in writers) - 1
        return {
            "tok_s": count / (last - first), "round_ms": (last - first) / rounds * 1e3,
            "tokens_per_round": count / batch / rounds, "first_s": first - begun, "right": right,
            "fault": writers[0].seq.stats.fallback_reason,
        }  # fmt: skip

    def replay_ms(self, rows: int, context: int) -> float:
        """One replay of the target's graph: a root and a chain of nodes after a context, with its state read and written."""
        place = self.target._recurrent.take()  # type: ignore[union-attr]
        state = SequenceState(context, Past((place,)))
        graph, pages = self.target.rounds.graph(rows), list(range(context // _PAGE + 1))
        nodes = [7] * (rows - 1)
        inputs = graph.sides[0].inputs
        self.target.fill(inputs, [Feed(pages, context, [5], nodes, list(range(-1, rows - 2)), state=state)])
        inputs.send()
        return 1e3 * timed(graph.replay, 20)

    def _text(self, start: int, length: int) -> list[int]:
        tokens = [start]
        while len(tokens) < length:
            tokens.append(int(self.perm[tokens[-1]]))
        return tokens


def measure_decoding(bench: Hybrid, lengths: Sequence[int]) -> Iterator[Row]:
    """Plain decoding at batch 1 beside the time in which this device reads the weights, then MTP drafts."""
    floor = bench.target.weight_bytes / gpu_bandwidth()
    plain = _best(bench, bench.engine(NoDrafter(), 0))
    forward = bench.replay_ms(1, _PROMPT + _TOKENS // 2)
    yield {"what": "plain"} | plain | {
        "floor_tok_s": 1 / floor, "of_floor": plain["tok_s"] * floor, "forward_ms": forward,
        "weight_gb": bench.target.weight_bytes / 1e9,
    }  # fmt: skip
    drafter = bench.mtp()
    for length in lengths:
        drafted = _best(bench, bench.engine(drafter, length))
        yield {"what": f"mtp K={length}"} | drafted | {"speedup": drafted["tok_s"] / plain["tok_s"]}


def measure_contexts(bench: Hybrid, contexts: Sequence[int]) -> Iterator[Row]:
    """Replays of one row and of four by context."""
    for rows in (1, 4):
        times = {context: bench.replay_ms(rows, context) for context in contexts}
        yield {"what": f"replay of {rows} rows by context", "ms": times, "ratio": times[contexts[-1]] / times[contexts[0]]}


def measure_batches(bench: Hybrid, batches: Sequence[int]) -> Iterator[Row]:
    """Plain rounds by batch."""
    engine = bench.engine(NoDrafter(), 0)
    for batch in batches:
        bench.generate(engine, batch, 16)
        yield {"what": f"plain, batch {batch}"} | bench.generate(engine, batch, 48)


def measure_prompts(bench: Hybrid, tokens: int = 2048) -> Iterator[Row]:
    """Reading a prompt, and what the recurrence takes of it, by tiles."""
    from outrider.model.cuda_states import RecurrentInputs, RowRoom
    from outrider.ops.cuda.recurrence_launch import SCAN_TILES, run_paths

    pages, text = list(range(tokens // _PAGE + 1)), [i * 7919 % 100_000 for i in range(tokens)]
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        bench.target.logits(bench.target.forward([Feed(pages, 0, text, state=SequenceState())]).last, [tokens - 1])
        seconds.append(time.perf_counter() - begun)
    states = bench.target._recurrent
    assert states is not None
    scans = {}
    for rows in (1, 4, tokens):
        feeds = [Feed(pages, 0, text[:rows], state=SequenceState())]
        inputs = RecurrentInputs(states, RowRoom.of_feeds(feeds))
        inputs.fill(feeds)
        inputs.send()
        state, buffers = inputs.layer(0)
        for tile in SCAN_TILES[:2]:
            scan = partial(run_paths, inputs.paths, state.memories, states.shapes[0], buffers, tile)
            scans[f"{rows} rows, {tile.values} values, {tile.warps} warps"] = _captured_ms(scan)
    yield {
        "what": f"prompt of {tokens} tokens",
        "tok_s": tokens / statistics.median(seconds),
        "ms": statistics.median(seconds) * 1e3,
    }
    yield {"what": "recurrence of one layer, ms", "layers": len(states.layers), "ms": scans}


def measure_kernels(bench: Hybrid, context: int = 4096) -> Iterator[Row]:
    """The kernels of a replay of one row, those that take most first: launches, and microseconds of each."""
    bench.replay_ms(1, context)
    replay = bench.target.rounds.graph(1).replay
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:16]
    rows = {event.key[:60]: [event.count, round(event.device_time_total / event.count, 2)] for event in kernels}
    yield {"what": "kernels of a replay, microseconds", "kernels": rows}


def _best(bench: Hybrid, engine: Engine) -> Row:
    """The median of three runs after one that captures graphs."""
    bench.generate(engine, 1, 16)
    return sorted((bench.generate(engine, 1) for _ in range(3)), key=lambda row: float(row["tok_s"]))[1]


def _captured_ms(call: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds of a call on the device, as a CUDA graph repeats it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return 1e3 * timed(graph.replay, 3) / repeats


def main(
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens the head guesses right.")] = 0.8,
    drafted: Annotated[str, typer.Option(help="Comma-separated numbers of draft tokens.")] = "3,2",
) -> None:
    """Speed of a hybrid model of Qwen3.5-4B's shape with synthetic weights on a GPU; one JSON line per figure."""
    from benchmarks.gpu import gpu_environment

    print(json.dumps(gpu_environment()), flush=True)
    bench = Hybrid(agreement, 65536 + 1024, 64)
    parts: tuple[Callable[[], Iterator[Row]], ...] = (
        lambda: measure_decoding(bench, numbers("--drafted", drafted, int)),
        lambda: measure_contexts(bench, (4096, 16384, 65536)),
        lambda: measure_prompts(bench),
        lambda: measure_batches(bench, (8, 64)),
        lambda: measure_kernels(bench),
    )
    for part in parts:
        begun = time.perf_counter()
        try:
            for row in part():
                print(json.dumps(row | {"seconds": time.perf_counter() - begun}), flush=True)
        except Exception:
            print(json.dumps({"failed": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    run(main)
