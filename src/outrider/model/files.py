"""A model's weight files, their headers and their tensors. Nothing here knows a decoder.

Quantised weights of other tools are decoded in `formats`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model.fields import Fields, read_json

__all__ = [
    "ELSEWHERE", "FLOATS", "INDEX", "SCALE", "Header", "indexed", "int8_mark", "is_int8", "opened", "quantised", "read_headers",
    "read_tensor", "read_tensors", "refuse_foreign", "refuse_quantised", "stored_tensors", "weight_files",
]  # fmt: skip

INDEX = "model.safetensors.index.json"
SCALE = ".scale"  # int8 weights carry a float32 scale per output row beside them
ELSEWHERE = "transformers_weights"  # the field of config.json by which Transformers looks for weights
_EXPORT_FIRST = "int8-of-outrider--run-outrider-export-to-load-this-in-transformers.safetensors"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IDS = ("d2t", "t2d")  # of EAGLE heads: a map of token ids, no weights
_METHODS = ("quant_method", "quant_algo", "quant_type", "format")
_INSTEAD = "heads are read in float32, bfloat16, float16 and Outrider's own int8; pass the unquantised one"


class Header(NamedTuple):
    """The metadata of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str  # as torch names it
    file: str

    @property
    def bytes(self) -> int:
        return int(math.prod(self.shape) * getattr(torch, self.dtype).itemsize)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: those its index names, or all."""
    index = directory / INDEX
    files = [directory / name for name in indexed(index)] if index.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors{_pickled(directory)}")
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} is missing, but {index.name} names it")
    return files


def _pickled(directory: Path) -> str:
    """What to do where pickles are there instead, or may be on the hub."""
    pickled = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    cure = "`outrider convert MODEL OUT` or, for a head, `outrider heads convert HEAD OUT` writes"
    if not pickled:
        return f"; where the weights were published as pickles (*.bin), {cure} safetensors"
    return f" ({pickled[0].name} is a pickle, which can run code; {cure} its tensors as safetensors)"


def indexed(index: Path, suffix: str = ".safetensors") -> list[str]:
    """File names in an index. They lie beside it: a path that leads elsewhere is refused."""
    fields = Fields(read_json(index), str(index))
    names = set()
    for tensor, name in fields.mapping("weight_map").items():
        if not isinstance(name, str) or not name.endswith(suffix) or Path(name).name != name or "\0" in name:
            raise ModelError(f"{index}: {tensor!r} must be in a *{suffix} file of this folder, got {shown(name)}")
        names.add(name)
    if not names:
        raise ModelError(f"{index} lacks a 'weight_map' that names the files of the tensors")
    return sorted(names)


def read_headers(directory: Path) -> dict[str, Header]:
    """Shape, dtype and file of every tensor; the scales of int8 weights are left out."""
    headers: dict[str, Header] = {}
    for path in weight_files(directory):
        with opened(path) as file:
            for name, dtype in _dtypes(file, path).items():
                if name in headers:
                    raise ModelError(f"{path} holds {name!r}, and so does {headers[name].file}")
                headers[name] = Header(tuple(file.get_slice(name).get_shape()), dtype, path.name)
    return headers


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor, str]]:
    """Every stored (name, tensor, file name) of a directory; int8 weights are dequantised on the way."""
    for path in weight_files(directory):
        with opened(path) as file:
            for name, dtype in _dtypes(file, path).items():
                yield name, read_tensor(file, name, dtype), path.name


def read_tensor(file: Any, name: str, dtype: str) -> Tensor:
    """A tensor as it lies in the mapped file; int8 weights are dequantised."""
    tensor: Tensor = file.get_tensor(name)
    return tensor.float() * file.get_tensor(name + SCALE).float()[:, None] if dtype == "int8" else tensor


def stored_tensors(directory: Path) -> dict[str, Header]:
    """Every stored tensor, whatever its dtype, which is named as safetensors does."""
    headers: dict[str, Header] = {}
    for path in weight_files(directory):
        with opened(path) as file:
            for name in sorted(file.keys()):
                if name in headers:
                    raise ModelError(f"{path} holds {name!r}, and so does {headers[name].file}")
                part = file.get_slice(name)
                headers[name] = Header(tuple(part.get_shape()), part.get_dtype(), path.name)
    return headers


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8 and the scale of each row, as `read_tensors` reads them."""
    scale = (tensor.float().abs().amax(1) / 127.0).clamp_min(1e-12)
    return (tensor.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int8_mark() -> dict[str, str]:
    """A field of config.json with which Transformers refuses int8 weights, whose scales it would leave out."""
    return {ELSEWHERE: _EXPORT_FIRST}


def is_int8(directory: Path) -> bool:
    """Whether a directory's matrices are stored in int8."""
    with contextlib.suppress(ModelError), opened(weight_files(directory)[0]) as file:
        return any(name.endswith(SCALE) for name in file.keys())  # noqa: SIM118 (not a dict)
    return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped into memory."""
    try:
        if path.is_dir():
            raise ModelError(f"{path} cannot be read: it is a directory, not a safetensors file")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelError(f"{path} cannot be read (truncated or corrupt?): {error}") from None


def _dtypes(file: Any, path: Path) -> dict[str, str]:
    """The dtype of each tensor: floating point, or int8 with a scale for each row beside it. Others are refused."""
    parts = {name: file.get_slice(name) for name in sorted(file.keys())}
    dtypes: dict[str, str] = {}
    for name, part in parts.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in parts:
            continue
        stored, shape = part.get_dtype(), part.get_shape()
        if stored == "I8" and len(shape) == 2 and (scale := parts.get(name + SCALE)) is not None:
            if scale.get_shape() != shape[:1] or scale.get_dtype() not in FLOATS:
                raise ModelError(f"{path}: {name + SCALE!r} must be {shape[0]} floats, not {scale.get_shape()}")
            dtypes[name] = "int8"
        elif stored in FLOATS or name in _IDS:
            dtypes[name] = FLOATS.get(stored, stored)
        else:
            raise ModelError(
                f"{path}: {name!r} is stored as {stored}, so the weights are quantised in a way that Outrider does not read; "
                f"known: {', '.join(FLOATS.values())}, and int8 with a {SCALE!r} tensor beside each matrix"
            )
    return dtypes


def refuse_quantised(data: Mapping[str, Any], where: str) -> None:
    """Refuse a head whose config.json says that it is quantised: read as it stands it would guess garbage."""
    for key in ("quantization_config", "compression_config"):
        settings = data.get(key)
        if settings is not None:
            raise ModelError(f"{where}: the weights are quantised with {_method(settings)} ({key}); {_INSTEAD}")


def refuse_foreign(path: Path) -> None:
    """Refuse LoRA adapters, where the files show what they are."""
    if path.is_dir() and (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} is a LoRA adapter (adapter_config.json), not a whole model; pass its base model, and the adapter "
            f"with --lora {path.name}={path} or LLM(lora={{{path.name!r}: {str(path)!r}}})"
        )


def _method(settings: Any) -> str:
    """What a quantisation is called in its settings."""
    names = [settings[key] for key in _METHODS if settings.get(key)] if isinstance(settings, Mapping) else []
    if names and isinstance(names[0], str):
        return names[0][:40]
    if isinstance(settings, Mapping) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return shown(settings)
