"""The engine on a thread of its own; submit, stream and abort from any other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from outrider.core import Request, Sequence
from outrider.engine.commit import Writer
from outrider.engine.engine import Engine
from outrider.engine.heartbeat import Heartbeat
from outrider.engine.outputs import StreamPiece
from outrider.errors import EngineDead, OutriderError

__all__ = ["EngineThread", "Job"]

_log = logging.getLogger("outrider")
News = StreamPiece | OutriderError
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Job:
    """The samples of one request on their way through the engine.

    News comes through `tell`, called on the engine's thread, or is kept for `pieces` to read. Where `wants`
    says no, tokens wait for a later piece; the last piece always comes.
    """

    requests: Seq[Request]
    method: str
    tell: Callable[[News], None]
    inbox: queue.SimpleQueue[News] | None = None
    wants: Callable[[Writer], bool] | None = None
    writers: list[Writer] = field(default_factory=list)

    def pieces(self) -> Iterator[StreamPiece]:
        """New text as it comes, until every sample has ended."""
        assert self.inbox is not None, "this job's news goes elsewhere"
        left = len(self.requests)
        while left:
            news = self.inbox.get()
            if isinstance(news, OutriderError):
                raise news
            left -= news.output is not None
            yield news


class EngineThread:
    """Rounds run here as long as there is work. Everything the engine owns is touched by this thread alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None  # why the thread died, if it did
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._open = True
        self._jobs: dict[Sequence, Job] = {}
        self._heartbeat = Heartbeat(engine)
        self._thread = threading.Thread(target=self._live, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._open

    def submit(
        self,
        requests: Seq[Request],
        method: str,
        tell: Callable[[News], None] | None = None,
        wants: Callable[[Writer], bool] | None = None,
    ) -> Job:
        """Queue the samples of one request. Without `tell`, read them with `Job.pieces`."""
        inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        job = Job(requests, method, tell or inbox.put, None if tell else inbox, wants)
        with self._door:
            if not self._open:
                raise self._stopped()
            self._calls.put(partial(self._start, job))
        return job

    def abort(self, job: Job) -> None:
        """End a job's samples before the next round; each tells its last piece."""
        self._calls.put(partial(self._abort, job))

    def ask(self, question: Callable[[Engine], T]) -> Future[T]:
        """Have a question answered on the engine's thread, between two rounds."""
        answer: Future[T] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(question(self.engine))

        with self._door:
            if not self._open:
                raise self._stopped()
            self._calls.put(reply)
        return answer

    def close(self, timeout: float | None = 10.0) -> None:
        """Abort what runs and end the thread."""
        self._calls.put(None)
        self._thread.join(timeout)

    def _live(self) -> None:
        try:
            while self._answer_calls():
                if self.engine.has_work:
                    for writer in self.engine.round():
                        self._tell(writer)
                    self._heartbeat.beat()
        except BaseException as error:
            self.error = error
            _log.critical("the engine's thread died", exc_info=error)
        with self._door:
            self._open = False
        self._end_all()

    def _answer_calls(self) -> bool:
        """Whatever others asked for since the last round; sleeps while there is nothing to do."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _start(self, job: Job) -> None:
        try:
            if not self._open:
                raise self._stopped()
            for request in job.requests:
                writer = self.engine.submit(request, job.method)
                job.writers.append(writer)
                self._jobs[writer.seq] = job
        except OutriderError as error:
            self._drop(job, error)

    def _abort(self, job: Job) -> None:
        for writer in job.writers:
            if writer.seq in self._jobs:
                self.engine.abort(writer)
                self._tell(writer)

    def _tell(self, writer: Writer) -> None:
        job = self._jobs[writer.seq]
        if writer.seq.finish_reason is not None:
            del self._jobs[writer.seq]
        elif job.wants is not None and not job.wants(writer):
            return
        try:
            job.tell(writer.piece())
        except Exception:
            _log.exception("a listener failed; its request is aborted")
            self._drop(job)

    def _drop(self, job: Job, reason: OutriderError | None = None) -> None:
        """Forget a job whose listener is gone, or tell it why."""
        for writer in job.writers:
            if self._jobs.pop(writer.seq, None) is not None:
                self.engine.abort(writer)
        if reason is not None:
            job.tell(reason)

    def _end_all(self) -> None:
        for job in set(self._jobs.values()):
            self._drop(job, self._stopped())
        with suppress(queue.Empty):
            while True:  # those who asked while the door was closing
                call = self._calls.get(block=False)
                if call is not None:
                    call()

    def _stopped(self) -> EngineDead:
        return EngineDead(f"the engine has stopped ({self.error or 'it was closed'}); start a new one")
