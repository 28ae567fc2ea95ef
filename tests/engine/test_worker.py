"""The engine thread: many callers, aborts in every phase, and a dead thread that leaves no caller waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from outrider.engine.worker import EngineThread, Job
from outrider.errors import EngineDead, QueueFull
from outrider.model import Decoder
from outrider.sampling import SamplingParams
from tests.support import make_engine, make_request, random_decoder, renamed, run, write_family


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "qwen2"), seed=2)


@pytest.fixture
def thread(decoder: Decoder) -> Iterator[EngineThread]:
    engine_thread = EngineThread(make_engine(decoder, max_num_seqs=4))
    yield engine_thread
    engine_thread.close()


def request(i: int, tokens: int = 20):  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0.8, seed=i, max_tokens=tokens)
    return make_request([i % 50 + 1, 5, 9], params, f"r{i}")


def tokens_of(job: Job) -> list[list[int]]:
    out: dict[int, list[int]] = {}
    for chunk in job.chunks():
        out.setdefault(chunk.index, []).extend(chunk.token_ids)
    return [out[i] for i in sorted(out)]


def test_many_threads_get_the_tokens_each_gets_alone(decoder: Decoder, thread: EngineThread) -> None:
    results: dict[int, list[list[int]]] = {}

    def ask(i: int) -> None:
        samples = [renamed(request(i), index=j) for j in range(1 + i % 3)]
        results[i] = tokens_of(thread.submit(samples, "none"))

    callers = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for i in range(12):
        alone = [run(make_engine(decoder), [renamed(request(i), index=j)])[0] for j in range(1 + i % 3)]
        assert results[i] == [processor.output().token_ids for processor in alone]
    assert thread.engine.pages.used == 0


def test_aborts_take_effect_while_waiting_reading_and_writing(thread: EngineThread) -> None:
    long = [thread.submit([request(i, 400)], "none") for i in range(4)]
    next(iter(long[0].chunks()))  # it has started to decode
    waiting = thread.submit([request(8)], "none")
    reading = thread.submit([make_request([3] * 400, SamplingParams(max_tokens=9), "long")], "none")
    for job in (waiting, reading, *long):
        thread.abort(job)
        last = list(job.chunks())[-1]
        assert last.output is not None
        assert last.output.finish_reason == "abort"
    for _ in range(200):
        if not thread.engine.has_work:
            break
        time.sleep(0.01)
    assert thread.engine.pages.used == 0
    assert tokens_of(thread.submit([request(1)], "none"))


def test_a_full_queue_refuses_the_submitter(decoder: Decoder) -> None:
    thread = EngineThread(make_engine(decoder, max_num_seqs=1, max_queue=1))
    jobs = [thread.submit([request(i, 200)], "none") for i in range(4)]
    refused = 0
    for job in jobs:
        try:
            next(iter(job.chunks()))
        except QueueFull:
            refused += 1
        thread.abort(job)
    thread.close()
    assert refused >= 1
    assert thread.engine.pages.used == 0
    assert not thread.engine._processors, "the refused are forgotten too"


def test_a_callback_that_raises_fails_only_its_request(decoder: Decoder, thread: EngineThread) -> None:
    def raises(event: object) -> None:
        raise RuntimeError("gone")

    thread.submit([request(5, 300)], "none", raises)
    good = tokens_of(thread.submit([request(6)], "none"))
    assert good == [run(make_engine(decoder), [request(6)])[0].output().token_ids]
    assert thread.alive


def test_tokens_held_back_arrive_with_the_last_chunk(decoder: Decoder, thread: EngineThread) -> None:
    whole = run(make_engine(decoder), [request(3)])[0].output().token_ids
    unstreamed = list(thread.submit([request(3)], "none", wants=lambda processor: False).chunks())
    assert [chunk.token_ids for chunk in unstreamed] == [whole]
    batched = list(
        thread.submit([request(3)], "none", wants=lambda processor: len(processor.from_draft) - processor.sent >= 6).chunks()
    )
    assert [len(chunk.token_ids) for chunk in batched] == [6, 6, 6, 2]
    assert [token for chunk in batched for token in chunk.token_ids] == whole


def test_questions_are_answered_between_rounds(thread: EngineThread) -> None:
    job = thread.submit([request(4, 300)], "none")
    next(iter(job.chunks()))
    names = [thread.ask(lambda engine: (threading.current_thread().name, len(engine.scheduler.running))) for _ in range(3)]
    assert {answer.result(30) for answer in names} == {("outrider-engine", 1)}
    thread.abort(job)
    list(job.chunks())
    thread.close()
    with pytest.raises(EngineDead):
        thread.ask(lambda engine: None)


def test_a_dead_thread_fails_running_and_new_jobs(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    thread = EngineThread(engine)
    job = thread.submit([request(1, 300)], "none")
    next(iter(job.chunks()))

    def broken() -> None:
        raise MemoryError("no more")

    engine.scheduler.next = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDead, match="no more"):
        list(job.chunks())
    for _ in range(200):
        if not thread.alive:
            break
        time.sleep(0.01)
    with pytest.raises(EngineDead, match="start a new one"):
        thread.submit([request(2)], "none")


def test_closing_ends_running_jobs(decoder: Decoder) -> None:
    before = threading.active_count()
    thread = EngineThread(make_engine(decoder))
    job = thread.submit([request(1, 400)], "none")
    next(iter(job.chunks()))
    thread.close()
    with pytest.raises(EngineDead, match="closed"):
        list(job.chunks())
    assert thread.engine.pages.used == 0
    assert threading.active_count() == before
