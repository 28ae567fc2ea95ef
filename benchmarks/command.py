"""How a benchmark becomes a command: `python -m benchmarks.NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from outrider.bench.environment import environment
from outrider.errors import OutriderError
from outrider.terminal import PlainConsole, print_error

__all__ = ["close_report", "errors", "run"]

errors = PlainConsole(stderr=True)


def run(command: Callable[..., object]) -> None:
    """Run a function with the command line's options; an error is one line, not a traceback."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, context_settings=settings)
    app.command()(command)
    try:
        app()
    except OutriderError as error:
        print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def close_report(report: dict[str, Any], output: Path | None = None) -> None:
    """Print a report with its environment, write it to `output` where there is one, and end with 1 where it did not pass."""
    text = json.dumps(report | environment(), indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    if not report["passed"]:
        raise typer.Exit(1)
