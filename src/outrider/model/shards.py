"""Safetensors files that are written one tensor at a time: their sizes are known before any tensor is.

Within a file wide dtypes come first, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from outrider.model.files import INDEX

__all__ = ["Shape", "Shards"]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8  # bytes, of the data in a file


class Shape(NamedTuple):
    """What will be written under a name."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class _Place(NamedTuple):
    file: str
    offset: int
    shape: Shape


class Shards:
    """Writes the planned tensors into a folder, in files of about `shard_bytes`, with an index where there are several."""

    def __init__(self, directory: Path, plan: Mapping[str, Shape], shard_bytes: int) -> None:
        self._directory, self._files = directory, dict[str, BinaryIO]()
        self._missing = dict[str, _Place]()
        self.bytes = sum(shape.bytes for shape in plan.values())
        shards = list(_cut(plan, shard_bytes))
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._open(file, {name: plan[name] for name in names})
        if len(shards) > 1:
            weight_map = {name: self._missing[name].file for name in plan}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor in its place."""
        file, offset, shape = self._missing.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == shape, f"{name} was planned as {shape}"
        self._files[file].seek(offset)
        self._files[file].write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        assert kind is not None or not self._missing, f"never written: {sorted(self._missing)}"

    def _open(self, file: str, shapes: Mapping[str, Shape]) -> None:
        """Begin a file with its header."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = dict[str, int](), 0
        for name, shape in sorted(shapes.items(), key=lambda item: -item[1].dtype.itemsize):
            offsets[name], begin, end = end, end, end + shape.bytes
            header[name] = {"dtype": _NAMES[shape.dtype], "shape": list(shape.sizes), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._files[file] = (self._directory / file).open("wb")
        self._files[file].write(len(text).to_bytes(8, "little") + text)
        self._files[file].truncate(8 + len(text) + end)
        self._missing |= {name: _Place(file, 8 + len(text) + offset, shapes[name]) for name, offset in offsets.items()}


def _cut(plan: Mapping[str, Shape], shard_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors in each file. What belongs to one matrix may lie in two."""
    names, size = list[str](), 0
    for name, shape in plan.items():
        if names and size + shape.bytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += shape.bytes
    yield names
