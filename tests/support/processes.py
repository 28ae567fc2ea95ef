"""Processes by their id."""

from __future__ import annotations

from pathlib import Path

__all__ = ["children", "command", "is_running"]


def is_running(process: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody has waited for is none."""
    return _fields(process)[0] not in ("Z", "X", "")


def children(process: int) -> list[int]:
    """The running children of a process."""
    ids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [child for child in ids if _fields(child)[1] == str(process) and is_running(child)]


def command(process: int) -> bytes:
    """The command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _fields(process: int) -> list[str]:
    """State and parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["", ""]
