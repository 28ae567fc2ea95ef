"""A server that the audit starts with a command and ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import InvalidParameter, OutriderError

__all__ = ["free_port", "launched"]

_LOG_CHARS = 600
_END_S = 15.0


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def launched(command: str, start_s: float) -> Iterator[str]:
    """Start a server, and end it with the block; its URL on the loopback. `{port}` in the command becomes a free port."""
    if "{port}" not in command:
        raise InvalidParameter("--command", "must hold {port}, which becomes a free port of 127.0.0.1")
    port = free_port()
    words = shlex.split(command.replace("{port}", str(port)))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            with log.open("wb") as out:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
        except OSError as error:
            raise OutriderError(f"{words[0]!r} cannot be started: {error.strerror}") from None
        before = signal.signal(signal.SIGTERM, _end_by_exception)
        try:
            _wait_until_ready(process, port, time.monotonic() + start_s, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)


def _end_by_exception(number: int, _frame: object) -> None:
    """Leave by an exception, so that servers are ended."""
    raise SystemExit(128 + number)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, deadline: float, log: Path) -> None:
    """Wait until the server names its models."""
    import httpx

    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OutriderError(f"the command ended with {process.returncode} before it served: {_tail(log)}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5, trust_env=False).status_code == 200 and _is_ready(port):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise OutriderError(f"the command serves nothing on port {port} yet; raise --start-timeout. Its output ends: {_tail(log)}")


def _is_ready(port: int) -> bool:
    """Whether /health, where there is such a route, says that requests are taken."""
    import httpx

    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code != 503


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:].strip() or "nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_END_S)
            return
        except ProcessLookupError:
            process.wait(_END_S)
            return
        except subprocess.TimeoutExpired:
            continue
