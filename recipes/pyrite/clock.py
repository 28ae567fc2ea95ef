"""Seconds since the recipe started, and lines that carry them. Import this before torch: the budget counts from here."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

__all__ = ["note", "now", "write_tar"]

_STARTED = time.monotonic()


def now() -> float:
    """Seconds since the start."""
    return time.monotonic() - _STARTED


def note(text: str) -> None:
    """Print a line with the time."""
    print(f"[{now():6.1f} s] {text}", flush=True)


def write_tar(path: Path, files: list[tuple[Path, str]]) -> None:
    """A tar of (file, name inside), which replaces `path` when it is complete."""
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as tar:
        for file, name in files:
            tar.add(file, name)
    os.replace(part, path)
