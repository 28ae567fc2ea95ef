"""The command line, in this process or as a process of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from outrider import cli


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Command:
    """Runs `outrider` in this process. Anything but an exit is a traceback to the user, and fails the test."""

    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Done:
        self.monkeypatch.setenv("COLUMNS", "200")
        self.monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            cli.main()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        printed = self.capfd.readouterr()
        return Done(code, printed.out, printed.err)


def run_process(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `outrider` as a user does, on one thread."""
    command, env = [sys.executable, "-m", "outrider.cli", *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=180, check=False, env=env)
