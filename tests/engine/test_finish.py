"""Finishing inside an accepted run gives what decoding one token at a time gives."""

from __future__ import annotations

import pytest

from outrider.core import Request
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from outrider.text import Tokenizer
from tests.support import Oracle, make_engine, make_request, random_decoder, run, write_family, write_tokenizer

VOCAB = 300
PROMPT = [40, 41, 42, 260, 270]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    root = tmp_path_factory.mktemp("text")
    tokenizer = Tokenizer.load(write_tokenizer(root, VOCAB))
    assert tokenizer is not None
    return random_decoder(write_family(root, "llama2", vocab_size=VOCAB)), tokenizer


def engine_of(parts: tuple[Decoder, Tokenizer], drafter: Oracle | None = None, length: int = 0) -> Engine:
    engine = make_engine(parts[0], drafter, length)
    engine.tokenizer = parts[1]
    return engine


def both(parts: tuple[Decoder, Tokenizer], request: Request, free: OutputProcessor) -> tuple[OutputProcessor, OutputProcessor]:
    """The request decoded plainly, and with drafts that are always right."""
    plain = run(engine_of(parts), [request])[0]
    oracle = Oracle({request.id: [*free.seq.tokens, *[1] * 40]}, 9)
    oracle.accepted = set(range(9))  # draft only complete runs
    engine = engine_of(parts, oracle, 9)
    fast = run(engine, [request])[0]
    assert engine.pages.used == 0
    return plain, fast


def assert_same(plain: OutputProcessor, fast: OutputProcessor) -> None:
    a, b = plain.output(), fast.output()
    assert (b.text, b.token_ids, b.logprobs, b.finish_reason, b.stop_reason) == (
        a.text,
        a.token_ids,
        a.logprobs,
        a.finish_reason,
        a.stop_reason,
    )


@pytest.fixture(scope="module", params=[0.0, 0.8])
def free(request: pytest.FixtureRequest, parts) -> OutputProcessor:  # type: ignore[no-untyped-def]
    """The output of the model without stop conditions."""
    params = SamplingParams(temperature=request.param, seed=3, max_tokens=60, logprobs=2)
    return run(engine_of(parts), [make_request(PROMPT, params)])[0]


def with_params(free: OutputProcessor, **changes) -> Request:  # type: ignore[no-untyped-def]
    old = free.seq.request.params
    base = {"temperature": old.temperature, "seed": old.seed, "max_tokens": 60, "logprobs": 2}
    return make_request(PROMPT, SamplingParams(**(base | changes)))


@pytest.mark.parametrize("limit", range(1, 24))
def test_max_tokens_inside_an_accepted_run(parts, free: OutputProcessor, limit: int) -> None:  # type: ignore[no-untyped-def]
    plain, fast = both(parts, with_params(free, max_tokens=limit), free)
    assert_same(plain, fast)
    assert fast.seq.output_len == limit
    assert fast.seq.finish_reason == "length"


@pytest.mark.parametrize("place", range(1, 40, 3))
def test_stop_ids_inside_an_accepted_run(parts, free: OutputProcessor, place: int) -> None:  # type: ignore[no-untyped-def]
    token = free.seq.tokens[len(PROMPT) + place]
    for changes in ({}, {"min_tokens": place + 5}, {"include_stop_str_in_output": True}):
        plain, fast = both(parts, with_params(free, stop_token_ids=[token], **changes), free)
        assert_same(plain, fast)
        if "min_tokens" not in changes:
            assert fast.output().stop_reason == token
            assert fast.seq.tokens[-1] == token


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("place", range(2, 50, 5))
def test_stop_strings_inside_an_accepted_run(parts, free: OutputProcessor, place: int, width: int) -> None:  # type: ignore[no-untyped-def]
    stop = free.text[place : place + width]
    for changes in ({}, {"include_stop_str_in_output": True}, {"min_tokens": 15}):
        plain, fast = both(parts, with_params(free, stop=[stop, "never in the text"], **changes), free)
        assert_same(plain, fast)
        if not changes:
            assert plain.output().stop_reason == stop
            assert stop not in plain.text
        assert plain.text == free.text[: len(plain.text)]


def test_min_tokens_bans_stop_ids(parts, free: OutputProcessor) -> None:  # type: ignore[no-untyped-def]
    first = free.seq.tokens[len(PROMPT)]
    plain, fast = both(parts, with_params(free, stop_token_ids=[first], min_tokens=10), free)
    assert_same(plain, fast)
    assert first not in plain.seq.tokens[len(PROMPT) : len(PROMPT) + 9]


def test_statistics_count_only_kept_tokens(parts, free: OutputProcessor) -> None:  # type: ignore[no-untyped-def]
    """Statistics count only what was kept."""
    _, fast = both(parts, with_params(free, max_tokens=14), free)
    stats = fast.seq.stats
    assert stats.emitted == 14
    assert stats.accepted == sum(fast.from_draft) == sum(stats.accepted_by_position)


def test_streamed_text_equals_the_output_text(parts, free: OutputProcessor) -> None:  # type: ignore[no-untyped-def]
    stop = free.text[20:23]
    request = with_params(free, stop=[stop])
    engine = engine_of(parts)
    processor = engine.submit(request, "none")
    text, tokens = "", []
    while engine.has_work:
        for changed in engine.round():
            chunk = changed.chunk()
            text, tokens = text + chunk.text, tokens + chunk.token_ids
            assert processor.text.startswith(text)
    assert text == processor.output().text
    assert tokens == processor.output().token_ids


def test_abort_releases_pages_in_every_phase(parts) -> None:  # type: ignore[no-untyped-def]
    for rounds in (0, 1, 2, 6):
        oracle = Oracle({"r": [*PROMPT * 30, *[1] * 60]}, 4, branches=3)
        engine = engine_of(parts, oracle, 7)
        processor = engine.submit(make_request(PROMPT * 30, SamplingParams(temperature=0, max_tokens=50)), "test")
        for _ in range(rounds):
            engine.round()
        engine.abort(processor)
        assert processor.output().finish_reason == "abort"
        assert engine.pages.used == 0
        assert not engine.has_work


def test_parameters_that_forbid_every_token_are_blamed_and_not_the_model(parts: tuple[Decoder, Tokenizer]) -> None:
    """`min_tokens` forbids the one token that is allowed."""
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=3, allowed_token_ids=[7], stop_token_ids=[7])
    for engine in (engine_of(parts), engine_of(parts, Oracle({"r": [*PROMPT, *[7] * 40]}, 4), 4)):
        seq = run(engine, [make_request(PROMPT, params)])[0].seq
        assert seq.finish_reason == "error"
        assert seq.stop_reason == "no token can follow: the parameters forbid them all"
