"""The conditions of a measurement, to be kept beside its numbers."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform as python_platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from outrider._version import __version__
from outrider.ops import threads_used
from outrider.platform import cpu_name

__all__ = ["close_report", "conditions"]


def conditions() -> dict[str, Any]:
    """The machine, the versions and the command, without the folders of the files it names."""
    return {
        "device": f"{cpu_name()}, {os.cpu_count()} cores, {threads_used()} threads used",
        "versions": {"outrider": __version__, "python": python_platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "numpy")},
        "command": shlex.join([Path(sys.argv[0]).name, *(re.sub("(^|=)/.*/", r"\1", own) for own in sys.argv[1:])]),
    }


def close_report(report: dict[str, Any], output: Path | None) -> None:
    """Print a report with its conditions, keep it where asked, and end with 1 where it did not pass."""
    text = json.dumps(report | conditions(), indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if not report["passed"]:
        raise typer.Exit(1)
