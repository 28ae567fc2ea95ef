"""The clock of a recipe, its log lines and its watchdog. Import this before torch, because the time counts from here."""

from __future__ import annotations

import os
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["note", "now", "start_watchdog", "write_tar"]

_STARTED = time.monotonic()


def now() -> float:
    """Seconds since the start."""
    return time.monotonic() - _STARTED


def note(text: str) -> None:
    """Print a line with the time."""
    print(f"[{now():6.1f} s] {text}", flush=True)


def start_watchdog(limit_s: float, finish: Callable[[], int]) -> None:
    """When the time is up, call `finish` and end the process with the code it returns. Normal work ends before."""

    def watch() -> None:
        time.sleep(max(limit_s - now(), 0))
        note("watchdog: time is up")
        code = finish()
        sys.stdout.flush()
        os._exit(code)

    threading.Thread(target=watch, daemon=True, name="watchdog").start()


def write_tar(path: Path, files: list[tuple[Path, str]]) -> None:
    """A tar of (file, name inside), which replaces `path` when it is complete."""
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as tar:
        for file, name in files:
            tar.add(file, name)
    os.replace(part, path)
