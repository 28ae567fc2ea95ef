"""A server process for benchmarks through HTTP, and clients of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from outrider.bench.client import Client, Endpoint
from outrider.errors import OutriderError

__all__ = ["ServerProcess", "client_of"]


def client_of(port: int, address: str | None = None) -> Client:
    """A client of a server on this machine, from one of its addresses."""
    return Client(Endpoint(f"http://127.0.0.1:{port}"), address)


class ServerProcess:
    """`outrider serve` as a process, on any free port of this machine."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "outrider.cli", "serve", *arguments, "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.port = 0
        self._said: list[str] = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            match = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
            if match is not None:
                self.port = int(match[1])
            if line.startswith("ready on"):
                break
        else:
            raise OutriderError(f"the server did not start: {''.join(self._said[-3:]).strip()}")
        self._reader = threading.Thread(target=self._read_on, name="outrider-bench-log", daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        """A pipe that nobody reads would in the end hold up whoever writes to it."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-99:], line]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_mib(self) -> float:
        """Memory the process holds now."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

    def stop(self) -> int:
        """Tell it to stop; how it exited."""
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
