"""The engine of the server: its state, admission, and the delivery of events from its thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from outrider.core import Request
from outrider.draft import Kept
from outrider.engine.commit import OutputProcessor
from outrider.engine.outputs import CompletionOutput, StreamPiece
from outrider.engine.worker import EngineThread, Job
from outrider.errors import EngineDead, OutriderError
from outrider.model.bundled import is_bundled
from outrider.sampling import Structured
from outrider.serve.errors import ApiError
from outrider.serve.fairness import Admission, Completions, FairPool, Places, in_daemon_thread
from outrider.serve.health import Watchdog, check_model
from outrider.serve.logs import request_id
from outrider.serve.memory import memory_of
from outrider.serve.metrics import Metrics, Snapshot, snapshot_of
from outrider.serve.rules import Rules, read_rules
from outrider.serve.settings import ServerSettings

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = ["RequestHandle", "Service"]

_log = logging.getLogger("outrider.serve")
Status = Literal["ok", "loading", "draining", "dead"]
T = TypeVar("T")
_REQUESTS_OF_LOGPROBS = 4  # requests of the largest allowed size whose prompt log probabilities fit in memory at once
_ABORT_S = 5.0  # time for aborted requests to be answered
_SAMPLES = 6  # snapshots kept, one per second: rates are over the last five seconds


class RequestHandle:
    """The jobs of one HTTP request and their output. All methods but `wants` run on the event loop."""

    def __init__(self, service: Service, admission: Admission, streams: bool, interval: int) -> None:
        self.request_id = request_id.get()
        self.jobs: list[Job] = []
        self.admission = admission
        self.started_s = time.time()
        self.open = 0  # unfinished sequences
        self.outputs: dict[int, CompletionOutput] = {}
        self._service = service
        self._streams = streams
        self._interval = interval
        self._chunks: deque[tuple[int, StreamPiece]] = deque()
        self._error: OutriderError | None = None
        self._changed = asyncio.Event()
        self._after: list[Callable[[RequestHandle], None]] = []

    def on_end(self, call: Callable[[RequestHandle], None]) -> None:
        """Call a function when every sequence has ended."""
        self._after.append(call)

    def wants(self, processor: OutputProcessor) -> bool:
        """Whether to make a chunk now. Not if the request does not stream, or if its reader is too slow."""
        if not self._streams or len(self._chunks) >= self._service.settings.limits.backlog:
            return False
        return len(processor.from_draft) - processor.sent >= self._interval

    def take(self, job: int, event: StreamPiece | OutriderError) -> None:
        """Take an event of one of the jobs."""
        if self._error is not None:
            return
        if isinstance(event, OutriderError):
            self._error = event
            self._service.forget(self)
        else:
            index = job * len(self.jobs[job].requests) + event.index
            self._chunks.append((index, event))
            if event.output is not None:
                self.outputs[index] = event.output
                self.open -= 1
                self._service.finished(self, self.jobs[job].requests[event.index], event.output)
                for call in () if self.open else self._after:
                    call(self)
        self._changed.set()

    async def chunks(self, ping_s: float | None = None) -> AsyncIterator[list[tuple[int, StreamPiece]]]:
        """Lists of new chunks until every sequence has ended. An empty list is yielded after `ping_s` without output."""
        while self.open or self._chunks:
            if not self._chunks and self._error is None:
                self._changed.clear()
                try:
                    async with asyncio.timeout(ping_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield []
                    continue
            if self._error is not None:
                raise self._error
            chunks = list(self._chunks)
            self._chunks.clear()
            if any(_unserved(chunk) for _, chunk in chunks):
                raise self._service.unavailable()
            yield chunks

    async def whole(self) -> list[CompletionOutput]:
        """All outputs, after every sequence has ended."""
        async for _ in self.chunks():
            pass
        return self.finished_outputs()

    def finished_outputs(self) -> list[CompletionOutput]:
        """The outputs of the sequences that have ended, in order."""
        return [self.outputs[i] for i in sorted(self.outputs)]


class Service:
    """Loads the model in the background, admits requests and delivers their output."""

    def __init__(self, settings: ServerSettings, load: Callable[[], LLM], announce: Callable[[LLM], None] | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_name, not settings.no_vllm_metrics)
        self.started = time.time()
        self.failure: BaseException | None = None  # why the model could not be loaded or the engine cannot continue
        self.llm: LLM | None = None
        self.rules = self.read_rules(settings)
        self.metrics.tags.reserve(self.rules.tags)
        self.thread: EngineThread | None = None
        self.draining = False
        self._drain_until = 0.0
        self.in_flight = 0  # sequences submitted to the engine
        self.places = Places(settings.max_queue)  # for admitted sequences; the engine's slots are added when it is loaded
        self.last = Snapshot()
        self.samples: deque[tuple[float, Snapshot]] = deque(maxlen=_SAMPLES)
        self._load = load
        self._announce = announce
        self._watchdog = Watchdog(self)
        self._text = FairPool("outrider-text", threads=4)  # tokenising, templates, large answers
        self._compiling = Places(settings.limits.grammars)
        self._logprobs = Places(_REQUESTS_OF_LOGPROBS * settings.limits.logprob_entries)
        self._completions = Completions()
        self._handles: set[RequestHandle] = set()
        self._outbox: deque[tuple[RequestHandle, int, StreamPiece | OutriderError]] = deque()
        self._delivery_scheduled = False  # whether the event loop will call `_deliver`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def read_rules(self, settings: ServerSettings) -> Rules:
        """The rules of the settings' file, checked as far as the model is known. Raises InvalidParameter."""
        rules = Rules() if settings.speculation_rules is None else read_rules(settings.speculation_rules)
        if self.llm is not None:
            _check_rules(rules, settings, self.llm)
        return rules

    @property
    def status(self) -> Status:
        if self.failure is not None or (self.thread is not None and not self.thread.alive):
            return "dead"
        if self.draining:
            return "draining"
        return "loading" if self.thread is None else "ok"

    def begin(self) -> None:
        """Start loading the model. Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(work()) for work in (self._start, self._sample, self._watchdog.run)]

    async def _start(self) -> None:
        try:
            llm, thread = await in_daemon_thread(self._load_checked, "outrider-load")
        except Exception as error:
            self.failure = error
            return
        self.llm, self.thread = llm, thread
        self.configure(self.settings)
        if self._announce is not None:
            self._announce(llm)

    def _load_checked(self) -> tuple[LLM, EngineThread]:
        """Load the model, start its engine and check that it generates a token."""
        llm = self._load()
        _check_rules(self.rules, self.settings, llm)
        thread = llm.thread
        try:
            check_model(llm, thread, self.settings.watchdog_timeout or None)
            llm.fingerprint  # noqa: B018  (reads the weights, which must not hold up a request)
        except BaseException:
            thread.close()
            raise
        gc.collect()
        gc.freeze()  # garbage collections that traverse the loaded model would block all threads
        return llm, thread

    def configure(self, settings: ServerSettings, rules: Rules | None = None) -> None:
        """Use these settings from now on, and these rules."""
        self.settings = settings
        if rules is not None:
            self.rules = rules
            self.metrics.tags.reserve(rules.tags)
        if self.llm is not None:
            self.places.capacity = self.llm.engine.scheduler.max_num_seqs + settings.max_queue

    def give_up(self, reason: str) -> None:
        """Fail all requests and end the server, because the engine cannot continue."""
        self.failure = EngineDead(reason)
        for handle in list(self._handles):
            self.abort(handle)
            handle.take(0, EngineDead(reason))

    async def end(self) -> None:
        """Stop the engine, the background tasks and the threads."""
        for task in self._tasks:
            task.cancel()
        gc.unfreeze()
        if self.thread is not None:
            timeout = 10.0 if self.failure is None else 0.5  # a stuck engine never ends
            await in_daemon_thread(partial(self.thread.close, timeout), "outrider-close")
        if self.llm is not None:  # the process would wait at its end for grammars that are being compiled
            await in_daemon_thread(self.llm.engine.grammars.close, "outrider-close-grammars")
        self._text.close()

    async def drain(self) -> None:
        """Let running requests finish within `drain_timeout`, then abort them."""
        self.draining = True
        self._drain_until = time.monotonic() + self.settings.drain_timeout
        while self._handles and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        for handle in list(self._handles):
            self.abort(handle)
        until = time.monotonic() + _ABORT_S
        while self._handles and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def stop_draining(self) -> None:
        """Abort running requests now, before `drain_timeout` is over."""
        self._drain_until = time.monotonic()

    def ready(self) -> LLM:
        """The model. Raises ApiError if the server is not ready."""
        if self.status != "ok":
            raise self.unavailable()
        assert self.llm is not None
        return self.llm

    def unavailable(self) -> ApiError:
        """The 503 error with the present status. It has Retry-After unless the engine is dead."""
        status = self.status
        headers = {} if status == "dead" else {"Retry-After": "5"}
        return ApiError(503, f"the server is {status}", code=status, headers=headers)

    async def off_loop(self, work: Callable[[], T], client: str = "", size: int = 0) -> T:
        """Run slow work on a thread, so that the event loop can answer other requests. Clients take turns."""
        return await self._text.run(work, client, size)

    async def compiled(self, structured: Structured, client: str) -> None:
        """Compile a grammar. Clients share a limited number of places for requests that wait for this."""
        if not self._compiling.take(client):
            raise self._refusal(f"{self._compiling.total} requests wait for their grammars to be compiled")
        try:
            done = asyncio.wrap_future(self.ready().engine.grammars.compiled(structured))
            await asyncio.shield(done)  # other requests may wait for the same grammar
        finally:
            self._compiling.release(client)

    def admit(self, client: str, sequences: int) -> Admission:
        """Take places for a request's sequences before any other work. Raises 429 if there are not enough."""
        self.ready()
        admission = Admission(client, self.places, self._logprobs)
        if not admission.take(sequences):
            raise self._refusal(f"{self.places.total} sequences are running or waiting")
        return admission

    def hold_logprobs(self, admission: Admission, entries: int) -> None:
        """Take memory for prompt log probabilities until the answer is written. Raises 429 if there is not enough."""
        if not admission.hold(entries):
            raise self._refusal(f"requests under way hold {self._logprobs.total} log probabilities of prompts")

    def submit(self, jobs: Sequence[tuple[list[Request], str]], streams: bool, admission: Admission) -> RequestHandle:
        """Submit checked requests to the engine."""
        self.ready()
        assert self.thread is not None
        handle = RequestHandle(self, admission, streams, self.settings.stream_interval)
        self._handles.add(handle)
        for number, (requests, method) in enumerate(jobs):
            handle.open += len(requests)
            self.in_flight += len(requests)
            named = [_named(request, admission.client) for request in requests]
            try:
                handle.jobs.append(self.thread.submit(named, method, self._callback_for(handle, number), handle.wants))
            except EngineDead:
                self.forget(handle)
                raise
        return handle

    def _refusal(self, reason: str) -> ApiError:
        self.metrics.refused.inc()
        slots = 0 if self.llm is None else self.llm.engine.scheduler.max_num_seqs
        seconds = self._completions.retry_after(max(self.places.total - slots, 1))
        return ApiError(429, f"{reason}; try again later", code="queue_full", headers={"Retry-After": str(seconds)})

    def abort(self, handle: RequestHandle) -> None:
        """Abort the unfinished sequences of a request."""
        if self.thread is not None and handle.open:
            for job in handle.jobs:
                self.thread.abort(job)

    def finished(self, handle: RequestHandle, request: Request, output: CompletionOutput) -> None:
        self.in_flight -= 1
        handle.admission.ended()
        self._completions.add()
        self.metrics.finished(request, output)
        if output.finish_reason == "error":
            _log.error("a sequence failed: %s", output.stop_reason, extra={"request_id": handle.request_id})
        self._watchdog.note(output.finish_reason)
        if not handle.open:
            self._handles.discard(handle)

    def forget(self, handle: RequestHandle) -> None:
        """Release a request whose jobs the engine refused or lost."""
        self.in_flight -= handle.open
        handle.admission.ended(handle.open)
        handle.open = 0
        self._handles.discard(handle)

    def _callback_for(self, handle: RequestHandle, job: int) -> Callable[[StreamPiece | OutriderError], None]:
        def callback(event: StreamPiece | OutriderError) -> None:
            """Queue an event on the engine's thread. The event loop is woken once for all events of a round."""
            self._outbox.append((handle, job, event))
            if not self._delivery_scheduled:
                self._delivery_scheduled = True
                assert self._loop is not None
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    self._loop.call_soon_threadsafe(self._deliver)

        return callback

    def _deliver(self) -> None:
        self._delivery_scheduled = False  # reset before the outbox is read, so that a later event schedules another call
        while self._outbox:
            handle, job, event = self._outbox.popleft()
            handle.take(job, event)

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(EngineDead):
                await self.refresh_snapshot()
            self.samples.append((time.monotonic(), self.last))
            await asyncio.sleep(1.0)

    async def refresh_snapshot(self) -> Snapshot:
        """The engine's counters now, or the last known ones if it does not answer within a second."""
        if self.thread is not None and self.thread.alive:
            answer = asyncio.wrap_future(self.thread.ask(snapshot_of))
            done, _ = await asyncio.wait([answer], timeout=1.0)
            if done:
                self.last = answer.result()
        return self.last

    async def keep_texts(self, owner: str, texts: Sequence[Sequence[int]]) -> Kept:
        """Keep texts to draft from for an owner."""
        self.ready()
        assert self.thread is not None
        return await asyncio.wrap_future(self.thread.ask(lambda engine: engine.remember(owner, texts)))

    async def drop_texts(self, owner: str) -> Kept:
        """Drop the texts that are kept to draft from for an owner."""
        self.ready()
        assert self.thread is not None
        return await asyncio.wrap_future(self.thread.ask(lambda engine: engine.forget(owner)))

    def stats(self) -> dict[str, Any]:
        """The snapshot for dashboards, as `/stats` returns it."""
        now = self.last
        then_s, then = self.samples[0] if self.samples else (0.0, now)
        seconds = max(time.monotonic() - then_s, 1e-3)
        tally = now.tally
        tokens, rounds = tally.emitted - then.tally.emitted, tally.rounds - then.tally.rounds
        by_position = zip(tally.accepted_by_position(), tally.drafted_by_position(), strict=True)
        return {
            "model": self.settings.model_name,
            "bundled": self.llm is not None and is_bundled(self.llm.directory),
            "status": self.status,
            "method": None if self.llm is None else self.llm.speculation.method,
            "methods": [] if self.llm is None else sorted(self.llm.speculation.methods()),
            "uptime_s": round(time.time() - self.started, 3),
            "running": now.running,
            "waiting": now.waiting,
            "kv_usage": now.kv_usage,
            "prefix_hit_rate": now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0,
            "preemptions": now.preemptions,
            "generated_tokens": tally.emitted,
            "tokens_per_s": round(tokens / seconds, 3),
            "tokens_per_round": round(tokens / rounds, 4) if rounds else 0.0,
            "acceptance_by_position": [round(accepted / drafted, 4) for accepted, drafted in by_position],
            "by_method": {
                name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in tally.by_source.items()
            },
            "off_reasons": dict(self.metrics.off_reasons),
            "finished": dict(self.metrics.finish_reasons),
            "by_tag": self.metrics.tags.as_dict(),
            "latency": self.metrics.latency(tally.gaps),
        }


def _named(request: Request, client: str) -> Request:
    """The request with who sent it, and whose earlier texts may draft for it."""
    memory = memory_of(client, request.tenant) if request.memory is None else request.memory
    return replace(request, client=client, memory=memory)


def _check_rules(rules: Rules, settings: ServerSettings, llm: LLM) -> None:
    """Raise InvalidParameter where a rule names a model or a method that is not here."""
    rules.check_models([*settings.names, *llm.loras])
    rules.check_methods(llm.intake.loaded_methods)


def _unserved(chunk: StreamPiece) -> bool:
    """Whether the server aborted a sequence before its first token, because it is stopping."""
    return chunk.output is not None and chunk.output.finish_reason == "abort" and not chunk.output.token_ids
