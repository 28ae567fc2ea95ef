"""Options that several commands share, and how their values are read. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from outrider.errors import InvalidParameter

__all__ = ["AsJson", "Dtype", "LoadFormat", "MaxTokens", "Model", "Threads", "numbers", "set_threads"]

Number = TypeVar("Number", int, float)

Model = Annotated[str | None, typer.Option(help="Model directory or hub id. Default: the bundled model.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float32, or int8 (weights and rows; native core).")]
LoadFormat = Annotated[str, typer.Option(help="safetensors, or dummy for random weights from config.json alone.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Numbers separated by commas."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(option, f"must be numbers separated by commas, got {text!r}") from None


def set_threads(threads: int | None) -> None:
    """Limit the CPU threads of torch and of the native core."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
