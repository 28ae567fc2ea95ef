"""Whole folders from pickles to safetensors: models and adapters (`pytorch_model*.bin`, `adapter_model.bin`), and heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.model.files import INDEX, indexed
from outrider.model.load import locate
from outrider.model.pickles import PickleConverter

__all__ = ["HEAD", "MODEL", "Kind", "convert_folder"]

_PICKLED_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is converted: which pickles there may be, and which files go with them. On the hub, no others are fetched."""

    pickles: tuple[str, ...]
    beside: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.pickles, _PICKLED_INDEX, *self.beside)


MODEL = Kind(
    ("pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.bin"),
    ("config.json", "adapter_config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
     "vocab.json", "merges.txt", "*.jinja", "*.model"),
)  # fmt: skip
HEAD = Kind(("pytorch_model.bin", "pytorch_model-*.bin", "medusa_lm_head.pt"), ("config.json",))


def convert_folder(source: str, out: Path, kind: Kind, say: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Write a folder or a repository on the hub with its tensors as safetensors; the weight files written.

    `out` must be new or empty, and appears when everything has been written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameter("out", f"{out} exists and is not empty; choose a new folder")
    folder = Path(source) if Path(source).is_dir() else locate(source, files=kind.files)
    pickles = _pickles(folder, kind)
    part = out.with_name(out.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        written = _convert(pickles, part, say)
        for path in (path for pattern in kind.beside for path in folder.glob(pattern) if path.is_file()):
            shutil.copyfile(path, part / path.name)
        if out.exists():
            out.rmdir()
        part.rename(out)
    except OSError as error:
        raise OutriderError(f"cannot write to {out}: {error}; free some space or choose another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [out / name for name in written]


def _pickles(folder: Path, kind: Kind) -> list[Path]:
    """The pickled weight files: those that an index names, or all."""
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ModelError(f"{folder} has no config.json, so it is no folder of a model or head")
    index = folder / _PICKLED_INDEX
    if index.exists():
        pickles = [folder / name for name in indexed(index, ".bin")]
    else:
        pickles = sorted({path for pattern in kind.pickles for path in folder.glob(pattern)})
    if not pickles:
        loads = "it holds safetensors, which load as they are" if any(folder.glob("*.safetensors")) else "nothing to convert"
        raise ModelError(f"{folder} holds none of {', '.join(kind.pickles)}: {loads}")
    for path in pickles:
        if not path.exists():
            raise ModelError(f"{path} is missing, but {index.name} names it")
    return pickles


def _convert(pickles: list[Path], part: Path, say: Callable[[str], None]) -> list[str]:
    """Convert each file, and write an index where there are several; the names of the files."""
    weight_map: dict[str, str] = {}
    with closing(PickleConverter()) as converter:
        for path in pickles:
            name = path.stem.replace("pytorch_model", "model") + ".safetensors"
            say(f"{path.name} -> {name}")
            for tensor in converter.convert(path, part / name):
                if tensor in weight_map:
                    raise ModelError(f"{path} holds {tensor!r}, and so does another of the files")
                weight_map[tensor] = name
    if len(pickles) > 1:
        (part / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    return sorted(set(weight_map.values()))
