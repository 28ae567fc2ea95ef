"""How a benchmark becomes a command: `python -m benchmarks.NAME`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from outrider.errors import OutriderError
from outrider.terminal import PlainConsole, print_error

__all__ = ["errors", "run"]

errors = PlainConsole(stderr=True)


def run(command: Callable[..., object]) -> None:
    """Run a function with the command line's options; an error is one line, not a traceback."""
    app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(command)
    try:
        app()
    except OutriderError as error:
        print_error(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
