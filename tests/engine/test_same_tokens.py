"""Promise one: the same tokens, log probabilities and logits with speculation on or off."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from outrider.draft.draft_model import DraftModel
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.engine import commit
from outrider.engine.commit import advance
from outrider.model import Decoder, Runner
from outrider.sampling import SamplingParams
from tests.support import (
    FAMILIES,
    HYBRIDS,
    VOCAB,
    Oracle,
    make_engine,
    make_pool,
    make_request,
    random_decoder,
    run,
    write_family,
)
from tests.support.engines import random_params

pytestmark = pytest.mark.usefixtures("both_paths")

_decoders: dict[tuple[str, str, int], Decoder] = {}


def decoder_of(root: Path, family: str, dtype: str, seed: int = 0) -> Decoder:
    key = (family, dtype, seed)
    if key not in _decoders:
        _decoders[key] = random_decoder(write_family(root / f"{family}-{dtype}", family, dtype), seed)
    return _decoders[key]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def logits_seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """Raw float32 logits at every emitted position, by request."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)

    def recording(writer, emitted, rows, scores):  # type: ignore[no-untyped-def]
        settled = advance(writer, emitted, rows, scores)
        seen[writer.seq.request.id] += [scores.logits[row].clone() for row in rows[: settled.kept]]
        return settled

    monkeypatch.setattr(commit, "advance", recording)
    return seen


def assert_equal_runs(plain, fast, seen_plain, seen_fast) -> None:  # type: ignore[no-untyped-def]
    for a, b in zip(plain, fast, strict=True):
        assert b.seq.tokens == a.seq.tokens
        assert b.seq.finish_reason == a.seq.finish_reason
        assert b.logprobs == a.logprobs
        name = a.seq.request.id
        assert len(seen_plain[name]) == len(seen_fast[name])
        for x, y in zip(seen_plain[name], seen_fast[name], strict=True):
            assert torch.equal(x, y)


@pytest.mark.grid(once=["case"])
@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("branches", [0, 5], ids=["chains", "trees"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_oracle_drafts_change_nothing(root, logits_seen, family, dtype, branches, case) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(f"{family} {dtype} {branches} {case}")
    decoder = decoder_of(root, family, dtype)
    length, batch = case + 1, rng.randint(1, 8)
    tokens = max(20, (length + 1) * (length + 4) // batch + length)
    requests = [
        make_request([rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))], random_params(rng, tokens), f"r{i}")
        for i in range(batch)
    ]
    plain = [run(make_engine(decoder), [request])[0] for request in requests]
    seen_plain = dict(logits_seen)
    logits_seen.clear()
    oracle = Oracle({r.id: w.seq.tokens for r, w in zip(requests, plain, strict=True)}, length, branches)
    engine = make_engine(decoder, oracle, length + branches)
    fast = run(engine, requests)
    assert_equal_runs(plain, fast, seen_plain, logits_seen)
    assert oracle.accepted >= set(range(length + 1)), "accepted runs of every length must occur"
    assert engine.pages.used == 0
    assert not any(writer.seq.stats.fallback_reason for writer in fast)


@pytest.mark.grid(once=["case"])
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_ngram_and_draft_model_change_nothing(root, logits_seen, family, dtype, case) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(f"{family} {dtype} {case}")
    decoder = decoder_of(root, family, dtype)
    requests = [  # few symbols, so that look-ups hit
        make_request([rng.randrange(7) for _ in range(rng.randint(4, 40))], random_params(rng, 30), f"r{i}")
        for i in range(rng.randint(1, 6))
    ]
    plain = [run(make_engine(decoder), [request])[0] for request in requests]
    seen_plain = dict(logits_seen)
    draft = decoder if case % 2 else decoder_of(root, family, dtype, seed=9)
    for drafter in (NGramDrafter(NGramOptions(1, 3)), DraftModel(Runner(draft, make_pool(draft)))):
        logits_seen.clear()
        engine = make_engine(decoder, drafter, rng.randint(1, 12))
        fast = run(engine, requests)
        assert_equal_runs(plain, fast, seen_plain, logits_seen)
        assert engine.pages.used == 0
        assert not any(writer.seq.stats.fallback_reason for writer in fast)


@pytest.mark.parametrize("family", ["llama2", "qwen3.5"])
def test_a_perfect_draft_model_is_accepted_whole(root: Path, family: str) -> None:
    """Greedy and sampled: with shared noise the same model guesses every token, so K + 1 come per round."""
    decoder = decoder_of(root, family, "float32")
    for temperature in (0.0, 0.8):
        engine = make_engine(decoder, DraftModel(Runner(decoder, make_pool(decoder))), 4)
        writer = run(engine, [make_request([1, 2, 3], SamplingParams(temperature=temperature, seed=5, max_tokens=41))])[0]
        assert writer.seq.stats.accepted == writer.seq.stats.drafted
        assert writer.seq.stats.rounds == 1 + 8  # the prompt's round, then 40 tokens at 5 a round


def test_samples_of_one_request_differ_and_replay(root: Path) -> None:
    decoder = decoder_of(root, "llama2", "float32")
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20)
    requests = [make_request([1, 2, 3], params, f"r{i}", index=i) for i in range(3)]
    together = [w.seq.tokens for w in run(make_engine(decoder), requests)]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert [run(make_engine(decoder), [request])[0].seq.tokens for request in requests] == together


@pytest.mark.parametrize("family", ["mistral", "qwen3.5"])
def test_prompt_chunks_do_not_matter(root: Path, logits_seen, family: str) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_of(root, family, "bfloat16")
    request = make_request([i * 7 % VOCAB for i in range(130)], SamplingParams(temperature=0.0, max_tokens=5))
    seen = []
    for rows in (1, 7, 16, 33, 512):
        logits_seen.clear()
        run(make_engine(decoder, max_batch_rows=rows), [request])
        seen.append(torch.stack(logits_seen["r"]))
    assert all(torch.equal(seen[0], other) for other in seen)
