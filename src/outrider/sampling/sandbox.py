"""Sandbox processes that compile grammars and compute the masks of slow ones: a hostile grammar can hang or crash a parser.

A `Sandbox` is one process and the thread that waits for it. It takes one question at a time, kills the process when the
answer takes too long, and starts another process for the next question. A budget limits the processor time of the process,
which other load on the machine does not use up, and a multiple of it in wall-clock time.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from outrider.sampling import matcher

__all__ = ["Sandbox", "SandboxLost"]

_LOADING_S = 60.0  # budget of the process to start and read the tokenizer
_WALL = 4.0  # wall-clock seconds for each second of processor time: the processes have a low priority
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # unit of the kernel's processor time
T = TypeVar("T")


class SandboxLost(Exception):
    """The process took too long, or too much memory, or crashed."""


class Sandbox:
    """One process and the queue of its work, served in order."""

    def __init__(self, handshake: Callable[[], str], name: str) -> None:
        self.starts = 0  # processes started so far; each new one has lost the texts of the one before
        self.load = 0  # submitted work that waits or runs
        self.used = 0.0  # processor seconds of the last question
        self._handshake = handshake
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._name = name
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the sandbox's thread, which may call `ask`."""
        self.load += 1
        future = self._thread.submit(work)
        future.add_done_callback(self._done)
        return future

    def ask(self, question: Any, budget: float) -> Any:
        """The answer of the process; SandboxLost where none comes within the budget in seconds. On the sandbox's thread only."""
        if self._process is None:
            self._start()
            if self._exchange(self._handshake(), _LOADING_S) is None:
                raise SandboxLost("it cannot be started for this model's tokenizer")
        answer = self._exchange(json.dumps(question), budget)
        if answer is None:
            raise SandboxLost(f"it takes more than {budget:g} s, or too much memory")
        return json.loads(answer)

    def close(self) -> None:
        """Drop waiting work and end the process. New work starts another process."""
        thread, self._thread = self._thread, ThreadPoolExecutor(1, self._name)
        thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _done(self, _: Future[Any]) -> None:
        self.load -= 1

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", matcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"RAYON_NUM_THREADS": "1"},  # each thread's stack counts as memory
            text=True,
        )
        self.starts += 1
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        weakref.finalize(self, _kill, self._process)

    def _exchange(self, line: str, budget: float) -> str | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        clock, answer = _Clock(process.pid), None
        with suppress(OSError, ValueError):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = self._wait(clock, budget)
        self.used = clock.used()
        if answer is None:
            self._end()
        return answer

    def _wait(self, clock: _Clock, budget: float) -> str | None:
        while (remaining := clock.remaining(budget)) > 0:
            with suppress(queue.Empty):
                return self._answers.get(timeout=max(remaining, _TICK_S))
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


class _Clock:
    """The processor and wall-clock time that a process uses from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begun = time.monotonic()
        self._before = _processor_s(pid)

    def used(self) -> float:
        """Processor seconds, or wall-clock seconds where the system does not report them."""
        now = _processor_s(self._pid)
        return time.monotonic() - self._begun if now is None or self._before is None else now - self._before

    def remaining(self, budget: float) -> float:
        """Seconds after which the budget may be used up at the earliest."""
        return min(budget - self.used(), _WALL * budget - (time.monotonic() - self._begun))


def _processor_s(pid: int) -> float | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_S  # user and system


def _read(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    """Pass on answers, and None when the process has ended."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):  # unwritten data has no reader
            process.stdin.close()
