"""Where what was measured is kept: costs in one small file for each machine and model, acceptance beside a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.config import SpeculationConfig
from outrider.model import Runner
from outrider.ops import find_core, threads_used
from outrider.platform import cache_folder, cpu_name

__all__ = ["ACCEPTANCE", "costs_path", "known_acceptance"]

ACCEPTANCE = "acceptance.json"


def costs_path(directory: Path, runner: Runner, speculation: SpeculationConfig) -> Path:
    """The file for this machine, build, thread count and model, in OUTRIDER_CACHE or the user's cache folder.

    What `auto` finds beside a model shares one file. A drafter that was named, or weights that were given, have their own.
    """
    path = find_core()[1] if runner.ops.core is not None else "torch"
    marks: tuple[object, ...] = (
        cpu_name(),
        runner.device_name,
        threads_used(),
        path,
        __version__,
        directory.resolve(),
        runner.decoder.spec,
    )
    if runner.ranks > 1:
        marks += (runner.ranks,)
    if speculation.method != "auto" or speculation.model is not None:
        marks += (speculation.method, speculation.model, sorted(map(repr, speculation.options.items())))
    name = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{directory.name}-{name}.json"


def known_acceptance(directory: Path) -> dict[str, Any]:
    """What a model's folder says its drafters are worth, for a controller that has seen nothing yet; often nothing."""
    try:
        acceptance = json.loads((directory / ACCEPTANCE).read_text(encoding="utf-8"))
        return acceptance if isinstance(acceptance, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
