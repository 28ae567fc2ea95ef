"""Promise one with sliding windows: window, tree shape and page size in every combination, and drafts that are not finite.

A window may be shorter than a draft is deep: then a node no longer sees the root, nor its nearest ancestors. A token
that is only ever drafted may have an embedding that is NaN or infinite: nothing of it may reach the text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_request, random_decoder, write_family
from tests.support.engines import assert_same_bits, run_recorded
from tests.support.examples import examples
from tests.support.oracle import SPOILED, Shapes, Spoiled

pytestmark = pytest.mark.usefixtures("both_paths")


@lru_cache(maxsize=32)
def windowed_decoder(root: Path, window: int, dtype: str) -> Decoder:
    return random_decoder(write_family(root / f"window-{window}-{dtype}", "mistral", dtype, sliding_window=window), window)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


SHAPES = ("chain", "two chains", "comb", "late", "bushy")
CASES = {
    "window": st.sampled_from([1, 2, 3, 4, 7, 15, 16, 17, 33]),
    "page_size": st.sampled_from([1, 2, 3, 8, 10, 16, 64]),
    "shape": st.sampled_from(SHAPES),
    "nodes": st.sampled_from([1, 2, 5, 16, 23, 63]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "prompt": st.integers(1, 40),
}


@examples(30)
@given(**CASES)
@example(window=4, page_size=16, shape="chain", nodes=63, dtype="bfloat16", prompt=9)
@example(window=4, page_size=16, shape="two chains", nodes=63, dtype="bfloat16", prompt=9)
@example(window=1, page_size=2, shape="comb", nodes=63, dtype="bfloat16", prompt=31)
@example(window=3, page_size=8, shape="late", nodes=63, dtype="float32", prompt=15)
@example(window=2, page_size=1, shape="bushy", nodes=23, dtype="bfloat16", prompt=5)
def test_windows_trees_and_pages(  # type: ignore[no-untyped-def]
    root: Path, window: int, page_size: int, shape: str, nodes: int, dtype: str, prompt: int
) -> None:
    decoder = windowed_decoder(root, window, dtype)
    rng = random.Random(f"{window} {page_size} {shape} {nodes} {dtype} {prompt}")
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=24) for heat in (0.0, 0.9)]
    requests = [make_request([rng.randrange(VOCAB) for _ in range(prompt + i)], one, f"r{i}") for i, one in enumerate(params)]
    sizes = {"page_size": page_size, "pages": max(16, 4 * (prompt + 96) // page_size)}
    plain = [run_recorded(make_engine(decoder, **sizes), [request]) for request in requests]
    answers = [writers[0].seq.tokens for writers, _ in plain]
    oracle = Shapes({request.id: answer for request, answer in zip(requests, answers, strict=True)}, nodes)
    oracle.shape = shape
    fast = run_recorded(make_engine(decoder, oracle, nodes, **sizes), requests)
    assert_same_bits(([result[0][0] for result in plain], {k: v for result in plain for k, v in result[1].items()}), fast)


@lru_cache(maxsize=16)
def spoiled_decoder(root: Path, window: int, dtype: str, value: float) -> Decoder:
    """A decoder with one token whose embedding is not finite, and which no text chooses."""
    decoder = windowed_decoder(root, window, dtype)
    spoiled = Decoder(replace(decoder.spec), getattr(torch, dtype)).requires_grad_(False).eval()
    spoiled.load_state_dict(decoder.state_dict())
    spoiled.embedding[SPOILED, 3:9] = value
    return spoiled


@examples(20)
@given(
    **{name: CASES[name] for name in ("window", "page_size", "dtype", "prompt")},
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    branches=st.sampled_from([0, 4]),
)
@example(window=33, page_size=16, dtype="float32", prompt=9, value=float("nan"), branches=0)
@example(window=33, page_size=16, dtype="bfloat16", prompt=9, value=float("nan"), branches=4)
@example(window=4, page_size=2, dtype="bfloat16", prompt=20, value=float("inf"), branches=0)
def test_a_drafted_token_that_is_not_finite_changes_nothing(  # type: ignore[no-untyped-def]
    root: Path, window: int, page_size: int, dtype: str, prompt: int, value: float, branches: int
) -> None:
    """Drafts in later requests lie in pages that earlier ones have spoiled."""
    decoder = spoiled_decoder(root, window, dtype, value)
    rng = random.Random(f"{window} {page_size} {dtype} {prompt} {value} {branches}")
    bias = {SPOILED: -100.0}
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=20, logit_bias=bias) for heat in (0.0, 0.9)]
    requests = [make_request([rng.randrange(SPOILED) for _ in range(prompt + i)], one, f"r{i}") for i, one in enumerate(params)]
    sizes = {"page_size": page_size, "pages": max(16, 2 * (prompt + 48) // page_size)}
    plain = [run_recorded(make_engine(decoder, **sizes), [request]) for request in requests]
    answers = {request.id: writers[0].seq.tokens for request, (writers, _) in zip(requests, plain, strict=True)}
    engine = make_engine(decoder, Spoiled(answers, 6, branches), 6 + branches, **sizes)
    for _ in range(2):
        fast = run_recorded(engine, requests)
        assert_same_bits(([result[0][0] for result in plain], {k: v for result in plain for k, v in result[1].items()}), fast)
