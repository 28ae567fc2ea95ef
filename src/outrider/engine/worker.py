"""The engine's thread. Requests are submitted, streamed and aborted from any other thread."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

from outrider.core import Request, Sequence
from outrider.engine.commit import OutputProcessor
from outrider.engine.engine import Engine
from outrider.engine.outputs import StreamPiece
from outrider.engine.tally import Heartbeat
from outrider.errors import EngineDead, OutriderError, RequestFailed
from outrider.ops import keep_one_torch_thread

__all__ = ["EngineHost", "EngineThread", "Job"]

_log = logging.getLogger("outrider")
JobEvent = StreamPiece | OutriderError
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Job:
    """Requests that are submitted together: all of them are accepted, or none.

    Events go to `callback`, which is called on the engine's thread, or are queued for `chunks` to read. While `wants`
    returns False, tokens wait for a later chunk. The last chunk is always delivered.
    """

    engine: Engine
    requests: Seq[Request]
    method: str
    wants: Callable[[OutputProcessor], bool] | None = None
    callback: Callable[[JobEvent], None] | None = None
    inbox: queue.SimpleQueue[JobEvent] = field(default_factory=queue.SimpleQueue)
    processors: list[OutputProcessor] = field(default_factory=list)
    unread: int = field(init=False)  # requests whose last chunk has not been read

    def __post_init__(self) -> None:
        self.unread = len(self.requests)

    def chunks(self) -> Iterator[StreamPiece]:
        """Chunks of output as they arrive, until every request has ended."""
        assert self.callback is None, "this job's events go to its callback"
        while self.unread:
            event = self.inbox.get()
            if isinstance(event, OutriderError):
                raise event
            self.unread -= event.output is not None
            yield event

    def put(self, event: JobEvent) -> None:
        """Deliver an event to the callback or the inbox."""
        (self.callback or self.inbox.put)(event)


class EngineHost:
    """Owns the engine thread of an LLM and of every LLM beside it. Starts it on first use, and again after it died."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine  # None: closed
        self._lock = threading.Lock()
        self._thread: EngineThread | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def thread(self) -> EngineThread:
        with self._lock:
            if self._engine is None:
                raise EngineDead("this LLM was closed; load a new one")
            if self._thread is None or not self._thread.alive:
                self._thread = EngineThread(self._engine)
                self._end = weakref.finalize(self, self._thread.close)  # the thread holds no reference to its host
            return self._thread

    def call(self, question: Callable[[], T]) -> T:
        """Call a function between two rounds, or directly if the thread does not run."""
        with self._lock:
            if self._thread is None or not self._thread.alive:
                return question()
            answer = self._thread.ask(lambda _: question())
        return answer.result()

    def close(self) -> None:
        """End the thread and drop the engine."""
        with self._lock:
            self._engine = self._thread = None
            self._end()


