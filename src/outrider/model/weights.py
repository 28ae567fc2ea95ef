"""Stored weights by the decoder's names, read from their source when they are asked for. Strict: every tensor has a place.

A tensor that is stored as a parameter holds it is not copied; fused, reordered and converted ones are, one parameter at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from outrider.errors import ModelError
from outrider.model.families import Place, names_of, places_of
from outrider.model.files import Header
from outrider.model.source import TensorSource, open_source
from outrider.model.spec import ModelSpec
from outrider.ops import FourBitFloats, Grouped, ScaledFloats, StoredBlocks

__all__ = ["Checkpoint", "StoredWeights", "known_name"]

_IGNORED = ("rotary_emb.inv_freq",)
_MODULE = "mtp."  # predicts further tokens; a drafter reads it
_TEXT_PART = ("language_model.", "text_model.")  # of models that read images too
_OTHER_PARTS = (
    "audio_tower", "connector", "image_newline", "mm_projector", "mtp", "multi_modal_projector", "patch_merger",
    "vision_embed_tokens", "vision_encoder", "vision_language_adapter", "vision_model", "vision_tower", "visual",
)  # fmt: skip
_BAR_AFTER_S = 1.0
_INT4, _INT4_GROUP = "int4", 64  # inputs
_PLAIN_SIZE = "takes the memory of the unquantised model"
_SIZES = {"int8": "a byte for each weight", "fp8": "a byte for each weight", _INT4: "half a byte for each weight"}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the files of a model hold, by the names that its family gives, before anything is read."""

    directory: Path
    spec: ModelSpec  # tied as the files are
    source: TensorSource
    stored: Mapping[str, str]  # family's name -> stored name

    @classmethod
    def of(cls, directory: Path, spec: ModelSpec) -> Checkpoint:
        """The checkpoint in a directory. Tensors of other parts than the text's are ignored, and said so."""
        return cls.over(directory, spec, open_source(directory, spec))

    @classmethod
    def over(cls, directory: Path, spec: ModelSpec, source: TensorSource) -> Checkpoint:
        """The checkpoint that a source holds; the directory is what messages name."""
        stored, ignored = dict[str, str](), dict[str, int]()
        for name in source.headers():
            part = _other_part(name)
            if part:
                ignored[part] = ignored.get(part, 0) + 1
            elif known := known_name(name, spec):
                stored[known] = name
        for part, count in sorted(ignored.items()):
            _logger.info("%s: %d tensors of %s are ignored; only the text decoder is served", directory, count, part)
        checkpoint = cls(directory, spec, source, stored)
        tied = checkpoint._is_tied()
        source.close()
        return replace(checkpoint, spec=replace(spec, tied=tied))

    def places(self) -> dict[str, Place]:
        """The place of every tensor that the spec asks for, by the family's name."""
        return places_of(self.spec, self.stored)

    @property
    def headers(self) -> Mapping[str, Header]:
        """By stored name."""
        return self.source.headers()

    def read(self, stored: str, dtype: torch.dtype) -> Tensor:
        """A stored tensor. A matrix is in a dtype, or in the narrower one that it is stored in."""
        return self.source.tensor(stored, self.narrowest((stored,), dtype))

    def narrowest(self, stored: Sequence[str], dtype: torch.dtype) -> torch.dtype:
        """A dtype, or the narrower one that all of these are stored in. What is decoded has none."""
        kinds = {self.headers[name].dtype for name in stored}
        if dtype != torch.float32 or self.source.decoded or len(kinds) > 1 or "int8" in kinds:
            return dtype
        kind: torch.dtype = getattr(torch, kinds.pop())
        return kind

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Compare every tensor's name and shape with the parameters."""
        places = self.places()
        for name, stored in self.stored.items():
            header = self.headers[stored]
            if name not in places:
                if self.spec.tied and name.startswith(names_of(self.spec).output + "."):
                    continue
                raise ModelError(f"{header.file} holds {stored!r}, which {self.spec.architecture} does not have")
            expected = places[name].shape(parameters[places[name].parameter])
            if header.shape != expected:
                raise ModelError(f"{header.file}: {stored!r} has shape {header.shape}, config.json asks for {expected}")
        if missing := set(places).difference(self.stored):
            raise ModelError(f"{self.directory} lacks {len(missing)} tensors, first {min(missing)!r}")

    @property
    def matrix_dtypes(self) -> set[str]:
        """The dtypes that the matrices are stored in."""
        headers = (self.headers[name] for name in self.stored.values())
        return {header.dtype for header in headers if len(header.shape) > 1}

    def _is_tied(self) -> bool:
        """Whether the output matrix is the embedding: where none is stored, or where it is the same beside a config that ties.

        Transformers decides so too.
        """
        names, tied = names_of(self.spec), self.spec.tied
        matrices = [self.stored.get(f"{name}.weight") for name in (names.embedding, names.output)]
        embedding, output = matrices
        if output is None or embedding is None:
            if output is None and not tied:
                _logger.warning("%s holds no output matrix; the embedding is used, as with tie_word_embeddings", self.directory)
            return tied or output is None
        if not tied or self.headers[embedding].shape != self.headers[output].shape:
            return tied
        same = torch.equal(self.read(embedding, torch.float32), self.read(output, torch.float32))
        if not same:
            _logger.warning("%s ties the output matrix to the embedding but stores another one, which is used", self.directory)
        return same


