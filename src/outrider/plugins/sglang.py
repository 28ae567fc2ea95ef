"""A serve backend of SGLang: `sglang serve MODEL --model-type outrider` runs the server of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["create_backend", "flags_of", "run"]

_API_VERSION = 1  # of SGLang's contract for backends that this module was written for
_OURS = {  # SGLang's flags that have another name here
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--memory",
    "--speculative-draft-model-path": "--draft-model",
    "--speculative-num-draft-tokens": "--draft-tokens",
}


def create_backend() -> Any:
    """The backend, as SGLang's entry point group `sglang.serve_backends` wants it: without a detector, so that it is used only
    where `--model-type` names it.
    """
    from sglang.cli.serve_backends import ServeBackend  # type: ignore[import-not-found]

    return ServeBackend(api_version=_API_VERSION, run=run, requires_model_path=False)


def run(request: Any) -> None:
    """Serve until the server ends; with -h or --help, only show the help. `request.argv` is the command line that is left."""
    from outrider.cli import main

    main(["serve", *flags_of(request.argv)])


def flags_of(argv: Sequence[str]) -> Iterator[str]:
    """The command line with our names in place of SGLang's."""
    for word in argv:
        name, is_joined, value = word.partition("=")
        yield f"{_OURS.get(name, name)}{is_joined}{value}"
