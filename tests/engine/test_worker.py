"""The engine on its own thread: many callers, aborts in every phase, a death that leaves nobody waiting."""

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
    own = EngineThread(make_engine(decoder, max_num_seqs=4))
    yield own
    own.close()


def request(i: int, tokens: int = 20):  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0.8, seed=i, max_tokens=tokens)
    return make_request([i % 50 + 1, 5, 9], params, f"r{i}")


def tokens_of(job: Job) -> list[list[int]]:
    out: dict[int, list[int]] = {}
    for piece in job.pieces():
        out.setdefault(piece.index, []).extend(piece.token_ids)
    return [out[i] for i in sorted(out)]


def test_many_threads_get_what_each_gets_alone(decoder: Decoder, thread: EngineThread) -> None:
    found: dict[int, list[list[int]]] = {}

    def ask(i: int) -> None:
        samples = [renamed(request(i), index=j) for j in range(1 + i % 3)]
        found[i] = tokens_of(thread.submit(samples, "none"))

    callers = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for i in range(12):
        alone = [run(make_engine(decoder), [renamed(request(i), index=j)])[0] for j in range(1 + i % 3)]
        assert found[i] == [writer.output().token_ids for writer in alone]
    assert thread.engine.pages.used == 0


def test_aborts_take_effect_while_waiting_reading_and_writing(thread: EngineThread) -> None:
    long = [thread.submit([request(i, 400)], "none") for i in range(4)]
    next(iter(long[0].pieces()))  # it writes
    waiting = thread.submit([request(8)], "none")
    reading = thread.submit([make_request([3] * 400, SamplingParams(max_tokens=9), "long")], "none")
    for job in (waiting, reading, *long):
        thread.abort(job)
        last = list(job.pieces())[-1]
        assert last.output is not None
        assert last.output.finish_reason == "abort"
    for _ in range(200):
        if not thread.engine.has_work:
            break
        time.sleep(0.01)
    assert thread.engine.pages.used == 0
    assert tokens_of(thread.submit([request(1)], "none"))


def test_a_full_queue_is_told_to_the_one_who_asked(decoder: Decoder) -> None:
    thread = EngineThread(make_engine(decoder, max_num_seqs=1, max_queue=1))
    jobs = [thread.submit([request(i, 200)], "none") for i in range(4)]
    refused = 0
    for job in jobs:
        try:
            next(iter(job.pieces()))
        except QueueFull:
            refused += 1
        thread.abort(job)
    thread.close()
    assert refused >= 1
    assert thread.engine.pages.used == 0
    assert not thread.engine._writers, "the refused are forgotten too"


def test_a_listener_that_raises_costs_its_own_request_only(decoder: Decoder, thread: EngineThread) -> None:
    def deaf(news: object) -> None:
        raise RuntimeError("gone")

    thread.submit([request(5, 300)], "none", deaf)
    good = tokens_of(thread.submit([request(6)], "none"))
    assert good == [run(make_engine(decoder), [request(6)])[0].output().token_ids]
    assert thread.alive


def test_who_wants_no_pieces_gets_the_last_with_everything_in_it(decoder: Decoder, thread: EngineThread) -> None:
    whole = run(make_engine(decoder), [request(3)])[0].output().token_ids
    calm = list(thread.submit([request(3)], "none", wants=lambda writer: False).pieces())
    assert [piece.token_ids for piece in calm] == [whole]
    batched = list(thread.submit([request(3)], "none", wants=lambda writer: len(writer.from_draft) - writer.sent >= 6).pieces())
    assert [len(piece.token_ids) for piece in batched] == [6, 6, 6, 2]
    assert [token for piece in batched for token in piece.token_ids] == whole


def test_questions_are_answered_between_rounds(thread: EngineThread) -> None:
    job = thread.submit([request(4, 300)], "none")
    next(iter(job.pieces()))
    names = [thread.ask(lambda engine: (threading.current_thread().name, len(engine.scheduler.running))) for _ in range(3)]
    assert {answer.result(30) for answer in names} == {("outrider-engine", 1)}
    thread.abort(job)
    list(job.pieces())
    thread.close()
    with pytest.raises(EngineDead):
        thread.ask(lambda engine: None)


def test_when_the_thread_dies_everybody_hears(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    thread = EngineThread(engine)
    job = thread.submit([request(1, 300)], "none")
    next(iter(job.pieces()))

    def broken() -> None:
        raise MemoryError("no more")

    engine.scheduler.next = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDead, match="no more"):
        list(job.pieces())
    for _ in range(200):
        if not thread.alive:
            break
        time.sleep(0.01)
    with pytest.raises(EngineDead, match="start a new one"):
        thread.submit([request(2)], "none")


def test_closing_ends_what_runs(decoder: Decoder) -> None:
    before = threading.active_count()
    thread = EngineThread(make_engine(decoder))
    job = thread.submit([request(1, 400)], "none")
    next(iter(job.pieces()))
    thread.close()
    with pytest.raises(EngineDead, match="closed"):
        list(job.pieces())
    assert thread.engine.pages.used == 0
    assert threading.active_count() == before
