"""Promise one on a GPU with sliding windows shorter than drafts are deep, and with drafts that are not finite.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, make_request, random_decoder, write_family
from tests.support.engines import assert_same_bits, run_recorded
from tests.support.oracle import SPOILED, Shapes, Spoiled

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 40 if DEVICE == "cuda" else 5  # the interpreter is slow
WINDOWS, PAGES = ((1, 4, 17, 70), (16, 64)) if DEVICE == "cuda" else ((4,), (16,))
SHAPES = ("chain", "two chains", "comb", "late", "bushy") if DEVICE == "cuda" else ("chain", "comb")
NODES = 23 if DEVICE == "cuda" else 7
HEATS = (0.0, 0.9) if DEVICE == "cuda" else (0.9,)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@lru_cache(maxsize=8)
def decoder_of(root: Path, window: int, value: float | None = None) -> Decoder:
    folder = write_family(root / f"window-{window}", "mistral", "bfloat16", hidden_size=64, sliding_window=window)
    decoder = random_decoder(folder, window)
    if value is not None:
        decoder.embedding[SPOILED, 3:9] = value
    return decoder


@lru_cache(maxsize=8)
def runner_of(decoder: Decoder, page_size: int) -> Any:
    from outrider.model.cuda_runner import CudaRunner

    return CudaRunner(decoder, 81, page_size, DEVICE)


def engine_of(runner: Any, drafter: Any, length: int) -> Engine:
    config = EngineConfig(page_size=runner.pool.page_size, max_num_seqs=4, max_batch_rows=64, prefix_cache=False)
    return Engine(runner, None, drafter, FixedLength(length), config)


def requests() -> list[Any]:
    bias = {SPOILED: -100.0}
    params = [SamplingParams(temperature=heat, seed=7, max_tokens=TOKENS, logit_bias=bias) for heat in HEATS]
    return [make_request([(7 * j + i) % SPOILED for j in range(9 + 20 * i)], p, f"r{i}") for i, p in enumerate(params)]


def plain_runs(runner: Any) -> tuple[Any, dict[str, list[int]]]:
    runs = [run_recorded(engine_of(runner, NoDrafter(), 0), [request]) for request in requests()]
    writers, bits = (
        [recorded[0][0] for recorded in runs],
        {name: rows for recorded in runs for name, rows in recorded[1].items()},
    )
    return (writers, bits), {writer.seq.request.id: writer.seq.tokens for writer in writers}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_trees_and_pages(root: Path, window: int, page_size: int, shape: str) -> None:
    runner = runner_of(decoder_of(root, window), page_size)
    plain, answers = plain_runs(runner)
    oracle = Shapes(answers, NODES)
    oracle.shape = shape
    assert_same_bits(plain, run_recorded(engine_of(runner, oracle, NODES), requests()))


@pytest.mark.parametrize(("branches", "value"), [(0, float("nan")), (3, float("inf"))])
def test_a_drafted_token_that_is_not_finite_changes_nothing(root: Path, branches: int, value: float) -> None:
    """Twice: then drafts and prompts lie in pages that were spoiled before."""
    runner = runner_of(decoder_of(root, 4, value), 16)
    plain, answers = plain_runs(runner)
    for _ in range(2):
        engine = engine_of(runner, Spoiled(answers, 5, branches), 5 + branches)
        assert_same_bits(plain, run_recorded(engine, requests()))
