"""Recurrent states in the engine: drafters of every kind, few states, and rounds that fail after their forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request, RoundReport, Verdict
from outrider.draft import Drafter
from outrider.draft.draft_model import DraftModel
from outrider.draft.growth import TreeShape
from outrider.draft.lookahead import LookaheadDrafter
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.none import NoDrafter
from outrider.draft.recycle import RecycleDrafter
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from outrider.engine import engine as rounds
from outrider.engine.engine import Engine
from outrider.model import Decoder, Runner
from outrider.model.memory import kv_pool, sequence_bytes
from outrider.sampling import SamplingParams
from tests.support import HYBRIDS, VOCAB, Oracle, make_engine, make_pool, make_request, random_decoder, run, write_family
from tests.support.engines import assert_same_bits, run_recorded

SIZE = 8
DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "ngram": lambda _: NGramDrafter(NGramOptions(1, 3)),
    "suffix": lambda _: SuffixDrafter(SuffixOptions(min_match=1, shared_tokens=500)),
    "recycle": lambda _: RecycleDrafter(),
    "lookahead": lambda _: LookaheadDrafter(),
    "draft_model": lambda draft: DraftModel(Runner(draft, make_pool(draft, SIZE))),
    "draft_model tree": lambda draft: DraftModel(Runner(draft, make_pool(draft, SIZE)), TreeShape(beam=3, branch=2, depth=4)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module", params=HYBRIDS)
def decoder(request: pytest.FixtureRequest, root: Path) -> Decoder:
    return random_decoder(write_family(root / request.param, request.param), seed=2)


@pytest.fixture(scope="module")
def draft(root: Path) -> Decoder:
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    return random_decoder(write_family(root / "draft", "qwen3.5", **config), seed=2)  # type: ignore[arg-type]


def engine_of(decoder: Decoder, drafter: Drafter, length: int, pages: int = 160, states: int = 64, batch: int = 16) -> Engine:
    runner = Runner(decoder, kv_pool(decoder.spec, pages, SIZE), states=states)
    config = EngineConfig(page_size=SIZE, max_num_seqs=batch, max_batch_rows=24)
    return Engine(runner, None, drafter, FixedLength(length), config)


def requests_of(count: int, symbols: int = 5) -> list[Request]:
    """Half greedy, of few symbols so that lookups hit, with a beginning that some share."""
    rng = random.Random(count)
    stem = [rng.randrange(symbols) for _ in range(19)]
    prompts = [stem * (i % 2) + [rng.randrange(symbols) for _ in range(rng.randint(3, 20))] for i in range(count)]
    return [
        make_request(prompt, SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=24), f"r{i}")
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.grid(once=["batch"])
@pytest.mark.parametrize("batch", [1, 2, 7, 16])
@pytest.mark.parametrize("pages", [160, 30], ids=["room", "preempting"])
@pytest.mark.parametrize("method", DRAFTERS)
def test_drafters_change_nothing(decoder: Decoder, draft: Decoder, method: str, batch: int, pages: int) -> None:
    requests = requests_of(batch)
    alone = [run_recorded(make_engine(decoder, page_size=SIZE), [request]) for request in requests]
    plain = [result[0][0] for result in alone], {name: bits for result in alone for name, bits in result[1].items()}
    engine = engine_of(decoder, DRAFTERS[method](draft), 5, pages)
    fast = run_recorded(engine, requests)
    assert_same_bits(plain, fast)
    assert all(writer.seq.state is None for writer in fast[0]), "states go with their sequences"
    assert batch < 7 or pages > 30 or engine.scheduler.preemptions > 0


@pytest.mark.parametrize("states", [0, 1, 3, 64])
def test_a_prefix_is_found_as_far_as_states_are_kept(decoder: Decoder, states: int) -> None:
    """Few states cost time only. The last one stays, and a text goes on after it."""
    engine = engine_of(decoder, NoDrafter(), 0, states=states)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=6)
    text = [i * 7 % VOCAB for i in range(50)]
    for tokens, hits in ((text, 0), ([*text, 3], 48), (text[:37], 32 if states == 64 else 0), ([*text[:44], 5, 6, 7], 40)):
        request = make_request(tokens, params, f"{len(tokens)}")
        writer = run(engine, [request])[0]
        assert writer.seq.tokens == run(make_engine(decoder, page_size=SIZE), [request])[0].seq.tokens
        if states in (0, 64) or tokens[:45] == text[:45]:
            assert writer.cached_tokens == (hits if states else 0)
    assert engine.runner.states.kept <= states


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_round_that_fails_after_its_forward_is_run_again(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """In the middle of a prompt, at its end, and while decoding with drafts: rows begin where the failed ones did."""
    request = make_request([1, 2, 3] * 13, SamplingParams(temperature=0.0, max_tokens=20))
    want = run(make_engine(decoder, page_size=SIZE), [request])[0].seq.tokens
    verify, calls = rounds.verify, iter(range(1, 1000))

    def failing_once(*arguments):  # type: ignore[no-untyped-def]
        if next(calls) == failing:
            raise RuntimeError("planted")
        return verify(*arguments)

    monkeypatch.setattr(rounds, "verify", failing_once)
    writer = run(engine_of(decoder, NGramDrafter(NGramOptions(1, 3)), 4), [request])[0]
    assert writer.seq.tokens == want
    assert next(calls) > failing


@pytest.mark.parametrize("waiting", [2, 3, 6])
def test_a_row_that_waits_for_its_choice_is_read_again(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
    """As where the mask of a grammar is late: the round gives no token, and its root comes again. The second ends a prompt."""
    request = make_request([1, 2, 3] * 13, SamplingParams(temperature=0.0, max_tokens=20))
    want = run(make_engine(decoder, page_size=SIZE), [request])[0].seq.tokens
    verify, calls = rounds.verify, iter(range(1, 1000))

    def late_once(*arguments):  # type: ignore[no-untyped-def]
        verdicts = verify(*arguments)
        return [Verdict([], []) for _ in verdicts] if next(calls) == waiting else verdicts

    monkeypatch.setattr(rounds, "verify", late_once)
    writer = run(engine_of(decoder, NGramDrafter(NGramOptions(1, 3)), 4), [request])[0]
    assert writer.seq.tokens == want
    assert writer.seq.stats.fallback_reason is None


def test_states_of_many_sequences_stay_within_the_plan(root: Path) -> None:
    """64 sequences with 16 nodes each: tensors are counted once, whoever refers to them."""
    decoder = random_decoder(write_family(root / "many", "qwen3.5"), seed=2)
    requests = [
        make_request([(i + j) % 5 for j in range(3)], SamplingParams(temperature=0.0, max_tokens=10), f"r{i}") for i in range(64)
    ]
    answers = {
        writer.seq.request.id: writer.seq.tokens for writer in run(engine_of(decoder, NoDrafter(), 0, 700, 0, 64), requests)
    }
    engine = engine_of(decoder, Oracle(answers, 16, branches=8, seed=1), 16, 700, 0, 64)
    held: list[int] = []

    def observe(report: RoundReport) -> None:
        tensors = {
            (part.data_ptr(), part.nbytes)
            for seq in report.batch.sequences
            if seq.state is not None and seq.state.pending is not None
            for pending in [seq.state.pending]
            for layer in (*seq.state.past.states, *pending.before, *pending.after)
            for part in layer
            if part is not None
        }
        nodes = sum(
            x.nbytes for seq in report.batch.sequences if seq.state and seq.state.pending for x in seq.state.pending.nodes
        )
        held.append(nodes + sum(size for _, size in tensors))

    engine.listen(SimpleNamespace(observe=observe))
    for request in requests:
        engine.submit(request, "test")
    while engine.has_work:
        engine.round()
    assert len(held) > 1
    assert 32 * decoder.spec.state_bytes < max(held) <= 64 * sequence_bytes(decoder.spec)
