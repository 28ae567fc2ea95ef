"""Model folders that are written: whole or not at all, with what lies beside the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.model.fields import read_json
from outrider.model.files import ELSEWHERE

__all__ = ["copy_beside", "plain_config", "replaced", "require_new"]

_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
_OF_WEIGHTS = ("torch_dtype", "quantization_config", "compression_config", ELSEWHERE)  # fields of config.json


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """A folder to write into; it takes the place of `directory` only when the block ends well, and is removed otherwise."""
    temporary = directory.with_name(directory.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OutriderError(f"cannot write to {directory}: {error}; free some space or choose another --out") from error
        raise


def require_new(out: Path) -> None:
    """Refuse an output folder that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameter("out", f"{out} exists and is not empty; choose a new folder")


def plain_config(source: Path) -> dict[str, Any]:
    """The fields of config.json that do not describe how the weights are stored."""
    if source.is_file():
        raise ModelError(f"{source} is a GGUF file, which has no config.json to write; pass the model's folder")
    data = read_json(source / "config.json", "a model's folder holds config.json and *.safetensors")
    if "text_config" in data:
        raise ModelError(f"{source} reads images too, and only models of text are written")
    return {name: value for name, value in data.items() if name not in _OF_WEIGHTS}


def copy_beside(source: Path, out: Path) -> None:
    """Copy the tokenizer's files, the chat template and generation_config.json, those of them that the source has."""
    for name in _BESIDE:
        if (source / name).exists():
            shutil.copy(source / name, out / name)
