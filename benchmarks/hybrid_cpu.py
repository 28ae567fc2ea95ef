"""`python -m benchmarks.hybrid_cpu`: what verifying a draft costs a hybrid model on the processor, with random weights.

One row is decoded; then a root is verified with 8 drafted tokens, as a chain and as a tree; then one row after 4 of 8 tokens
were accepted, whose inputs are replayed. Calls are interleaved, and medians are shown.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.forward import CallTimes
from outrider.bench.environment import environment
from outrider.cache import SequenceState
from outrider.model import Feed, LoadOptions, Runner, load_decoder
from outrider.model.memory import kv_pool
from outrider.options import Threads, set_threads

_PAGE = 64
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 20, "intermediate_size": 6144},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128},
}
_BASE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
_TREE = [-1, -1, 0, 0, 1, 2, 2, 4]


def measure(shape: str, context: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of each kind of round, and its ratio to one row."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_BASE | SHAPES[shape]))
        decoder = load_decoder(Path(folder), LoadOptions("auto", "dummy"))
    spec, pages = decoder.spec, list(range(-(-(context + 16) // _PAGE)))
    runner = Runner(decoder, kv_pool(spec, len(pages) + 1, _PAGE), states=0)
    text, state, replayed = [i * 7919 % spec.vocab for i in range(context)], SequenceState(), SequenceState()
    for one in (state, replayed):
        runner.forward([Feed(pages, 0, text, state=one)])
    chain = list(range(-1, 7))
    runner.forward([Feed(pages, context, [5], text[:8], chain, state=replayed)])
    replayed.accept(range(4))
    calls: dict[str, Callable[[], object]] = {  # a round that is asked for again begins where it began before
        "one row": partial(_round, runner, Feed(pages, context, [5], state=state)),
        "chain of 8": partial(_round, runner, Feed(pages, context, [5], text[:8], chain, state=state)),
        "tree of 8": partial(_round, runner, Feed(pages, context, [5], text[:8], _TREE, state=state)),
        "one row after 4 replayed": partial(_round, runner, Feed(pages, context + 5, [5], state=replayed)),
    }
    times, order, shuffle = {name: CallTimes() for name in calls}, list(calls), random.Random(0)
    for name in order:
        calls[name]()
    for _ in range(repeats):
        shuffle.shuffle(order)
        for name in order:
            times[name].time(calls[name])
    ms = {name: round(watch.ms, 3) for name, watch in times.items()}
    ratios = {name: round(value / ms["one row"], 3) for name, value in ms.items()}
    return {"shape": shape, "parameters": spec.parameters, "context": context, "ms": ms, "ratio_to_one_row": ratios}


def _round(runner: Runner, feed: Feed) -> None:
    runner.forward([feed], (), range(len(feed.tokens) + len(feed.nodes)))


def main(
    shape: Annotated[str, typer.Option(help=f"One of: {', '.join(SHAPES)}.")] = "1b",
    context: Annotated[int, typer.Option(min=1, help="Positions before the rows.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times each kind of round runs, interleaved.")] = 20,
    threads: Threads = None,
) -> None:
    """What verifying 8 drafted tokens costs a hybrid model on the processor, and one row after a replay."""
    set_threads(threads)
    print(json.dumps(environment() | measure(shape, context, repeats)))


if __name__ == "__main__":
    run(main)
