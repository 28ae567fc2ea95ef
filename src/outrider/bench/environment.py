"""The environment of a measurement, to be kept beside its numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform as python_platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.ops import threads_used
from outrider.platform import cpu_name

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """The machine, the versions and the command, without the folders of the files it names."""
    return {
        "device": f"{cpu_name()}, {os.cpu_count()} cores, {threads_used()} threads used",
        "versions": {"outrider": __version__, "python": python_platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "numpy")},
        "command": shlex.join([*_program(), *(re.sub("(^|=)/.*/", r"\1", word) for word in sys.argv[1:])]),
    }


def _program() -> list[str]:
    """The command as it was typed: a script by its name, a module of `python -m` by its path."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name.partition(".")[0] != "benchmarks":
        return [Path(sys.argv[0]).name]
    return ["python", "-m", spec.name.removesuffix(".__main__")]
