"""The profiler: phases add up, every forward of every drafter is timed alone, and the tokens stay as they are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.acceptance import available_methods
from outrider.bench.profiler import decode_rounds, profiling
from outrider.config import pinned
from outrider.ops import PackedLinear, Plain, Stack
from outrider.ops.forwards import active_log

PROMPTS = ["import os\n\n\ndef names(path):\n", "class Stack:\n"]
METHODS = [
    "none", *available_methods(None).split(","), "auto", "early_exit:4:exit_layer=9", "draft_model:8:beam=2:branch=2:depth=3",
]  # fmt: skip
NETWORKS = ("draft_model:5", "cascade:8:levels=ngram+draft_model", "medusa:24", "eagle:5", "early_exit:4:exit_layer=9")


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(method: str) -> LLM:
    return LLM(speculation=pinned(method), prefix_cache=False)


def test_profiled_rounds_emit_the_same_tokens(llm: LLM, method: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params, speculation=False)]
    began = time.perf_counter()
    with profiling(llm, alone=True) as profiler:
        outputs = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
    elapsed = time.perf_counter() - began
    assert outputs == expected
    assert sum(round_.wall + round_.alone for round_ in profiler.rounds) <= elapsed  # a round's time is without the second run
    rounds = decode_rounds(profiler.rounds)
    assert 0 < len(rounds) < len(profiler.rounds)
    assert all(r.alone > 0 and r.wall > r.verify > 0 and r.host > 0 and r.choose > 0 for r in rounds)
    assert all(r.rows == r.nodes + (2 if r.rows - r.nodes == 2 else 1) for r in rounds)
    if method == "none":
        assert not any(r.nodes for r in rounds)
    assert len(profiler.gaps) >= len(rounds)


def test_every_forward_of_every_drafter_is_timed_alone(llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the native core, or of a torch network, in a round is made once more outside of its time."""
    counts: Counter[tuple[str, bool]] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name, active_log() is None] += 1
            return call(*args, **kwargs)

        return count

    places = [(Stack, name) for name in ("forward", "draft", "logits")] + [(PackedLinear, "__call__"), (Plain, "linear")]
    for owner, name in places:
        if name in vars(owner):
            monkeypatch.setattr(owner, name, counted(f"{owner.__name__}.{name}", vars(owner)[name]))
    with profiling(llm, alone=True) as profiler:
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
    ran = {name: count for (name, alone), count in counts.items() if not alone}
    assert ran == {name: count for (name, alone), count in counts.items() if alone}
    assert ran["Stack.forward"] >= len(profiler.rounds)
    if method in NETWORKS:
        assert sum(ran.values()) > len(profiler.rounds)  # the drafter's forwards are among them


def test_a_profile_ends_with_its_block() -> None:
    llm = LLM(speculation="ngram:adaptive=false")
    params = SamplingParams(temperature=0.0, max_tokens=3)
    with profiling(llm, alone=True) as profiler:
        llm.generate(PROMPTS[0], params)
    count = len(profiler.rounds)
    llm.generate(PROMPTS[0], params)
    assert len(profiler.rounds) == count > 0
