"""An exception at any line of the engine reaches its caller, and the engine stays usable and exact and leaks no page."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.core import Request
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.model import Decoder
from tests.support import Oracle, make_engine, make_request, random_decoder, run, write_family

ROOT = str(Path(outrider.__file__).parent)
TRACED = tuple(f"{ROOT}/{part}" for part in ("engine/", "cache/", "core.py", "verify/"))
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=1, ignore_eos=True)
PROMPTS = [[1, 2, 3], [7] * 40, [1, 2, 3, 4]]


class Bomb:
    """Raises at the k-th line executed in the traced files, once."""

    def __init__(self, line: int, error: type[BaseException]) -> None:
        self.left = self.spent = line
        self._error = error
        self.place: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.left < 0 or not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self._error("injected")
        return self

    @contextmanager
    def armed(self) -> Iterator[None]:
        threading.settrace(self)
        sys.settrace(self)
        try:
            yield
        finally:
            self.spent = self.left
            self.left = -1  # threads started in the meantime are still traced
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def lines_of(work: Callable[[], object]) -> int:
    """Lines executed in the traced files."""
    counter = Bomb(10**9, RuntimeError)
    with counter.armed():
        work()
    return 10**9 - counter.spent


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return random_decoder(write_family(tmp_path_factory.mktemp("m"), "llama2"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [make_request(prompt, PARAMS, f"r{i}") for i, prompt in enumerate(PROMPTS)]


def results_of(processors: list[Any]) -> list[Any]:
    return [
        (processor.seq.tokens, processor.logprobs, processor.from_draft and len(processor.from_draft)) for processor in processors
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_engine_goes_on_after_an_exception_at_any_line(decoder: Decoder, requests: list[Request], error: type) -> None:
    """The caller continues with rounds after the exception, and every request gets the tokens it gets alone."""
    plain = [run(make_engine(decoder), [request])[0] for request in requests]
    answers = {request.id: processor.seq.tokens for request, processor in zip(requests, plain, strict=True)}

    def fresh() -> Engine:
        return make_engine(decoder, Oracle(answers, 4, branches=2), 5, max_num_seqs=2)

    total = lines_of(lambda: run(fresh(), requests))
    hit = set()
    for k in range(3, total, max(total // 120, 1)):
        engine, bomb = fresh(), Bomb(k, error)
        processors = []
        try:
            with bomb.armed():
                processors += [engine.submit(request, "test") for request in requests]
                while engine.has_work:
                    engine.round()
        except error:
            pass
        finished = {processor.seq.request.id for processor in processors}
        processors += [engine.submit(request, "test") for request in requests if request.id not in finished]
        while engine.has_work:
            engine.round()
        hit.add(bomb.place)
        assert engine.pages.used == 0, bomb.place
        assert not engine._processors
        ours = {processor.seq.request.id: processor for processor in processors}
        failed = [processor for processor in processors if processor.seq.finish_reason == "error"]
        assert not failed, bomb.place
        assert results_of([ours[request.id] for request in requests]) == results_of(plain), bomb.place
    assert len(hit) > 60


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = write_family(tmp_path_factory.mktemp("llm"), "llama2", dtype="bfloat16")
    return LLM(model, load_format="dummy", speculation="ngram", page_size=16)


def outputs(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]


def streamed(llm: LLM) -> list[list[int]]:
    return [[token for chunk in llm.stream(PROMPTS[0], PARAMS) for token in chunk.token_ids]]


@pytest.mark.parametrize("use", [outputs, streamed])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_llm_goes_on_after_an_exception_at_any_line(llm: LLM, error: type, use: Callable[[LLM], Any]) -> None:
    """The exception is raised in the caller's thread and in the engine's, which is restarted if it died."""
    wanted = use(llm)

    def in_a_new_thread() -> Any:
        llm.thread.close()  # the next thread is started under the trace
        return use(llm)

    total = lines_of(in_a_new_thread)
    for k in range(0, total, max(total // 60, 1)):
        bomb = Bomb(k, error)
        with bomb.armed():
            try:
                results = in_a_new_thread()
            except (error, OutriderError):
                results = wanted
        assert results == wanted, bomb.place
        llm.thread._settle()  # the thread may be dying of an exception after the last chunk
        assert use(llm) == wanted, bomb.place
        llm.thread.ask(lambda engine: engine.has_work).result(30)
        while llm.engine.has_work:  # a request whose caller was interrupted during its abort ends by itself
            use(llm)
        assert llm.engine.pages.used == 0, bomb.place


def for_ever(llm: LLM) -> None:
    while True:
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))


def test_an_interrupt_in_the_main_thread_takes_effect(llm: LLM) -> None:
    wanted = outputs(llm)
    llm.thread.ask(lambda _: threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()).result()
    with pytest.raises(KeyboardInterrupt):
        for_ever(llm)
    assert not llm.engine.has_work
    assert llm.engine.pages.used == 0
    assert outputs(llm) == wanted
