"""A Python process that answers calls, for work that would hold this process's interpreter lock, fill its memory or hang it.

Run as a script, it first reads the module search path and the name of a function, and imports nothing of this package before
that. Then it reads arguments and answers each with the result. `PythonProcess` is the other end of the pipe. Only plain
data crosses it (None, bool, int, float, str, bytes, and tuples, lists and dicts of these), written by `marshal`.
"""

from __future__ import annotations

import importlib
import marshal
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["ProcessDied", "PythonProcess"]

_START_S = 60.0  # budget of the process to start
_WALL = 4.0  # wall-clock seconds for each second of a budget: the process may have a low priority
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # unit of the kernel's processor time
_VERSION = 2  # of marshal's format; later versions look up every object to write it only once, which is slower


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
        self._pipe: Connection[Any, Any]
        self._turn = threading.Lock()

    def __call__(self, *args: Any, budget: float = math.inf) -> Any:
        """The function's result. Raises ProcessDied where the process ended, RuntimeError where the function raised.

        The process is killed when it has used `budget` seconds of processor time, which other load on the machine does not
        use up, or a multiple of it in wall-clock time.
        """
        with self._turn:
            self._ensure_started()
            raised, result = self._exchange(args, budget)
        if raised:
            raise RuntimeError(f"{self._function} failed: {result}")
        return result

    def start(self) -> None:
        """Start the process if there is none, and wait until it is ready."""
        with self._turn:
            self._ensure_started()

    def _ensure_started(self) -> None:
        if self._process is not None:
            return
        setup = None if self._setup is None else self._setup()
        self._pipe, child_end = Pipe()
        command, handle = [sys.executable, "-P", __file__], child_end.fileno()
        try:
            self._process = subprocess.Popen([*command, str(handle)], stdin=subprocess.DEVNULL, pass_fds=[handle])
        except OSError as error:
            self._pipe.close()
            raise ProcessDied(f"the process of {self._function} cannot be started") from error
        finally:
            child_end.close()
        self.starts += 1
        weakref.finalize(self, _kill, self._process, self._pipe)
        self._exchange((sys.path, self._function, setup), _START_S)

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

    def _exchange(self, question: tuple[Any, ...], budget: float) -> Any:
        assert self._process is not None
        clock = _Clock(self._process.pid)
        try:
            _write(self._pipe, question)
            while not self._pipe.poll(clock.next_check_s(budget)):
                pass
            return marshal.loads(self._pipe.recv_bytes())
        except (OSError, EOFError) as error:
            self._end()
            raise ProcessDied(f"the process of {self._function} ended") from error
        finally:
            self.used_s = clock.used()

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process, self._pipe)
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

    def next_check_s(self, budget: float) -> float | None:
        """Seconds after which the budget may be used up at the earliest, or TimeoutError where it is. None: no budget."""
        remaining = min(budget - self.used(), _WALL * budget - (time.monotonic() - self._begun))
        if remaining <= 0:
            raise TimeoutError
        return None if remaining == math.inf else max(remaining, _TICK_S)


def _processor_s(pid: int) -> float | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_S  # user and system


def _kill(process: subprocess.Popen[bytes], pipe: Connection[Any, Any]) -> None:
    process.kill()
    process.wait()
    pipe.close()


def _write(pipe: Connection[Any, Any], value: Any) -> None:
    pipe.send_bytes(marshal.dumps(value, _VERSION))


def _answer_all(pipe: Connection[Any, Any]) -> None:
    """Answer until the pipe closes, which it also does when the parent dies."""
    sys.path[:], name, setup = marshal.loads(pipe.recv_bytes())
    place, _, function = name.rpartition(":")
    call = (runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place)))[function]
    if setup is not None:
        call = call(*setup)
    _write(pipe, (False, None))
    while True:
        try:
            args = marshal.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (False, call(*args))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {error}")
        del args
        _write(pipe, answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when this ends
    os.dup2(2, 1)  # whatever a library prints belongs to the log of the parent, not to its output
    _answer_all(Connection(int(sys.argv[1])))
