"""The tensors of a model under the names of its config, whatever its files are: plain or quantised safetensors, or GGUF.

Quantised matrices are decoded one at a time, when they are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.gguf import find_gguf
from outrider.model.files import FLOATS, Header, opened, read_headers, read_tensor, stored_tensors
from outrider.model.formats import Format, format_in
from outrider.model.formats.parts import PartHeader, Parts
from outrider.model.gguf_source import GgufSource
from outrider.model.spec import ModelSpec
from outrider.ops import FourBitFloats, Grouped, ScaledFloats, StoredBlocks

__all__ = ["PlainSource", "QuantisedSource", "TensorSource", "open_source"]


class TensorSource(Protocol):
    """A model's tensors by the names that its family gives them."""

    decoded: tuple[str, ...]  # names of the formats that are decoded

    def headers(self) -> Mapping[str, Header]:
        """Shapes and dtypes. Of a quantised matrix: the shape it is decoded to, and bfloat16."""

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor. Matrices are in a dtype; vectors are as precise as they are stored."""

    def grouped(self, name: str) -> Grouped | None:
        """A matrix as the integers that it is stored in; None where it has to be decoded."""

    def blocks(self, name: str) -> StoredBlocks | None:
        """The same in blocks that the native core reads; None where there are none."""

    def floats(self, name: str) -> ScaledFloats | FourBitFloats | None:
        """A matrix as the FP8 or four-bit values that it is stored in; None where it is stored otherwise."""

    def close(self) -> None:
        """Close the files. Reading opens them again."""


def open_source(directory: Path, spec: ModelSpec) -> TensorSource:
    """The source of a model's tensors, by what lies in its directory or file."""
    path = find_gguf(directory)
    if path is not None:
        return GgufSource(path, spec)
    quantised = format_in(directory)
    return PlainSource(directory) if quantised is None else QuantisedSource(directory, quantised)


class PlainSource:
    """Safetensors as they are; Outrider's own int8 is dequantised."""

    def __init__(self, directory: Path) -> None:
        self.decoded: tuple[str, ...] = ()
        self._files = _OpenFiles(directory)
        self._headers = read_headers(directory)

    def headers(self) -> Mapping[str, Header]:
        return self._headers

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        header = self._headers[name]
        tensor = read_tensor(self._files.get(header.file), name, header.dtype)
        return tensor.to(dtype) if tensor.dim() > 1 else tensor

    def grouped(self, name: str) -> None:
        """Nothing is stored in groups."""

    def blocks(self, name: str) -> None:
        """Nothing is stored in blocks."""

    def floats(self, name: str) -> None:
        """Nothing is stored in FP8 with scales."""

    def close(self) -> None:
        self._files.close()


class QuantisedSource:
    """Safetensors in which several tensors make up one matrix."""

    def __init__(self, directory: Path, quantised: Format) -> None:
        self._files = _OpenFiles(directory)
        self._format = quantised
        self._stored = stored_tensors(directory)
        self._parts: dict[str, dict[str, str]] = {}  # name of a matrix -> ending -> stored name
        self._headers: dict[str, Header] = {}
        self.decoded: tuple[str, ...] = (type(quantised).__name__,)
        for name, header in self._stored.items():
            self._sort(name, header)
        for name, endings in self._parts.items():
            self._headers[name] = self._combined(name, endings)
        if not self._parts:
            how = type(quantised).__name__
            raise ModelError(f"{directory}: config.json says that the weights are quantised ({how}), and none of them is")

    def headers(self) -> Mapping[str, Header]:
        return self._headers

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor: Tensor = self._checked(name, self._format.decode) if name in self._parts else self._read(name)
        return tensor.to(dtype) if tensor.dim() > 1 else tensor

    def grouped(self, name: str) -> Grouped | None:
        integers = self._checked(name, self._format.integers) if name in self._parts else None
        grouped: Grouped | None = None if integers is None else integers.grouped()
        return grouped

    def floats(self, name: str) -> ScaledFloats | FourBitFloats | None:
        floats: ScaledFloats | FourBitFloats | None = self._checked(name, self._format.floats) if name in self._parts else None
        return floats

    def blocks(self, name: str) -> None:
        """Nothing is stored in blocks."""

    def close(self) -> None:
        self._files.close()

    def _sort(self, name: str, header: Header) -> None:
        """Put a stored tensor beside the others of its matrix, or among those that are stored as they are."""
        if self._format.ignored and name.endswith(self._format.ignored):
            return
        fitting = [ending for ending in self._format.endings if name.endswith(ending)]
        plain = header.dtype in FLOATS
        if not fitting or (plain and fitting == [".weight"]):
            if not plain:
                raise ModelError(f"{header.file}: {name!r} is stored as {header.dtype}, which is no part of {self.decoded[0]}")
            self._headers[name] = header._replace(dtype=FLOATS[header.dtype])
            return
        ending = max(fitting, key=len)
        self._parts.setdefault(name.removesuffix(ending) + self._format.name, {})[ending] = name

    def _combined(self, name: str, endings: Mapping[str, str]) -> Header:
        file = self._stored[next(iter(endings.values()))].file
        if name in self._headers:
            raise ModelError(f"{file}: {name!r} is stored both quantised and in floating point")
        return Header(self._checked(name, self._format.shape), "bfloat16", file)

    def _checked(self, name: str, use: Callable[[Parts], Any]) -> Any:
        """Use the parts of a matrix. What does not fit is an error that names the file and the matrix."""
        endings = self._parts[name]
        headers = {ending: PartHeader(*self._stored[stored][:2]) for ending, stored in endings.items()}
        try:
            return use(Parts(headers, lambda ending: self._read(endings[ending])))
        except ValueError as error:
            file = self._stored[next(iter(endings.values()))].file
            raise ModelError(f"{self._files.directory / file}: {name!r} {error}") from None

    def _read(self, stored: str) -> Tensor:
        tensor: Tensor = self._files.get(self._stored[stored].file).get_tensor(stored)
        return tensor


class _OpenFiles:
    """The safetensors files of a directory, each mapped when it is needed first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._open: dict[str, Any] = {}

    def get(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(opened(self.directory / file))
        return self._open[file]

    def close(self) -> None:
        self._open.clear()
        self._stack.close()