class StoredWeights:
    """Reads parameters of a decoder. `dtype` is what matrices are served in: wider stored ones are rounded to it.

    With `keeps_groups`, integers that are stored in groups may be asked for as they are. Where a model is served in int4, every
    matrix of a layer may be, rounded to four bits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        served: str = "",
        keeps_groups: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._parameters = parameters
        self._dtype = dtype
        self._into, self._keeps_groups = served, keeps_groups
        self._places: dict[str, list[tuple[str, Place]]] = {}
        for name, place in checkpoint.places().items():
            self._places.setdefault(place.parameter, []).append((checkpoint.stored[name], place))
        self._shared: dict[str, Tensor] = {}
        self._decodes = bool(checkpoint.source.decoded)  # until it is said
        self._bar: Any = None

    def read(self, name: str) -> Tensor:
        """A parameter. It may be narrower than it is held in; a matrix stays until its namesake of another layer is read.

        Matrices lie in the mapped file, or in memory that those of all layers share in turn: what is allocated and freed for
        each layer leaves holes in the heap.
        """
        parameter, parts = self._parameters[name], self._places.get(name)
        if parts is None:
            return torch.ones(parameter.shape)  # the weight of a norm that has none
        self._say_decoded(name)
        stored, place = parts[0]
        if len(parts) == 1 and place.rows == slice(None):
            return place.arrange(self._tensor(name, stored)).reshape(parameter.shape)
        dtype = self._served(name, parameter)
        dtype = self._checkpoint.narrowest([stored for stored, _ in parts], dtype)
        last = name.rpartition(".")[2]
        whole = self._shared.get(last)
        if whole is None or whole.shape != parameter.shape or whole.dtype != dtype:
            whole = torch.empty(parameter.shape, dtype=dtype)
        if parameter.dim() == 2:  # vectors are kept as they are by who reads them
            self._shared[last] = whole
        self.fill(name, whole)
        return whole

    def grouped(self, name: str) -> Grouped | StoredBlocks | None:
        """A matrix as groups of integers; None where it is to be read in floating point."""
        stored = self._stored_groups(name) if self._keeps_groups else None
        if stored is None and self._into == _INT4 and name.startswith("layers."):
            return Grouped.of(self.read(name), _INT4_GROUP)
        return stored

    def packed(self, name: str) -> Grouped | ScaledFloats | FourBitFloats | None:
        """A matrix as it is stored, integers, FP8 or four-bit floats, for devices; None where it is to be read as floats."""
        stacked = self._stacked(name) if self._keeps_groups else None
        if stacked is not None:
            return stacked
        parts = self._plain_parts(name) if self._keeps_groups else []
        joined = _joined(parts, self._checkpoint.source.grouped, Grouped.joined) or _joined(parts, self._fp8, ScaledFloats.joined)
        self._advance_parts(parts if joined is not None else ())
        return joined

    def _fp8(self, stored: str) -> ScaledFloats | None:
        floats = self._checkpoint.source.floats(stored)
        return floats if isinstance(floats, ScaledFloats) else None

    def _stacked(self, name: str) -> FourBitFloats | None:
        """Matrices of all experts in four-bit floats, whose outputs lie one below the other as they are stored."""
        parts = self._places.get(name, ())
        if len(parts) != 1 or not (parts[0][1].experts and parts[0][1].transposed):
            return None
        stored, place = parts[0]
        floats = self._checkpoint.source.floats(stored)
        if not isinstance(floats, FourBitFloats):
            return None
        self._advance_parts(parts)
        if place.order is None:
            return floats
        first = torch.arange(0, floats.shape[0], floats.shape[0] // place.experts)
        return floats.rows((first[:, None] + place.order()).flatten())

    def _plain_parts(self, name: str) -> list[tuple[str, Place]]:
        """The stored tensors of a matrix from top to bottom; none where a place changes values."""
        parts = sorted(self._places.get(name, ()), key=lambda part: part[1].rows.start or 0)
        return [] if any(place.transposed or place.columns or place.add for _, place in parts) else parts

    def _advance_parts(self, parts: Iterable[tuple[str, Place]]) -> None:
        for stored, _ in parts:
            self._advance(self._checkpoint.headers[stored].bytes)

    def _stored_groups(self, name: str) -> Grouped | StoredBlocks | None:
        parts, source = self._plain_parts(name), self._checkpoint.source
        joined = _joined(parts, source.blocks, StoredBlocks.joined) or _joined(parts, source.grouped, Grouped.joined)
        self._advance_parts(parts if joined is not None else ())
        return joined

    def fill(self, name: str, target: Tensor) -> None:
        """Write a parameter's values."""
        self._say_decoded(name)
        if name not in self._places:
            target.fill_(1.0)
        for stored, place in self._places.get(name, ()):
            place.part(target).copy_(place.arrange(self._tensor(name, stored)))

    def parts(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """The stored tensors that a parameter is made of, and their rows of it; none where it is a norm's that has no weight."""
        for stored, place in self._places.get(name, ()):
            yield place.rows, place.arrange(self._tensor(name, stored))

    def release(self) -> None:
        """Unmap the files. Reading maps them again."""
        self._checkpoint.source.close()

    def close(self) -> None:
        """Close the files and the progress bar. Reading opens them again."""
        self.release()
        self._shared.clear()
        if self._bar is not None:
            self._bar.close()

    def _served(self, name: str, parameter: Tensor) -> torch.dtype:
        """The dtype of a parameter. Vectors are kept as precise as they are held, and so are routers."""
        return parameter.dtype if parameter.dim() == 1 or name.endswith(".router") else self._dtype

    def _tensor(self, name: str, stored: str) -> Tensor:
        """A stored tensor in the dtype that its parameter is served in."""
        parameter = self._parameters[name]
        tensor = self._checkpoint.read(stored, self._served(name, parameter))
        self._advance(self._checkpoint.headers[stored].bytes)
        return tensor.to(parameter.dtype, copy=True) if parameter.dim() == 1 else tensor

    def _say_decoded(self, name: str) -> None:
        """One line when the first matrix of a layer is decoded."""
        if self._decodes and name.startswith("layers.") and self._parameters[name].dim() == 2:
            self._decodes = False
            formats, size = ", ".join(self._checkpoint.source.decoded), _SIZES.get(self._into, _PLAIN_SIZE)
            _logger.warning("%s is stored as %s, decoded to %s: %s", self._checkpoint.directory, formats, self._into, size)

    def _advance(self, count: int) -> None:
        if self._bar is None:
            shown = sys.stderr is not None and sys.stderr.isatty()
            total = sum(self._checkpoint.headers[name].bytes for name in self._checkpoint.stored.values())
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, delay=_BAR_AFTER_S, disable=not shown, leave=False, desc="loading"
            )
        self._bar.update(count)


