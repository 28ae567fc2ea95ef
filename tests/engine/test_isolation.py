"""A failure in preparing or sampling one request fails only that request, whatever its parameters are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.core import Request
from outrider.draft.ngram import NGramDrafter, NGramOptions
from outrider.engine.worker import EngineThread, Job
from outrider.errors import OutriderError, QueueFull, RequestFailed
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import VOCAB, make_engine, make_request, random_decoder, run, write_family


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "qwen2"), seed=2)


@pytest.fixture
def thread(decoder: Decoder) -> Iterator[EngineThread]:
    thread = EngineThread(make_engine(decoder, NGramDrafter(NGramOptions(1, 3)), 4, max_num_seqs=4))
    yield thread
    thread.close()


def good(i: int) -> Request:
    params = SamplingParams(temperature=0.8 * (i % 3), seed=i, max_tokens=12 + i, repetition_penalty=1.0 + 0.1 * (i % 2))
    return make_request([i % 50 + 1, 5, 9] * (1 + 9 * (i % 2)), params, f"good{i}")


def tokens_of(job: Job) -> list[int]:
    return [token for chunk in job.chunks() for token in chunk.token_ids]


def outcome(job: Job) -> str | None:
    try:
        return [chunk.output for chunk in job.chunks()][-1].finish_reason  # type: ignore[union-attr]
    except OutriderError as error:
        return type(error).__name__


HOSTILE: list[dict[str, Any]] = [
    {"logit_bias": {VOCAB + 7: 3.0}},
    {"logit_bias": {-VOCAB - 1: 3.0}},
    {"allowed_token_ids": (VOCAB + 3,)},
    {"allowed_token_ids": (10**30,)},
    {"bad_word_ids": ((VOCAB + 9,),)},
    {"min_tokens": 5, "stop_ids": frozenset({VOCAB + 50})},
    {"temperature": "hot"},
    {"top_k": 10**40},
    {"top_p": None},
    {"min_p": "x"},
    {"repetition_penalty": "x"},
    {"frequency_penalty": None},
    {"logprobs": "many"},
    {"logprobs": 10**9},
    {"prompt_logprobs": "x"},
    {"stop": 7},
    {"structured": "a grammar that was never compiled"},
    {"seed": "x"},
    {"prompt_ids": (1, VOCAB + 5, 2)},
    {"prompt_ids": (1, -5, 2)},
    {"prompt_ids": (1, "two", 3)},
]


def hostile(i: int, changes: dict[str, Any]) -> Request:
    """A request that validation would refuse."""
    request = make_request([4, 5, 6], SamplingParams(temperature=0.7, seed=i, max_tokens=9), f"bad{i}")
    request_fields = {name: value for name, value in changes.items() if name in ("stop_ids", "prompt_ids", "seed")}
    for name, value in request_fields.items():
        object.__setattr__(request, name, value)
    params = request.params
    for name, value in changes.items():
        if name not in request_fields:
            try:
                params = replace(params, **{name: value})
            except (OutriderError, TypeError, ValueError):
                object.__setattr__(params, name, value)
    object.__setattr__(request, "params", params)
    return request


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("seed", range(3))
def test_hostile_parameters_fail_alone(decoder: Decoder, thread: EngineThread, seed: int) -> None:
    rng = random.Random(seed)
    wanted = [run(make_engine(decoder), [good(i)])[0].seq.tokens[len(good(i).prompt_ids) :] for i in range(6)]
    requests = [good(i) for i in range(6)] + [hostile(i, changes) for i, changes in enumerate(HOSTILE)]
    order = rng.sample(range(len(requests)), len(requests))
    jobs = {requests[i].id: thread.submit([requests[i]], "ngram") for i in order}
    assert [tokens_of(jobs[f"good{i}"]) for i in range(6)] == wanted
    outcomes = [outcome(jobs[f"bad{i}"]) for i in range(len(HOSTILE))]
    assert set(outcomes) <= {"error", "length", "stop", "RequestFailed", "InvalidParameter"}
    assert outcomes.count("error") + outcomes.count("RequestFailed") >= len(HOSTILE) // 2
    assert thread.alive
    assert thread.engine.pages.used == 0
    assert tokens_of(thread.submit([good(3)], "ngram")) == wanted[3]


def test_what_cannot_be_prepared_is_told_to_its_client(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestFailed, match="could not be prepared"):
        tokens_of(thread.submit([good(0), hostile(0, {"prompt_ids": 7})], "none"))
    assert not thread.engine.has_work
    assert tokens_of(thread.submit([good(1)], "none"))


def test_a_failure_among_samples_fails_that_sample(decoder: Decoder, thread: EngineThread) -> None:
    """Sampling of one sequence raises, in any batch."""
    wanted = [run(make_engine(decoder), [good(i)])[0].seq.tokens[len(good(i).prompt_ids) :] for i in range(3)]
    bad = make_request([4, 5], SamplingParams(temperature=0.8, seed=1, max_tokens=30, logit_bias={VOCAB + 1: 1.0}), "bad")
    jobs = [thread.submit([request], "ngram") for request in (good(0), bad, good(1), good(2))]
    assert [tokens_of(jobs[i]) for i in (0, 2, 3)] == wanted
    output = list(jobs[1].chunks())[-1].output
    assert output is not None
    assert output.finish_reason == "error"
    assert "IndexError" in str(output.stop_reason)


def test_a_refused_batch_disturbs_nobody(decoder: Decoder) -> None:
    """It is refused before anything changes: a half-done change would make every sequence read its text again."""
    engine = make_engine(decoder, max_queue=2)
    running = engine.submit(good(1), "none")
    engine.round()
    cached = running.seq.cached
    with pytest.raises(QueueFull):
        engine.admit([engine.prepare(good(i), "none") for i in range(2, 5)])
    assert engine.scheduler.waiting == 0
    engine.round()
    assert running.seq.cached > cached > 0
