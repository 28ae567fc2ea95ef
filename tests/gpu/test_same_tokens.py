"""Promise one on a GPU: the same tokens with speculation on and off, and the same bits of every logit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.engine import commit
from outrider.engine.commit import advance
from outrider.engine.engine import Engine
from outrider.model import Decoder
from tests.support import NoDrafter, Oracle
from tests.support.engines import keeping_logits

CODE = [
    "import json\nfrom pathlib import Path\n\n\ndef load_config(path: Path) -> dict:\n    ",
    "class Stack:\n    def __init__(self):\n",
    "def fibonacci(n):\n",
    "for line in open(path):\n    if not line.strip():\n",
]


def requests(batch: int, tokens: int) -> tuple[list[str], list[SamplingParams]]:
    heat = [0.0, 0.8, 1.0, 0.0]
    params = [SamplingParams(temperature=heat[i % 4], seed=i, max_tokens=tokens, ignore_eos=True) for i in range(batch)]
    return [CODE[(i // 2) % len(CODE)] for i in range(batch)], params


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Plain decoding of 512 tokens, one request at a time."""
    llm = LLM(speculation="none", device="cuda", max_num_seqs=32)
    prompts, params = requests(32, 512)
    return [llm.generate(prompt, p)[0].outputs[0].token_ids for prompt, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("method", ["none", "draft_model:5", "draft_model:5:adaptive=false", "suffix:12", "auto"])
def test_speculation_changes_no_token(plain: list[list[int]], method: str) -> None:
    llm = LLM(device="cuda", speculation=method, max_num_seqs=32)
    prompts, params = requests(32, 512)
    for batch in (1, 4, 32):
        for first in range(0, 4 if batch < 32 else 1, batch):
            got = llm.generate(prompts[first : first + batch], params[first : first + batch])
            assert [out.outputs[0].token_ids for out in got] == plain[first : first + batch]
            assert all(out.outputs[0].speculation["fallback_reason"] is None for out in got)


def test_trees_and_parameters() -> None:
    params = SamplingParams(
        temperature=0.8, seed=5, max_tokens=96, top_p=0.9, repetition_penalty=1.1, logprobs=2, ignore_eos=True
    )
    want = LLM(speculation="none", device="cuda", max_num_seqs=8).generate(CODE[0], params)[0].outputs[0]
    for method in (
        "draft_model:12:beam=3:branch=3:depth=4",
        "eagle:6",
        "eagle:16:beam=3:branch=3:depth=5",
        "medusa:8",
        "ngram:6",
    ):
        got = LLM(device="cuda", speculation=method, max_num_seqs=8).generate(CODE[0], params)[0].outputs[0]
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs


@pytest.fixture(scope="module")
def wide() -> Decoder:
    """Random weights of 8B width, four layers."""
    from benchmarks.synthetic import SHAPES

    config = replace(SHAPES["8b"], layers=SHAPES["8b"].layers[:4], vocab=32768)
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(config, torch.bfloat16, torch.bfloat16)
    decoder.requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=1.0 if name == "embedding" else parameter.shape[1] ** -0.5)
    return decoder


def test_logits_are_equal_bit_for_bit(wide: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 logits of every emitted position are equal alone and in a batch with chains and trees of any shape."""
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    runner = CudaRunner(wide, 400, 64, "cuda", CudaOptions(max_graph_rows=64))  # the largest rounds take two graphs
    seen: dict[str, list[torch.Tensor]] = {}

    def recording(writer, emitted, rows, scores):  # type: ignore[no-untyped-def]
        settled = advance(writer, emitted, rows, scores)
        kept = [scores.logits[row].detach().clone().cuda() for row in rows[: settled.kept]]
        seen.setdefault(writer.seq.request.id, []).extend(kept)
        return settled

    monkeypatch.setattr(commit, "advance", recording)
    rng, vocab = random.Random(0), wide.spec.vocab
    lengths = [1, 3, 40, 63, 64, 65, 120, 128, 130, 200, 300, 450]
    to_submit = [
        Request(f"r{i}", tuple(rng.randrange(vocab) for _ in range(n)),
                SamplingParams(temperature=[0.0, 0.9][i % 2], max_tokens=48), i, frozenset(), 48)
        for i, n in enumerate(lengths)
    ]  # fmt: skip

    def run(drafter, length, together, chunk):  # type: ignore[no-untyped-def]
        config = EngineConfig(page_size=64, max_num_seqs=together, max_batch_rows=chunk, prefix_cache=False)
        engine = keeping_logits(Engine(runner, None, drafter, FixedLength(length), config))
        seen.clear()
        writers = [engine.submit(request, "test") for request in to_submit]
        while engine.has_work:
            engine.round()
        return {writer.seq.request.id: writer.seq.tokens for writer in writers}, dict(seen)

    tokens, logits = run(NoDrafter(), 0, 1, 512)
    for drafter, length, together, chunk in (
        (NoDrafter(), 0, 12, 97),
        (Oracle(tokens, 7), 7, 1, 512),
        (Oracle(tokens, 5, branches=3, seed=1), 8, 12, 200),
        (Oracle(tokens, 12, branches=6, seed=2), 18, 5, 64),
    ):
        texts, bits = run(drafter, length, together, chunk)
        assert texts == tokens
        for name, rows in logits.items():
            assert len(rows) == len(bits[name])
            assert all(torch.equal(a, b) for a, b in zip(rows, bits[name], strict=True)), (name, length)