_Groups = TypeVar("_Groups", Grouped, ScaledFloats, StoredBlocks)


def _joined(
    parts: Sequence[tuple[str, Place]], read: Callable[[str], _Groups | None], join: Callable[[Sequence[_Groups]], _Groups | None]
) -> _Groups | None:
    """The matrices of a parameter one below the other; None where one of them is not stored so."""
    matrices: list[_Groups] = []
    for stored, place in parts:
        matrix = read(stored)
        if matrix is None:
            return None
        matrices.append(matrix if place.order is None else matrix.rows(place.order()))
    return join(matrices) if matrices else None


def _other_part(name: str) -> str:
    """The part beside the text decoder that a tensor belongs to: of images and sounds, or heads (mtp); "" for the decoder."""
    first = name.removeprefix("model.").partition(".")[0]
    return first if first in _OTHER_PARTS else ""


def known_name(name: str, spec: ModelSpec) -> str:
    """The name that a family gives to a stored tensor; "" where it holds no weights of the model."""
    names = names_of(spec)
    if name.startswith(_MODULE):
        return ""
    for part in _TEXT_PART:
        name = name.removeprefix(part) if name.startswith(part) else name.replace(f"model.{part}", "model.", 1)
    if not name.startswith((names.prefix, names.output)):
        name = names.prefix + name
    return "" if name.endswith(_IGNORED) or names.is_ignored(name) else name
