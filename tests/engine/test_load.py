"""Requests that come and go in too little memory emit what each emits alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.config import EngineConfig
from outrider.control import FixedLength
from outrider.core import Request
from outrider.draft import Drafter
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.draft.recycle import RecycleDrafter
from outrider.draft.suffix import SuffixDrafter, SuffixOptions
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.model import Decoder, Runner
from outrider.model.memory import kv_pool
from outrider.sampling import SamplingParams
from tests.support import VOCAB, Oracle, make_engine, make_request, random_decoder, renamed, run, write_family

SIZE, PAGES = 8, 16
STATES = 12  # of recurrent layers at the ends of pages: fewer than there are pages


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(Path(tmp_path_factory.mktemp("load")), "llama3"), seed=4)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With recurrent layers."""
    return random_decoder(write_family(Path(tmp_path_factory.mktemp("load")), "qwen3.5"), seed=4)


def crowded(decoder: Decoder, drafter: Drafter, length: int, seqs: int = 6) -> Engine:
    pool = kv_pool(decoder.spec, PAGES + 1, SIZE)
    config = EngineConfig(page_size=SIZE, max_num_seqs=seqs, max_batch_rows=24)
    return Engine(Runner(decoder, pool, states=STATES), None, drafter, FixedLength(length), config)


def requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts with common beginnings, all kinds of parameters, several samples of some."""
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(5, 30))] for _ in range(4)]
    out = []
    for i in range(count):
        prompt = rng.choice(stems) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
            min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=rng.sample(range(VOCAB), 6),
            seed=rng.randrange(100),
            max_tokens=rng.randint(5, 60),
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        base = make_request(prompt, params, f"r{i}")
        fields = {"tenant": rng.choice([None, "a"]), "priority": rng.choice([0, 0, 1]), "speculate": rng.random() < 0.9}
        out += [renamed(base, index=j, **fields) for j in range(rng.choice([1, 1, 1, 3]))]
    return out


def run_crowd(engine: Engine, wanted: list[Request], rng: random.Random) -> tuple[list[OutputProcessor], set[int]]:
    """Submit a few at a time while others run, and give some up."""
    left, writers, dropped = list(wanted), [], set()
    while left or engine.has_work:
        while left and (rng.random() < 0.4 or not engine.has_work):
            writers.append(engine.submit(left.pop(0), "test"))
        engine.round()
        if rng.random() < 0.02 and writers:
            victim = rng.randrange(len(writers))
            if writers[victim].seq.finish_reason is None:
                engine.abort(writers[victim])
                dropped.add(victim)
    return writers, dropped


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NGramDrafter(NGramOptions(1, 3)),
    "suffix": lambda: SuffixDrafter(SuffixOptions(min_match=1, shared_tokens=500)),
    "recycle": lambda: RecycleDrafter(),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["none", "oracle", *DRAFTERS])
def test_a_crowd_in_few_pages_emits_what_each_emits_alone(decoder: Decoder, method: str, seed: int) -> None:
    check_crowd(decoder, method, seed)


@pytest.mark.parametrize(("method", "seed"), [("none", 0), ("oracle", 1), ("ngram", 2), ("suffix", 0), ("recycle", 1)])
def test_a_crowd_over_recurrent_states_emits_what_each_emits_alone(hybrid: Decoder, method: str, seed: int) -> None:
    check_crowd(hybrid, method, seed)


def check_crowd(decoder: Decoder, method: str, seed: int) -> None:
    rng = random.Random(seed)
    wanted = requests(rng, 16)
    solo = [run(make_engine(decoder, page_size=SIZE), [request], "none")[0] for request in wanted]
    answers = {f"{w.request.id}/{w.request.index}": w.tokens for w in (writer.seq for writer in solo)}
    if method == "oracle":
        drafter: Drafter = _ByIndex(answers, 5, branches=2, seed=seed)
    else:
        drafter = DRAFTERS[method]() if method != "none" else NGramDrafter(NGramOptions(1, 3))
    engine = crowded(decoder, drafter, 0 if method == "none" else 5)
    writers, dropped = run_crowd(engine, wanted, rng)
    for i, (writer, alone) in enumerate(zip(writers, solo, strict=True)):
        if i in dropped:
            assert writer.seq.tokens == alone.seq.tokens[: len(writer.seq.tokens)]
            continue
        assert writer.seq.tokens == alone.seq.tokens
        assert writer.seq.finish_reason == alone.seq.finish_reason
        assert writer.logprobs == alone.logprobs
        assert writer.prompt_logprobs == alone.prompt_logprobs
        assert writer.seq.stats.fallback_reason is None
    assert engine.scheduler.preemptions > 0, "memory was meant to run out"
    assert engine.pages.used == 0


class _ByIndex(Oracle):
    """An oracle that tells the samples of one request apart."""

    def _draft(self, seq, room):  # type: ignore[no-untyped-def]
        whole = self.answers
        self.answers = {seq.request.id: whole[f"{seq.request.id}/{seq.request.index}"]}
        try:
            return super()._draft(seq, room)
        finally:
            self.answers = whole


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("model", ["decoder", "hybrid"])
def test_a_text_is_continued_from_the_pages_of_the_one_before(request: pytest.FixtureRequest, model: str, length: int) -> None:
    """Ends at every offset in a page: the last token of a text has no KV and its page is not to be found."""
    decoder: Decoder = request.getfixturevalue(model)
    for output in range(5, 5 + SIZE + 1):
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=output)
        first = make_request([5, 6, 7, 8, 9, 10, 11], params, "first")
        engine = crowded(decoder, NGramDrafter(NGramOptions(1, 3)), length)
        tokens = run(engine, [first])[0].seq.tokens
        again = make_request([*tokens, 3], params, "again")
        writer = engine.submit(again, "test")
        while engine.has_work:
            engine.round()
        assert engine.scheduler.prefix_hits == (len(tokens) - 1) // SIZE * SIZE
        assert writer.seq.tokens == run(make_engine(decoder, page_size=SIZE), [again], "none")[0].seq.tokens
