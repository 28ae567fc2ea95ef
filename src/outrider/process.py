"""A Python process that answers calls, for work that would hold this process's interpreter lock, fill its memory or hang it.

Run as a script, it first reads the module search path and the name of a function, and imports nothing of this package before
that. Then it reads arguments and answers each with the result. `PythonProcess` is the other end of the pipes. Only plain
data crosses them (None, bool, int, float, str, bytes, and tuples, lists and dicts of these), written by `marshal`.
"""

from __future__ import annotations

import importlib
import marshal
import math
import os
import runpy
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, BinaryIO

__all__ = ["ProcessDied", "PythonProcess"]

_START_S = 60.0  # budget of the process to start
_WALL = 4.0  # wall-clock seconds for each second of a budget: the process may have a low priority
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # unit of the kernel's processor time


class ProcessDied(Exception):
    """The process ended before it answered, or its budget was used up; the next call starts another."""


class PythonProcess:
    """Calls one function in a process that starts with the first call. Calls are serialised.

    The function is named "module:function", or "folder/file.py:function", which does not import the file's package. With
    `setup`, the named function is called with what `setup` returns when the process starts, and returns the one to call.
    """

    def __init__(self, function: str, setup: Callable[[], tuple[Any, ...]] | None = None) -> None:
        self.starts = 0  # processes so far; each new one has forgotten the calls of the one before
        self.used_s = 0.0  # processor time of the last call
        self._function = function
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def __call__(self, *args: Any, budget: float = math.inf) -> Any:
        """The function's result. Raises ProcessDied where the process ended, RuntimeError where the function raised.

        The process is killed when it has used `budget` seconds of processor time, which other load on the machine does not
        use up, or a multiple of it in wall-clock time.
        """
        with self._turn:
            raised, result = self._exchange(self._process or self._started(), args, budget)
        if raised:
            raise RuntimeError(f"{self._function} failed: {result}")
        return result

    def start(self) -> None:
        """Start the process if there is none, and wait until it is ready."""
        with self._turn:
            if self._process is None:
                self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        setup = None if self._setup is None else self._setup()
        try:
            process = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise ProcessDied(f"the process of {self._function} cannot be started") from error
        self._process = process
        self.starts += 1
        weakref.finalize(self, _kill, process)
        self._exchange(process, (sys.path, self._function, setup), _START_S)
        return process

    def close(self, timeout: float = 5.0) -> None:
        """End the process within `timeout` seconds; a call under way raises ProcessDied."""
        deadline, is_ours = time.monotonic() + timeout, False
        while not is_ours and time.monotonic() < deadline:
            if (process := self._process) is not None:  # None while a call is still starting it
                process.kill()
            is_ours = self._turn.acquire(timeout=0.05)
        if is_ours:
            self._end()
            self._turn.release()

    def _exchange(self, process: subprocess.Popen[bytes], question: tuple[Any, ...], budget: float) -> Any:
        clock = _Clock(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, question)
            _wait(process.stdout, clock, budget)
            return _read(process.stdout)
        except (OSError, EOFError) as error:
            self._end()
            raise ProcessDied(f"the process of {self._function} ended") from error
        finally:
            self.used_s = clock.used()

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


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


def _wait(pipe: IO[bytes], clock: _Clock, budget: float) -> None:
    """Wait until the pipe can be read, or raise TimeoutError."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (remaining := clock.remaining(budget)) > 0:
            if selector.select(None if remaining == math.inf else max(remaining, _TICK_S)):
                return
    raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unwritten data has no reader
                pipe.close()


_LENGTH = struct.Struct("<Q")
_VERSION = 2  # of marshal's format; later versions look up every object to write it only once, which is slower


def _write(pipe: BinaryIO | IO[bytes], value: Any) -> None:
    data = marshal.dumps(value, _VERSION)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: BinaryIO | IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    data = pipe.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not data:
        raise EOFError
    return marshal.loads(data)


def _answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the pipe closes, which it also does when the parent dies."""
    sys.path[:], name, setup = _read(questions)
    place, _, function = name.rpartition(":")
    call = (runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place)))[function]
    if setup is not None:
        call = call(*setup)
    _write(answers, (False, None))
    while True:
        try:
            args = _read(questions)
        except EOFError:
            return
        try:
            answer = (False, call(*args))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        del args
        _write(answers, answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when this ends
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever a library prints must not reach the pipe of answers
        _answer_all(sys.stdin.buffer, out)
