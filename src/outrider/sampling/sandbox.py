"""Sandbox processes that compile grammars and compute the masks of slow ones: a hostile grammar can hang or crash a parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from outrider.process import ProcessDied, PythonProcess
from outrider.sampling import matcher

__all__ = ["Sandbox", "SandboxLost"]

T = TypeVar("T")


class SandboxLost(Exception):
    """The process took too long, or too much memory, or crashed."""


class Sandbox:
    """One process that can be killed, and the thread that waits for it. Work is served in order."""

    def __init__(self, setup: Callable[[], tuple[Any, ...]], name: str) -> None:
        self.process = PythonProcess(f"{matcher.__file__}:answers", setup)
        self.load = 0  # submitted work that waits or runs
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the sandbox's thread, which may call `ask`."""
        self.load += 1
        future = self._thread.submit(work)
        future.add_done_callback(self._done)
        return future

    def ask(self, question: Sequence[Any], budget: float) -> Any:
        """The answer of the process; SandboxLost where none comes within the budget in seconds. On the sandbox's thread only."""
        fault = "it cannot be started for this model's tokenizer"
        try:
            self.process.start()
            fault = f"it takes more than {budget:g} s, or too much memory"
            return self.process(*question, budget=budget)
        except (ProcessDied, RuntimeError):
            self.process.close()
            raise SandboxLost(fault) from None

    def close(self) -> None:
        """Drop waiting work and end the process. New work starts another process."""
        thread, self._thread = self._thread, ThreadPoolExecutor(1, self._name)
        thread.shutdown(wait=False, cancel_futures=True)
        self.process.close()

    def _done(self, _: Future[Any]) -> None:
        self.load -= 1
