"""Health of the engine: a test token before it serves, and a watchdog while it serves."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from outrider.engine.outputs import StreamPiece
from outrider.engine.worker import EngineThread
from outrider.errors import EngineDead, ModelError, OutriderError
from outrider.model.source import open_source
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.serve.service import Service

__all__ = ["Watchdog", "check_forward", "check_model", "stacks"]

_log = logging.getLogger("outrider.serve")
_NAMED = 3  # weights that an error message names
_WATCH_S = 0.25  # between two checks of the engine
_SUSPICIOUS = 3  # consecutive failed sequences before the engine is checked


class Watchdog:
    """Ends the server if the engine has died, finishes no round, or fails every request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._failed = 0  # consecutive sequences that ended with an error
        self._check: Future[str | None] | None = None

    def note(self, finish_reason: str | None) -> None:
        """Record the finish reason of a sequence."""
        if finish_reason == "error":
            self._failed += 1
        elif finish_reason != "abort":
            self._failed = 0

    async def run(self) -> None:
        service = self._service
        while service.failure is None:
            await asyncio.sleep(_WATCH_S)
            thread, limit = service.thread, service.settings.watchdog_timeout
            if thread is None or service.llm is None:
                continue
            fault = service.llm.engine.runner.fault or thread.error
            if isinstance(fault, EngineDead):
                service.failure = fault
            elif not thread.alive:
                service.failure = EngineDead(f"the engine has died: {thread.error}")
            elif limit and thread.stalled_s > limit:
                _log.critical("the engine has ended no round for %g s; all stacks:\n%s", limit, stacks())
                service.give_up(f"the engine has ended no round for {limit:g} s (--watchdog-timeout)")
            else:
                self._check_after_errors(service.llm, thread)

    def _check_after_errors(self, llm: LLM, thread: EngineThread) -> None:
        """After consecutive errors, generate one token for a valid request: if that fails, the engine is at fault."""
        with suppress(OutriderError):  # a full queue proves nothing, and a dead engine is noticed by the next check
            if self._check is None and self._failed >= _SUSPICIOUS:
                self._failed, self._check = 0, check_forward(llm, thread)
            if self._check is not None and self._check.done():
                check, self._check = self._check, None
                if (reason := check.result()) is not None:
                    self._service.give_up(f"the engine generates nothing any more: {reason}")


def check_forward(llm: LLM, thread: EngineThread) -> Future[str | None]:
    """Generate one token. The result is None, or the reason why it failed."""
    answer: Future[str | None] = Future()

    def callback(event: StreamPiece | OutriderError) -> None:
        if isinstance(event, OutriderError):
            answer.set_exception(event)
        elif event.output is not None:
            answer.set_result(str(event.output.stop_reason) if event.output.finish_reason == "error" else None)

    requests, method = llm.intake.prepare([0], SamplingParams(max_tokens=1, temperature=0.0), False)
    thread.submit(requests, method, callback)
    return answer


def check_model(llm: LLM, thread: EngineThread, timeout_s: float | None) -> None:
    """Generate a token before the server is ready. Raises ModelError if that fails."""
    try:
        reason = check_forward(llm, thread).result(timeout_s)
    except TimeoutError:
        raise ModelError(f"{llm.directory}: a first forward did not end within {timeout_s:g} s (--watchdog-timeout)") from None
    if reason is not None:
        raise ModelError(f"{llm.directory} cannot be served, a first forward failed: {reason}{_broken_weights(llm)}")
    thread.ask(lambda engine: engine.reset_counts()).result()


def stacks() -> str:
    """The current stack of every thread of the process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def _broken_weights(llm: LLM) -> str:
    """The stored weights that hold NaN or infinity, for the end of a sentence."""
    broken: list[str] = []
    with suppress(OutriderError, OSError):  # random weights have no files
        source = open_source(llm.directory, llm.config)
        wanted = (name for name in source.headers() if not bool(source.tensor(name).isfinite().all()))
        broken = list(islice(wanted, _NAMED + 1))
    if not broken:
        return ""
    more = ", ..." if len(broken) > _NAMED else ""
    return f"; NaN or infinity in the weights {', '.join(broken[:_NAMED])}{more}: fetch or convert them again"
