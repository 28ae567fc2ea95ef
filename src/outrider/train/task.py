"""The task that the `train` commands share. Every field is a flag of these commands.

Nothing here imports torch, so that `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["TrainingTask"]


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A drafter to train: on which text, for which target, for how long and how."""

    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help='Text files, folders, or .jsonl files with "text", "prompt" and "completion", or "messages".', show_default=False
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: runs/ and the command's name.")] = None
    target: Annotated[Path | None, typer.Option(help="Model directory or hub id to draft for. Default: the bundled model.")] = (
        None
    )
    data: Annotated[
        Path | None, typer.Option(help="The tokens of an earlier run (its OUT.work/corpus), instead of text to read.")
    ] = None
    work: Annotated[Path | None, typer.Option(help="Folder for tokens, checkpoint and metrics. Default: OUT.work.")] = None
    suffixes: Annotated[str, typer.Option(help="Endings of the files to read in folders, beside .jsonl.")] = ".py,.txt,.md"
    heldout: Annotated[
        str, typer.Option(help='Files, folders or "package" fields to hold out, comma-separated. Default: 3 % of the text.')
    ] = ""
    skip_unreadable: Annotated[bool, typer.Option(help="Count unreadable files instead of stopping.")] = False
    loss: Annotated[
        str | None,
        typer.Option(help="kl, mix (KL, then total variation), lk (-log acceptance) or greedy. Default: mix; Medusa: kl."),
    ] = None
    context: Annotated[int, typer.Option(help="Tokens per row; 0: the target's context on a GPU, at most 512 on a CPU.")] = 0
    minutes: Annotated[float | None, typer.Option(help="Train this long; reading text and final figures take extra time.")] = None
    steps: Annotated[int | None, typer.Option(help="Or train this many steps: deterministic, resumable.")] = None
    rows: Annotated[int, typer.Option(help="Rows of context tokens per step; 0: 32 on a GPU, 2,048 tokens on a CPU.")] = 0
    micro_rows: Annotated[int, typer.Option(help="Rows per forward pass; 0: as many as fit the memory.")] = 0
    lr: Annotated[float, typer.Option(help="Peak learning rate of matrices (Muon).")] = 0.01
    adam_lr: Annotated[float, typer.Option(help="Peak learning rate of what AdamW trains.")] = 2e-3
    write_tokens: Annotated[int, typer.Option(help="Tokens the target writes first, to train on beside the text.")] = 0
    seed: int = 0
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile. Default: on a GPU.", show_default=False)
    ] = None
    checkpoint_steps: Annotated[int, typer.Option(help="Also save a checkpoint every N steps; 0: by time alone.")] = 0

    def folders(self, name: str) -> tuple[Path, Path]:
        """The folder of the drafter, and the one of the run's tokens, checkpoint and metrics."""
        out = self.out or Path("runs") / name
        return out, self.work or out.with_name(out.name + ".work")