class EngineThread:
    """Rounds run here as long as there is work. Everything an engine owns is touched by this thread alone.

    Engines that share weights and KV pages are run by one thread, in turns of a round: each of them goes on whether or
    not anybody reads what it writes, so none waits for ever for pages that another holds.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None  # why the thread died, if it did
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self._busy_since: float | None = None  # start of the current round or call; None while idle
        self._unstarted: set[Job] = set()
        self._jobs: dict[Sequence, Job] = {}  # the job of every unfinished sequence
        self._busy: list[Engine] = []  # engines with work
        self._heartbeat = Heartbeat(engine)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread accepts jobs. In a forked child it does not."""
        return self._open and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last ended a round or a call; 0 while it is idle."""
        since = self._busy_since
        return 0.0 if since is None else monotonic() - since

    def submit(
        self,
        requests: Seq[Request],
        method: str,
        callback: Callable[[JobEvent], None] | None = None,
        wants: Callable[[OutputProcessor], bool] | None = None,
    ) -> Job:
        """Queue requests, all or none. Without a callback, read their output with `Job.chunks`."""
        job = Job(self.engine, requests, method, wants, callback)
        self.enqueue(job)
        return job

    def enqueue(self, job: Job) -> None:
        """Queue a job, or raise EngineDead."""
        self._unstarted.add(job)
        self._put(partial(self._start, job))
        job.engine.grammars.masks.notify()  # the thread may be waiting for a mask

    def _put(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self.alive:
                raise self._stopped()
            self._calls.put(call)

    @contextmanager
    def running(self, job: Job) -> Iterator[Job]:
        """Queue a job for the duration of the block. Requests that have not ended by then are aborted."""
        try:
            self.enqueue(job)
            yield job
        finally:
            if job.unread and self.alive:
                self.abort(job)
                if threading.current_thread() is not self._thread:  # the garbage collector may run this on the engine's thread
                    self._settle()

    def _settle(self) -> None:
        """Wait until all calls queued so far are done."""
        with suppress(EngineDead):
            answer = self.ask(lambda _: None)
            while self.alive and not answer.done():
                wait([answer], timeout=1.0)

    def abort(self, job: Job) -> None:
        """End a job's samples before the next round. Each of them delivers its last chunk."""
        self._calls.put(partial(self._abort, job))

    def ask(self, question: Callable[[Engine], T]) -> Future[T]:
        """Call a function on the engine's thread, between two rounds."""
        answer: Future[T] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self.engine))
                except BaseException as error:
                    answer.set_exception(error)
                    if not isinstance(error, Exception):
                        raise

        self._put(reply)
        return answer

    def close(self, timeout: float | None = 10.0) -> None:
        """Abort running jobs and end the thread."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        keep_one_torch_thread(self.engine.runner.ops)
        try:
            while self._answer_calls():
                self._run_rounds()
                self._heartbeat.beat()
        except EngineDead as error:
            self.error = error
            _log.critical("the engine's thread ended: %s", error)
        except BaseException as error:
            self.error = error
            _log.critical("the engine's thread died", exc_info=error)
        with self._lock:
            self._open = False
        self._end_all()

    def _answer_calls(self) -> bool:
        """Run the calls queued since the last round. Blocks while no engine has work. Returns False on close."""
        while not self._busy or not self._calls.empty():
            if not self._busy:
                self._busy_since = None
                if self._calls.empty() and self.engine.runner.capture_next():
                    continue
            call = self._calls.get()
            self._busy_since = monotonic()
            if call is None:
                return False
            call()
            del call  # a finished call must not be kept alive while this blocks
        self._busy_since = monotonic()
        return True

    def _run_rounds(self) -> None:
        for engine in self._busy:
            for processor in engine.round():
                self._emit(processor)
        self._busy = [engine for engine in self._busy if engine.has_work]

    def _start(self, job: Job) -> None:
        if job not in self._unstarted:  # it has already been dropped with an error
            return
        try:
            job.processors += [job.engine.prepare(request, job.method) for request in job.requests]
            self._jobs.update({processor.seq: job for processor in job.processors})
            self._unstarted.discard(job)
            job.engine.admit(job.processors)
            if job.engine not in self._busy:
                self._busy.append(job.engine)
        except OutriderError as error:
            self._drop(job, error)
        except Exception as error:
            _log.exception("a request could not be prepared")
            self._drop(job, RequestFailed(f"the request could not be prepared: {type(error).__name__}: {error}"))

    def _abort(self, job: Job) -> None:
        for processor in job.processors:
            if processor.seq in self._jobs:
                job.engine.abort(processor)
                self._emit(processor)

    def _emit(self, processor: OutputProcessor) -> None:
        job = self._jobs.get(processor.seq)
        if job is None:
            return
        try:
            ended = processor.seq.finish_reason is not None
            if ended or job.wants is None or job.wants(processor):
                job.put(processor.chunk())
            if ended:
                del self._jobs[processor.seq]
        except Exception as error:
            _log.exception("a chunk of a request could not be delivered; the request is aborted")
            self._drop(job, RequestFailed(f"its output could not be delivered: {type(error).__name__}: {error}"))

    def _drop(self, job: Job, reason: OutriderError) -> None:
        """Abort the unfinished requests of a job and deliver the reason."""
        self._unstarted.discard(job)
        try:
            for processor in job.processors:
                if self._jobs.pop(processor.seq, None) is not None:
                    job.engine.abort(processor)
        finally:
            with suppress(Exception):
                job.put(reason)

    def _end_all(self) -> None:
        """Drop all jobs with an error, including those queued while the thread was closing."""
        left: list[Callable[[], object] | None] = []
        for job in {*self._unstarted, *self._jobs.values()}:
            left.append(partial(self._drop, job, self._stopped()))
        while not self._calls.empty():
            left.append(self._calls.get())
        for call in left:
            try:
                _ = call and call()
            except Exception:
                _log.exception("a request could not be ended")

    def _stopped(self) -> EngineDead:
        if isinstance(self.error, EngineDead):
            return type(self.error)(str(self.error))
        return EngineDead(f"the engine has stopped ({self.error or 'it was closed'}); start a new one")
