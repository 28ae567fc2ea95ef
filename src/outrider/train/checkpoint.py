"""Files that are whole or not there: atomic writes, and the checkpoint of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ModelError, OutriderError

__all__ = ["Position", "guarded_write", "load_checkpoint", "save_checkpoint"]

_FILE = "checkpoint.pt"


@dataclass(slots=True)
class Position:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


@contextmanager
def guarded_write(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path`, synced, only when the block ends well; the old one stays until then."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch wraps a failed write in RuntimeError
        temporary.unlink(missing_ok=True)
        kept = "the last good one is intact" if path.exists() else "nothing was left behind"
        raise OutriderError(f"cannot write {path}: {error}; free some space or choose another folder ({kept})") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_checkpoint(directory: Path, position: Position, module: Any, optimizers: Sequence[Any]) -> None:
    """Everything a run needs to go on as if it had not stopped."""
    import torch

    state = {
        "step": position.step,
        "seconds": position.seconds,
        "tokens": position.tokens,
        "module": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    directory.mkdir(parents=True, exist_ok=True)
    with guarded_write(directory / _FILE) as file:
        torch.save(state, file)


def load_checkpoint(directory: Path, module: Any, optimizers: Sequence[Any]) -> Position | None:
    """Restore the last checkpoint in place; None where there is none."""
    import torch

    path = directory / _FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    except (RuntimeError, KeyError, ValueError, EOFError) as error:
        raise ModelError(f"{path} does not fit this run: {error}; remove it or use the settings it was made with") from None
    return Position(state["step"], state["seconds"], state["tokens"])


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
