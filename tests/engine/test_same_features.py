"""Promise one over every feature of a model spec: trees of all shapes, several requests at once, with and without preemption."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.control import FixedLength
from outrider.core import Request
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_request, run
from tests.support.engines import assert_same_bits, renamed, run_recorded
from tests.support.oracle import Shapes

pytestmark = pytest.mark.usefixtures("both_paths")
LONG = "rotary tables by length"  # its requests of up to 32 tokens use another table than longer ones


@lru_cache(maxsize=4)
def decoder_of(name: str, dtype: str) -> Decoder:
    return random_decoder(FEATURE_SPECS[name], dtype)


def requests_of(name: str, max_tokens: tuple[int, ...] = (8, 26, 40)) -> list[Request]:
    rng, vocab = random.Random(name), FEATURE_SPECS[name].vocab
    params = [
        SamplingParams(temperature=heat, seed=3, max_tokens=n) for heat, n in zip((0.0, 0.9, 0.0), max_tokens, strict=False)
    ]
    return [make_request([rng.randrange(vocab) for _ in range(17 + 9 * i)], one, f"r{i}") for i, one in enumerate(params)]


@pytest.mark.parametrize("shape", ["chain", "comb", "bushy"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FEATURE_SPECS)
def test_trees_give_the_tokens_and_bits_of_plain_decoding(name: str, dtype: str, shape: str) -> None:
    decoder, requests = decoder_of(name, dtype), requests_of(name)
    plain = [run_recorded(make_engine(decoder), [request]) for request in requests]
    answers = {request.id: result[0][0].seq.tokens for request, result in zip(requests, plain, strict=True)}
    oracle = Shapes(answers, 11, vocab=decoder.spec.vocab)
    oracle.shape = shape
    fast = run_recorded(make_engine(decoder, oracle, 11, pages=12), requests)  # too few pages for all three at once
    assert_same_bits(([result[0][0] for result in plain], {k: v for result in plain for k, v in result[1].items()}), fast)
    assert sum(writer.seq.stats.accepted for writer in fast[0]) > 0


def test_a_prefix_is_shared_within_one_rotary_table_only() -> None:
    """The same prompt in a short and in a long request: their keys are rotated differently, so neither reads the other's."""
    decoder = decoder_of(LONG, "float32")
    prompt, greedy = [i * 5 % 90 for i in range(20)], {"temperature": 0.0, "seed": 0}
    short, long = (make_request(prompt, SamplingParams(max_tokens=n, **greedy), f"{n} tokens") for n in (8, 60))
    assert decoder.rotary_start(28) != decoder.rotary_start(80)
    alone = {request.id: run(make_engine(decoder), [request])[0].seq.tokens for request in (short, long)}
    for order in ((short, long, short), (long, short, long)):
        engine = make_engine(decoder)
        shared = []
        for i, request in enumerate(order):
            (writer,) = run(engine, [renamed(request, id=f"{request.id} {i}")])
            assert writer.seq.tokens == alone[request.id]
            shared.append(writer.cached_tokens)
        assert shared == [0, 0, 16], "only the third finds a page of its own table"


def test_a_table_is_that_of_the_longest_text_a_request_may_become() -> None:
    """What is generated does not depend on when the text passes the limit."""
    decoder = decoder_of(LONG, "float32")
    (request,) = requests_of(LONG, (50,))[:1]
    engine = make_engine(decoder)
    engine.policy = FixedLength(0)
    tokens = run(engine, [request])[0].seq.tokens
    again = make_request(tokens[:30], SamplingParams(temperature=0.0, seed=3, max_tokens=len(tokens) - 30))
    assert run(make_engine(decoder), [again])[0].seq.tokens == tokens
