"""Overlapped launches give the same tokens: a forward before its draft is resolved, a draft before the verdict is known.

These run in Triton's interpreter too (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Plan, Request
from outrider.draft.draft_model import DraftModel
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import NoDrafter, random_decoder, write_family

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, TOKENS = (5, 24) if DEVICE == "cuda" else (2, 16)  # the interpreter is slow


class Waiting(FixedLength):
    """A fixed length without overlap: the host resolves every draft before it is verified."""

    def plan(self, load: Any) -> Plan:
        return super().plan(load)._replace(verify_all=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder, Decoder]:
    """A target, a draft, and a draft whose logits are not finite."""
    folder = write_family(tmp_path_factory.mktemp("family"), "llama2", hidden_size=64, num_key_value_heads=2)
    target, draft, broken = (random_decoder(folder, seed) for seed in range(3))
    with torch.no_grad():
        broken.norm.fill_(float("nan"))
    return target, draft, broken


def run(models: tuple[Decoder, ...], drafter: str, policy: Any, max_graph_rows: int = 256) -> tuple[Any, Any]:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    target = CudaRunner(models[0], 60, 64, DEVICE, CudaOptions(max_graph_rows=max_graph_rows))
    draft = CudaRunner(models[1], 60, 64, DEVICE, target=target)
    calls: list[str] = []
    for name in ("draw", "draw_next", "draft"):
        inner = getattr(draft, name)
        setattr(draft, name, lambda *args, name=name, inner=inner: (calls.append(name), inner(*args))[1])
    config = EngineConfig(page_size=64, max_num_seqs=BATCH, max_batch_rows=24, prefix_cache=False)
    drafter_object = {"none": NoDrafter, "draft": lambda: DraftModel(draft)}[drafter]()
    engine = Engine(target, None, drafter_object, policy, config)
    vocab = models[0].spec.vocab
    writers = []
    for i in range(BATCH):
        params = SamplingParams(temperature=(0.0, 0.9)[i % 2], max_tokens=TOKENS)
        prompt = tuple((7 * i + 3 * j) % vocab for j in range(3 + 5 * i))
        writers.append(engine.submit(Request(f"r{i}", prompt, params, i, frozenset(), TOKENS), "test"))
    while engine.has_work:
        engine.round()
    stats = [replace(writer.seq.stats) for writer in writers]
    return [writer.seq.tokens for writer in writers], (stats, calls)


def test_a_forward_launched_before_its_draft_is_resolved(models: tuple[Decoder, ...]) -> None:
    same = (models[0], models[0])  # a draft that is often right, so that its KV matters
    for pair in (models, same):
        want, _ = run(pair, "none", FixedLength(0))
        waited, (stats, waiting_calls) = run(pair, "draft", Waiting(3))
        overlapped, (overlapped_stats, calls) = run(pair, "draft", FixedLength(3))
        assert waited == overlapped == want
        assert overlapped_stats == stats
        assert set(waiting_calls) == {"draw", "draft"}
        assert set(calls) == {"draw", "draw_next"}
        assert calls.count("draw") <= calls.count("draw_next")
    assert sum(overlapped_stats.accepted for overlapped_stats in stats) >= 2 * BATCH


def test_more_rows_than_a_graph_takes(models: tuple[Decoder, ...]) -> None:
    want, _ = run(models, "none", FixedLength(0))
    overlapped, (_, calls) = run((models[0], models[0]), "draft", FixedLength(3), max_graph_rows=4)
    assert overlapped == want
    assert set(calls) - {"draw_next"} == {"draw"}  # the last sequence alone fits, and is followed


def test_a_draft_in_flight_that_is_not_finite_costs_speed_only(models: tuple[Decoder, ...]) -> None:
    want, _ = run(models, "none", FixedLength(0))
    got, (stats, _) = run((models[0], models[2]), "draft", FixedLength(3))
    assert got == want
    assert all("not finite" in (seq_stats.fallback_reason or "") for seq_stats in stats)
