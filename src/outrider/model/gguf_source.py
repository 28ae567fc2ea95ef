"""The tensors of a GGUF file under the names of its model's family, decoded when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ModelError
from outrider.gguf import Gguf
from outrider.model.families import names_of
from outrider.model.files import Header
from outrider.model.formats.gguf_blocks import FLOATS, INTEGERS, Floats, GroupedBlocks, decoded, rounded_to_bfloat16
from outrider.model.formats.gguf_config import architecture_of
from outrider.model.spec import ModelSpec
from outrider.ops import BLOCK_FORMS, Grouped, StoredBlocks

__all__ = ["GgufSource"]

_CHUNK = 2**17  # values that are decoded at a time: they stay in the cache
_MOST_THREADS = 16
_OF_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"})
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TENSORS = {"token_embd": "embedding", "output_norm": "norm", "output": "output", "position_embd": "positions"}
_ONE_ROW = "ffn_gate_inp_shexp.weight"  # a matrix of one row, stored as a vector
_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # no weights: they are in the config


class GgufSource:
    """An open file. `decoded` names the types that are decoded: all but floats."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._gguf, self._spec = Gguf(path), spec
        self._architecture = architecture_of(self._gguf)
        self._stored: dict[str, str] = {}  # family's name -> name in the file
        for name, tensor in self._gguf.tensors.items():
            if tensor.kind.name not in FLOATS and tensor.kind.name not in INTEGERS:
                kinds = ", ".join([*FLOATS, *INTEGERS])
                raise ModelError(f"{path}: {name!r} is of the type {tensor.kind.name}, which is not decoded; known: {kinds}")
            if name not in _SETTINGS:
                self._stored[self._family_name(name)] = name
        kinds_used = {tensor.kind.name for tensor in self._gguf.tensors.values()}
        self.decoded: tuple[str, ...] = tuple(sorted(kinds_used.difference(_FLOATS)))
        self._headers = self._read_headers()

    def headers(self) -> Mapping[str, Header]:
        return self._headers

    def _read_headers(self) -> dict[str, Header]:
        found = {}
        for name, stored in self._stored.items():
            tensor = self._gguf.tensors[stored]
            shape = (1, *tensor.shape) if stored.endswith(_ONE_ROW) else tensor.shape
            found[name] = Header(shape, _FLOATS.get(tensor.kind.name, "bfloat16"), self._gguf.file_of(stored))
        return found

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor. Matrices are in a dtype, vectors in float32."""
        stored = self._stored[name]
        shape = self._gguf.tensors[stored].shape
        order = self._order(stored)
        if len(shape) == 1:
            vector = self._rows(stored, 0, 1)[0]
            values = torch.from_numpy(vector if order is None else vector[order.argsort()])
            if stored.endswith(_ONE_ROW):
                return values[None].to(dtype)
            return values - names_of(self._spec).norm_offset if stored.endswith("norm.weight") else values
        values_of = torch.empty(shape, dtype=dtype)
        rows = values_of.view(torch.int16 if dtype == torch.bfloat16 else dtype).view(-1, shape[-1]).numpy()
        step = max(_CHUNK // shape[-1], 1)

        def decode(start: int, stop: int) -> None:
            values = self._rows(stored, start, stop)
            where = slice(start, stop) if order is None else order[start:stop]
            rows[where] = rounded_to_bfloat16(values) if dtype == torch.bfloat16 else values

        _in_threads(decode, len(rows), step)
        return values_of

    def grouped(self, name: str) -> Grouped | None:
        """A matrix as the integers that the file has; None where it has floats."""
        stored = self._stored[name]
        shape, kind = self._gguf.tensors[stored].shape, self._gguf.tensors[stored].kind
        if kind.name not in INTEGERS or len(shape) != 2:
            return None
        order, (columns, inner) = self._order(stored), shape
        first = INTEGERS[kind.name](self._blocks(stored, 0, 1))
        groups = inner // kind.values * first.scale.shape[1]
        codes, scale, least = np.empty(shape, np.uint8), np.empty((columns, groups), np.float32), None
        if first.least is not None:
            least = np.empty((columns, groups), np.float32)

        def read(start: int, stop: int) -> None:
            blocks: GroupedBlocks = INTEGERS[kind.name](self._blocks(stored, start, stop))
            where = slice(start, stop) if order is None else order[start:stop]
            codes[where] = blocks.codes.reshape(stop - start, -1)
            scale[where] = blocks.scale.reshape(stop - start, -1)
            if least is not None and blocks.least is not None:
                least[where] = blocks.least.reshape(stop - start, -1)

        _in_threads(read, columns, max(_CHUNK // inner, 1))
        subtracted = None if least is None else torch.from_numpy(least)
        bits = 4 if kind.name in _OF_FOUR_BITS else 8
        return Grouped(torch.from_numpy(codes), torch.from_numpy(scale), subtracted, first.offset, bits, inner // groups)

    def blocks(self, name: str) -> StoredBlocks | None:
        """A matrix as its blocks lie in the mapped file; None where the core does not read their type."""
        stored = self._stored[name]
        shape, kind = self._gguf.tensors[stored].shape, self._gguf.tensors[stored].kind
        if kind.name not in BLOCK_FORMS or len(shape) != 2:
            return None
        memory = np.frombuffer(self._gguf.view(stored), np.uint8)
        address = memory.ctypes.data + torch.arange(shape[0]) * (shape[1] // kind.values * kind.nbytes)
        order = self._order(stored)
        if order is not None:
            address = address[torch.from_numpy(order.argsort())]
        return StoredBlocks(address, torch.full_like(address, BLOCK_FORMS[kind.name].number), shape[1], (memory,))

    def floats(self, name: str) -> None:
        """Nothing is stored in FP8 with scales."""

    def close(self) -> None:
        """The file stays mapped as long as this object lives."""

    def _rows(self, stored: str, start: int, stop: int) -> Floats:
        """Rows of a tensor in float32."""
        with np.errstate(all="ignore"):  # infinities and NaN are the file's affair
            return decoded(self._gguf.tensors[stored].kind.name, self._blocks(stored, start, stop)).reshape(stop - start, -1)

    def _blocks(self, stored: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The blocks of some rows of a tensor."""
        shape, kind = self._gguf.tensors[stored].shape, self._gguf.tensors[stored].kind
        row = shape[-1] // kind.values * kind.nbytes
        return np.frombuffer(self._gguf.read(stored, start * row, (stop - start) * row), np.uint8).reshape(-1, kind.nbytes)

    def _family_name(self, stored: str) -> str:
        """The family's name of a tensor; an unknown one keeps its name, and is refused as no part of the model."""
        names, (base, _, ending) = names_of(self._spec), stored.rpartition(".")
        if base in _TENSORS:
            known = getattr(names, _TENSORS[base])
            return f"{known}.{ending}" if known else stored
        block, _, part = base.removeprefix("blk.").partition(".")
        name = self._expert_name(part, ending)
        if not name and (known := names.parts.get(self._architecture.parts.get(part, ""), "")):
            name = known if known == names.parts.get("sinks") else f"{known}.{ending}"
        if not base.startswith("blk.") or not block.isdecimal() or not name:
            return stored
        return names.layer.format(int(block)) + name

    def _expert_name(self, part: str, ending: str) -> str:
        """The name within a layer of a tensor of a mixture; "" where it is none."""
        if not self._architecture.mixes:
            return ""
        experts = names_of(self._spec).experts
        names = {f"ffn_{kind}_exps": f"{name}.{ending}" for kind, name in experts.apart.items()}
        names |= {f"ffn_{kind}_shexp": name for kind, name in experts.shared.items()}
        return (names | {"ffn_gate_inp": f"{experts.router}.{ending}", "ffn_gate_inp_shexp": experts.shared_gate}).get(part, "")

    def _order(self, stored: str) -> NDArray[np.int64] | None:
        """The family's row for each stored row of queries and keys that lie in pairs; None where rows are in order."""
        part = stored.rpartition(".")[0].rpartition(".")[2]
        if not self._architecture.paired or part not in ("attn_q", "attn_k"):
            return None
        rows, head = np.arange(self._gguf.tensors[stored].shape[0]), self._spec.attention.head_dim
        return rows // head * head + rows % 2 * (head // 2) + rows % head // 2


def _in_threads(work: Callable[[int, int], None], rows: int, step: int) -> None:
    """Call work(start, stop) for all rows, `step` at a time. numpy lets go of the interpreter lock."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        list(pool.map(lambda start: work(start, min(start + step, rows)), range(0, rows, step)))
