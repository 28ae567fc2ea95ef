"""Atomic writes, and the checkpoint of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ModelError, OutriderError

__all__ = ["Position", "guarded_write", "load_checkpoint", "save_checkpoint"]

_FILE = "checkpoint.safetensors"
_METADATA = "rest"  # the key of what is no tensor, as earlier checkpoints have it


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
    """Write everything a run needs to resume, as safetensors. The position and the settings are JSON in the metadata."""
    from safetensors.torch import save

    tensors = {f"module/{name}": tensor for name, tensor in module.state_dict().items()}
    state_of_run: dict[str, Any] = {"position": [position.step, position.seconds, position.tokens], "optimizers": []}
    for i, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for index, values in state["state"].items():
            tensors |= {f"optimizer/{i}/{index}/{name}": value for name, value in values.items()}
        state_of_run["optimizers"].append({"groups": state["param_groups"]})
    directory.mkdir(parents=True, exist_ok=True)
    # tied weights have two names, and safetensors wants separate memory for each
    data = save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        {_METADATA: json.dumps(state_of_run)},
    )
    with guarded_write(directory / _FILE) as file:
        file.write(data)


def load_checkpoint(directory: Path, module: Any, optimizers: Sequence[Any]) -> Position | None:
    """Restore the last checkpoint in place; None where there is none."""
    from safetensors import SafetensorError, safe_open

    path = directory / _FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            state_of_run = json.loads(file.metadata()[_METADATA])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        module.load_state_dict({name.removeprefix("module/"): t for name, t in tensors.items() if name.startswith("module/")})
        for i, (optimizer, saved) in enumerate(zip(optimizers, state_of_run["optimizers"], strict=True)):
            optimizer.load_state_dict({"state": _states(f"optimizer/{i}/", tensors), "param_groups": saved["groups"]})
    except (SafetensorError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path} does not fit this run: {error}; remove it or use the settings it was made with") from None
    return Position(*state_of_run["position"])


def _states(prefix: str, tensors: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """An optimizer's state by parameter, from the tensors with its prefix."""
    states: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            index, name = key.removeprefix(prefix).split("/", 1)
            states.setdefault(int(index), {})[name] = value
    return states


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
