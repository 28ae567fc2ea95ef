"""Engines built by hand, requests for them, and runs whose bits are recorded."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.none import NoDrafter
from outrider.engine import commit
from outrider.engine.commit import OutputProcessor, advance
from outrider.engine.engine import Engine
from outrider.model import Decoder, Runner
from outrider.sampling import SamplingParams
from tests.support.models import make_pool

Bits = dict[str, list[torch.Tensor]]


def make_engine(
    decoder: Decoder, drafter: Drafter | None = None, length: int = 0, rule: str = "match", pages: int = 160, **sizes: Any
) -> Engine:
    config = EngineConfig(**({"page_size": 16, "max_num_seqs": 8, "max_batch_rows": 40} | sizes))
    runner = Runner(decoder, make_pool(decoder, config.page_size, pages, config.kv_dtype == "int8"))
    return Engine(runner, None, drafter or NoDrafter(), FixedLength(length, rule), config)


def make_request(
    prompt: list[int], params: SamplingParams, name: str = "r", index: int = 0, tenant: str | None = None
) -> Request:
    stop = frozenset(params.stop_token_ids or ())
    return Request(name, tuple(prompt), params, params.seed or 0, stop, params.max_tokens or 16, index, tenant=tenant)


def renamed(request: Request, **changes: Any) -> Request:
    return replace(request, **changes)


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy, sampled with filters, or shaped by penalties and bias; each as likely."""
    common = {"seed": rng.randrange(2**62), "max_tokens": max_tokens, "logprobs": rng.choice([None, 0, 3])}
    kind = rng.choice(["greedy", "sampled", "shaped"])
    if kind == "greedy":
        return SamplingParams(temperature=0.0, **common)
    if kind == "sampled":
        filters = {"top_p": rng.choice([1.0, 0.9, 0.5]), "top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.05])}
        return SamplingParams(temperature=rng.choice([0.8, 0.3, 1.3]), **filters, **common)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias=rng.choice([None, {3: 2.5, 7: -4.0}]),
        **common,
    )


def run(engine: Engine, requests: list[Request], method: str = "test") -> list[OutputProcessor]:
    writers = [engine.submit(request, method) for request in requests]
    while engine.has_work:
        engine.round()
    return writers


def solo_answers(decoder: Decoder, requests: list[Request]) -> list[OutputProcessor]:
    """Plain decoding, one request at a time."""
    return [run(make_engine(decoder), [request], "none")[0] for request in requests]


def run_recorded(engine: Engine, requests: list) -> tuple[list[OutputProcessor], Bits]:  # type: ignore[type-arg]
    """The writers, and the raw logits behind every token they emitted."""
    seen: Bits = defaultdict(list)

    def recording(writer, emitted, rows, scores):  # type: ignore[no-untyped-def]
        settled = advance(writer, emitted, rows, scores)
        seen[writer.seq.request.id] += [scores.logits[row].clone() for row in rows[: settled.kept]]
        return settled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "advance", recording)
        writers = run(engine, requests)
    return writers, seen


def assert_same_bits(plain: tuple[list[OutputProcessor], Bits], fast: tuple[list[OutputProcessor], Bits]) -> None:
    for a, b in zip(plain[0], fast[0], strict=True):
        assert b.seq.tokens == a.seq.tokens
        assert b.seq.finish_reason == a.seq.finish_reason == "length"
        assert b.seq.stats.fallback_reason is None
        name = a.seq.request.id
        assert all(torch.equal(x, y) for x, y in zip(plain[1][name], fast[1][name], strict=True))
