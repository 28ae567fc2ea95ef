"""Files of `torch.save` as safetensors. They are pickles, which can do more than hold tensors.

torch's restricted unpickler makes tensors alone. It runs in a process of its own, so that a file which is made to crash or to
hang it ends that process.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.process import ProcessDied, PythonProcess

__all__ = ["PickleConverter", "read_pickle", "write_safetensors"]

_ZIP = b"PK\x03\x04"
_BUDGET_S, _BYTES_PER_S = 60.0, 10e6  # processor time: reading Python's modules, then the file
_COPIES = 4  # times the file's size that tensors may take: some are stored once and named twice
_REASON = re.compile(r"Unsupported (?:global|class|operand)[^\n]{0,120}|Trying to [^\n]{0,120}")


class PickleConverter:
    """Writes pickled files as safetensors, one after another, in one process."""

    def __init__(self) -> None:
        self._process = PythonProcess("outrider.model.pickles:write_safetensors")

    def convert(self, source: Path, target: Path) -> list[str]:
        """The names of the tensors written. A file that holds anything else, or is broken, is a ModelError."""
        try:
            budget = _BUDGET_S + source.stat().st_size / _BYTES_PER_S
            names, fault = self._process(str(source), str(target), budget=budget)
        except OSError as error:
            raise ModelError(f"{source} cannot be read: {error.strerror}") from None
        except ProcessDied:
            raise ModelError(f"{source} is not a checkpoint: reading it crashes or does not end") from None
        if fault:
            raise ModelError(f"{source} cannot be converted: {fault}")
        return list(names)

    def close(self) -> None:
        self._process.close()


def write_safetensors(source: str, target: str) -> tuple[list[str], str]:
    """Run by the process: the names of the tensors written, or what is wrong with the file."""
    try:
        tensors = read_pickle(Path(source))
        save_file(_apart(tensors), target, metadata={"format": "pt"})
    except ModelError as error:
        return [], str(error)
    except Exception as error:  # torch raises many kinds on broken files, and all mean that this one is
        return [], _reason(error)
    return list(tensors), ""


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. They lie in the mapped file where its format allows."""
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    size = path.stat().st_size
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size for entry in archive.infolist()):
                raise ModelError("its parts are compressed, or larger than the file")
    held = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    if not isinstance(held, dict) or not held:
        raise ModelError(f"it holds {type(held).__name__}, not tensors by name")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ModelError(f"{shown(name)} is {type(tensor).__name__}, not a tensor with a name")
    if sum(tensor.numel() * tensor.element_size() for tensor in held.values()) > _COPIES * size:
        raise ModelError(f"its tensors are more than {_COPIES} times as large as the file")
    return {name: tensor.detach() for name, tensor in held.items()}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of which none shares memory with another, as safetensors stores them."""
    seen, apart = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if place in seen else tensor.contiguous()
        seen.add(place)
    return apart


def _reason(error: Exception) -> str:
    """torch's message without its advice to load the file in an unsafe way."""
    text = str(error)
    found = _REASON.search(text)
    if found is not None:
        return f"it holds more than tensors ({found.group().split(' was ')[0]}), which could run code"
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else 'truncated or corrupt'}"
