"""A Python process that runs one function, for work that would hold this process's interpreter lock or fill its memory.

Run as a script, it first reads the module search path and the function's name, and imports nothing of this package before
that. Then it reads arguments and answers each with the result. `PythonProcess` is the other end of the pipes. Only plain
data crosses them (None, bool, int, float, str, bytes, and tuples, lists and dicts of these), written by `marshal`.
"""

from __future__ import annotations

import importlib
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import IO, Any, BinaryIO

__all__ = ["ProcessDied", "PythonProcess"]


class ProcessDied(Exception):
    """The process ended before it answered; the next call starts another."""


class PythonProcess:
    """Calls one function, named `module:function`, in a process that starts with the first call. Calls are serialised."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """The function's result. Raises ProcessDied where the process ended, RuntimeError where the function raised."""
        with self._turn:
            try:
                process = self._process or self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                _write(process.stdin, args)
                raised, result = _read(process.stdout)
            except (OSError, EOFError) as error:
                self._end()
                raise ProcessDied(f"the process of {self._function} ended") from error
        if raised:
            raise RuntimeError(f"{self._function} failed: {result}")
        return result

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

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        _write(process.stdin, (sys.path, self._function))
        return process

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


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
    sys.path[:], name = _read(questions)
    module, _, function = name.partition(":")
    call = getattr(importlib.import_module(module), function)
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
