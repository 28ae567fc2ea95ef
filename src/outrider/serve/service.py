"""The engine behind the server: its state, who may enter, and the news on its way from one thread to the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from outrider.core import Request
from outrider.engine.commit import Writer
from outrider.engine.outputs import CompletionOutput, StreamPiece
from outrider.engine.worker import EngineThread, Job
from outrider.errors import EngineDead, OutriderError
from outrider.serve.errors import ApiError
from outrider.serve.metrics import Metrics, Snapshot, snapshot_of
from outrider.serve.settings import Settings

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["Service", "Ticket"]

_log = logging.getLogger("outrider.serve")
Status = Literal["ok", "loading", "draining", "dead"]
T = TypeVar("T")
_SAMPLES = 6  # snapshots kept, one a second: rates are over the last five


class Ticket:
    """One HTTP request's jobs and the pieces that came of them. Lives on the event loop; `tell` is for the engine's thread."""

    def __init__(self, service: Service, streams: bool, interval: int) -> None:
        self.jobs: list[Job] = []
        self.begun = time.time()
        self.open = 0  # sequences not ended
        self.outputs: dict[int, CompletionOutput] = {}
        self._service = service
        self._streams = streams
        self._interval = interval
        self._pieces: deque[tuple[int, StreamPiece]] = deque()
        self._error: OutriderError | None = None
        self._news = asyncio.Event()
        self._after: list[Callable[[Ticket], None]] = []

    def on_end(self, call: Callable[[Ticket], None]) -> None:
        """Have something done when every sequence has ended."""
        self._after.append(call)

    def wants(self, writer: Writer) -> bool:
        """Whether a piece may be made now: not for those who wait for the whole, nor for a reader who lags behind."""
        if not self._streams or len(self._pieces) >= self._service.settings.limits.backlog:
            return False
        return len(writer.from_draft) - writer.sent >= self._interval

    def take(self, job: int, news: StreamPiece | OutriderError) -> None:
        """On the event loop: something came."""
        if self._error is not None:
            return
        if isinstance(news, OutriderError):
            self._error = news
            self._service.left(self)
        else:
            index = job * len(self.jobs[job].requests) + news.index
            self._pieces.append((index, news))
            if news.output is not None:
                self.outputs[index] = news.output
                self.open -= 1
                self._service.finished(self, self.jobs[job].requests[news.index], news.output)
                for call in () if self.open else self._after:
                    call(self)
        self._news.set()

    async def pieces(self, ping_s: float | None = None) -> AsyncIterator[list[tuple[int, StreamPiece]]]:
        """All that came since the last look, until every sequence has ended; an empty list after `ping_s` of silence."""
        while self.open or self._pieces:
            if not self._pieces and self._error is None:
                self._news.clear()
                try:
                    async with asyncio.timeout(ping_s):
                        await self._news.wait()
                except TimeoutError:
                    yield []
                    continue
            if self._error is not None:
                raise self._error
            found = list(self._pieces)
            self._pieces.clear()
            yield found

    async def whole(self) -> list[CompletionOutput]:
        """Every output, when all have ended."""
        async for _ in self.pieces():
            pass
        return [self.outputs[i] for i in sorted(self.outputs)]


class Service:
    """Loads the model in the background, admits requests, and hands out what the engine writes."""

    def __init__(self, settings: Settings, load: Callable[[], LLM]) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_name)
        self.started = time.time()
        self.failure: BaseException | None = None  # why loading failed
        self.llm: LLM | None = None
        self.thread: EngineThread | None = None
        self.draining = False
        self.in_flight = 0  # sequences admitted and not ended
        self.last = Snapshot()
        self.samples: deque[tuple[float, Snapshot]] = deque(maxlen=_SAMPLES)
        self._load = load
        self._workers = ThreadPoolExecutor(2, "outrider-text")  # tokenising and templates, off the event loop
        self._tickets: set[Ticket] = set()
        self._outbox: deque[tuple[Ticket, int, StreamPiece | OutriderError]] = deque()
        self._called = False  # whether the event loop has been told of the outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> Status:
        if self.failure is not None or (self.thread is not None and not self.thread.alive):
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.thread is None else "ok"

    def begin(self) -> None:
        """Start to load; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._start()), self._loop.create_task(self._sample())]

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[LLM] = loop.create_future()

        def work() -> None:
            try:
                llm, error = self._load(), None
            except BaseException as caught:
                llm, error = None, caught
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(settle, llm, error)

        def settle(llm: LLM | None, error: BaseException | None) -> None:
            if not loaded.done():
                loaded.set_exception(error) if error is not None else loaded.set_result(llm)  # type: ignore[arg-type]

        threading.Thread(target=work, name="outrider-load", daemon=True).start()
        try:
            llm = await loaded
        except Exception as error:
            self.failure = error
            _log.critical("the model could not be loaded: %s", error)
            return
        self.llm, self.thread = llm, EngineThread(llm.engine)

    async def end(self) -> None:
        """Stop the engine and everything that waits for it."""
        for task in self._tasks:
            task.cancel()
        if self.thread is not None:
            await asyncio.to_thread(self.thread.close)
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Let what runs finish, within the time given; then abort it."""
        self.draining = True
        until = time.monotonic() + self.settings.drain_s
        while self._tickets and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for ticket in list(self._tickets):
            self.abort(ticket)
        while self._tickets and time.monotonic() < until + 5:
            await asyncio.sleep(0.02)

    def ready(self) -> LLM:
        """The model, or why there is none now."""
        status = self.status
        if status != "ok":
            headers = {} if status == "dead" else {"Retry-After": "5"}
            raise ApiError(503, f"the server is {status}", code=status, headers=headers)
        assert self.llm is not None
        return self.llm

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run what takes long elsewhere, so that others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def admit(self, sequences: int) -> None:
        """Refuse at once what would wait behind a full queue."""
        llm = self.ready()
        if self.in_flight + sequences > llm.engine.scheduler.most + self.settings.max_queue:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                f"{self.in_flight} sequences are running or waiting; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def submit(self, jobs: Sequence[tuple[list[Request], str]], streams: bool) -> Ticket:
        """Hand checked requests to the engine."""
        self.admit(sum(len(requests) for requests, _ in jobs))
        assert self.thread is not None
        ticket = Ticket(self, streams, self.settings.stream_interval)
        self._tickets.add(ticket)
        for number, (requests, method) in enumerate(jobs):
            ticket.open += len(requests)
            self.in_flight += len(requests)
            try:
                ticket.jobs.append(self.thread.submit(requests, method, self._teller(ticket, number), ticket.wants))
            except EngineDead:
                self.left(ticket)
                raise
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End a ticket's sequences; those that ended already stay as they are."""
        if self.thread is not None and ticket.open:
            for job in ticket.jobs:
                self.thread.abort(job)

    def finished(self, ticket: Ticket, request: Request, output: CompletionOutput) -> None:
        self.in_flight -= 1
        self.metrics.finished(request, output)
        if not ticket.open:
            self._tickets.discard(ticket)

    def left(self, ticket: Ticket) -> None:
        """A ticket whose jobs the engine refused or lost."""
        self.in_flight -= ticket.open
        ticket.open = 0
        self._tickets.discard(ticket)

    def _teller(self, ticket: Ticket, job: int) -> Callable[[StreamPiece | OutriderError], None]:
        def tell(news: StreamPiece | OutriderError) -> None:
            """On the engine's thread: one wake-up of the event loop for all that a round brings."""
            self._outbox.append((ticket, job, news))
            if not self._called:
                self._called = True
                assert self._loop is not None
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    self._loop.call_soon_threadsafe(self._deliver)

        return tell

    def _deliver(self) -> None:
        self._called = False  # before the outbox is read: what comes later calls again
        while self._outbox:
            ticket, job, news = self._outbox.popleft()
            ticket.take(job, news)

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(EngineDead):
                await self.look()
            self.samples.append((time.monotonic(), self.last))
            await asyncio.sleep(1.0)

    async def look(self) -> Snapshot:
        """The engine's counts now, or the last known where it is busy for long."""
        if self.thread is not None and self.thread.alive:
            answer = asyncio.wrap_future(self.thread.ask(snapshot_of))
            done, _ = await asyncio.wait([answer], timeout=1.0)
            if done:
                self.last = answer.result()
        return self.last

    def stats(self) -> dict[str, Any]:
        """What the dashboard shows."""
        now = self.last
        then_s, then = self.samples[0] if self.samples else (0.0, now)
        seconds = max(time.monotonic() - then_s, 1e-3)
        tokens, rounds = now.emitted - then.emitted, now.rounds - then.rounds
        drafted = now.drafted_by_position
        return {
            "model": self.settings.model_name,
            "status": self.status,
            "method": None if self.llm is None else self.llm.speculation.method,
            "methods": [] if self.llm is None else sorted(self.llm.speculation.methods()),
            "uptime_s": round(time.time() - self.started, 3),
            "running": now.running,
            "waiting": now.waiting,
            "kv_usage": now.kv_usage,
            "prefix_hit_rate": now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0,
            "preemptions": now.preemptions,
            "generated_tokens": now.emitted,
            "tokens_per_s": round(tokens / seconds, 3),
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_by_position": [round(a / d, 4) for a, d in zip(now.accepted_by_position, drafted, strict=True)],
            "by_method": {name: {"drafted": d, "accepted": a} for name, (d, a) in now.by_source.items()},
            "off_reasons": dict(self.metrics.off_reasons),
            "finished": dict(self.metrics.finish_reasons),
        }
