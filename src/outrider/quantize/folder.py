"""A model's folder in a scheme: the plan of its files, and the matrices one after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from outrider.errors import InvalidParameter, ModelError
from outrider.model import LoadOptions, open_decoder
from outrider.model.decoder import Layer
from outrider.model.families import Place, names_of, read_spec
from outrider.model.folders import copy_beside, plain_config, replaced, require_new
from outrider.model.load import check_model
from outrider.model.shards import Shape, Shards
from outrider.model.spec import ModelSpec
from outrider.model.weights import Checkpoint
from outrider.quantize.calibration import Calibration
from outrider.quantize.gptq import corrected
from outrider.quantize.scheme import GROUP_SIZES, Scheme

__all__ = ["Written", "quantise_folder"]

SHARD_BYTES = 4 * 2**30
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DRAFTERS = ("draft", "eagle", "medusa")  # folders beside a model; each keeps its precision
_MATRICES = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down")  # parameters of a layer


class Written(NamedTuple):
    """What was written."""

    scheme: Scheme
    bytes: int  # of all weights
    stored_bytes: int  # of the weights that were read
    matrices: int
    corrected: int  # of them by GPTQ


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tensor of the model: under which name it is stored, its place, and whether it is quantised."""

    name: str
    stored: str
    place: Place
    quantised: bool

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def quantise_folder(
    source: Path, out: Path, scheme: Scheme, texts: Sequence[Sequence[int]] = (), shard_bytes: int = SHARD_BYTES
) -> Written:
    """Write a model in a scheme; with calibration `texts` (token ids) by GPTQ. Nothing is left where it does not end well."""
    require_new(out)
    config = plain_config(source)
    check_model(source)
    spec = read_spec(source)
    checkpoint = Checkpoint.of(source, spec)
    matrices = _matrices(checkpoint)
    scheme = _chosen(scheme, checkpoint, matrices)
    plan = _plan(checkpoint, matrices, scheme)
    config |= {"dtype": _name(spec), "quantization_config": scheme.settings(_ignored(spec, matrices))}
    tensors = _rounded(checkpoint, matrices, scheme) if not texts else _by_layer(source, checkpoint, matrices, scheme, texts)
    stored = sum(path.stat().st_size for path in {source / checkpoint.headers[m.stored].file for m in matrices})
    fixed = 0
    with replaced(out) as folder:
        folder.mkdir(parents=True)
        with Shards(folder, plan, shard_bytes) as shards:
            for name, parts, is_corrected in tqdm(tensors, desc="quantising", total=len(matrices), unit="tensor", disable=None):
                fixed += is_corrected
                for ending, tensor in parts.items():
                    shards.put(name + ending, tensor)
        _write_beside(source, folder, config)
    return Written(scheme, shards.bytes, stored, sum(m.quantised for m in matrices), fixed)


def _matrices(checkpoint: Checkpoint) -> list[_Matrix]:
    """Every tensor of a model. Linear layers inside the decoder's layers are quantised, but no router."""
    found = []
    for name, place in checkpoint.places().items():
        stored = checkpoint.stored[name]
        layer, _, parameter = place.parameter.rpartition(".")
        linear = layer and parameter in _MATRICES and not place.transposed and name.endswith(".weight")
        found.append(_Matrix(name, stored, place, bool(linear) and len(checkpoint.headers[stored].shape) == 2))
    if not any(matrix.quantised for matrix in found):
        raise ModelError(f"{checkpoint.directory}: {checkpoint.spec.architecture} stores no matrix that this format describes")
    return found


def _chosen(scheme: Scheme, checkpoint: Checkpoint, matrices: Sequence[_Matrix]) -> Scheme:
    """The scheme with its group size, and scales in the dtype that the model computes in."""
    scheme = replace(scheme, scales=_DTYPES[_name(checkpoint.spec)])
    if scheme.name != "int4":
        return scheme
    inputs = {checkpoint.headers[m.stored].shape[1]: m.name for m in reversed(matrices) if m.quantised}
    fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in inputs)]
    size = scheme.group_size or next(iter(fitting), GROUP_SIZES[0])
    for width, name in inputs.items():
        if width % size:
            advice = f"these do: {', '.join(map(str, fitting))}" if fitting else "choose int8 or fp8"
            raise InvalidParameter("group_size", f"{size} does not divide the {width} inputs of {name!r}; {advice}")
    return replace(scheme, group_size=size)


def _plan(checkpoint: Checkpoint, matrices: Sequence[_Matrix], scheme: Scheme) -> dict[str, Shape]:
    """Dtype and shape of every tensor that will be written."""
    plan: dict[str, Shape] = {}
    for matrix in matrices:
        shape = checkpoint.headers[matrix.stored].shape
        if matrix.quantised:
            plan |= {matrix.module + ending: part for ending, part in scheme.shapes(*shape).items()}
        else:
            plan[matrix.name] = Shape(_kept_dtype(checkpoint, matrix), shape)
    return plan


def _kept_dtype(checkpoint: Checkpoint, matrix: _Matrix) -> torch.dtype:
    """The dtype of what is not quantised: as it is stored, or the model's where it is decoded."""
    stored = checkpoint.headers[matrix.stored]
    return _DTYPES.get(stored.dtype, _DTYPES[_name(checkpoint.spec)])


def _name(spec: ModelSpec) -> str:
    return spec.dtype if spec.dtype in _DTYPES else "bfloat16"


def _ignored(spec: ModelSpec, matrices: Sequence[_Matrix]) -> list[str]:
    """The linear layers that stay as they are: the output matrix, stored or tied, and routers."""
    return [names_of(spec).output, *(m.module for m in matrices if m.place.parameter.endswith(".router"))]


_Parts = tuple[str, dict[str, Tensor], bool]  # name, tensors by ending, whether they were corrected


def _rounded(checkpoint: Checkpoint, matrices: Sequence[_Matrix], scheme: Scheme) -> Iterator[_Parts]:
    """Every tensor, matrices rounded to nearest."""
    for matrix in matrices:
        if matrix.quantised:
            weight = checkpoint.source.tensor(matrix.stored, torch.float32)
            yield matrix.module, scheme.stored(*scheme.rounded(weight)), False
        else:
            yield matrix.name, {"": _kept(checkpoint, matrix)}, False
    checkpoint.source.close()


def _kept(checkpoint: Checkpoint, matrix: _Matrix) -> Tensor:
    dtype = _kept_dtype(checkpoint, matrix)
    return checkpoint.source.tensor(matrix.stored, dtype).to(dtype)


def _by_layer(
    source: Path, checkpoint: Checkpoint, matrices: Sequence[_Matrix], scheme: Scheme, texts: Sequence[Sequence[int]]
) -> Iterator[_Parts]:
    """Every tensor, matrices by GPTQ. The rows that a layer reads are those that the quantised layers before it make."""
    of_layer: dict[int, list[_Matrix]] = {}
    for matrix in matrices:
        if matrix.quantised:
            of_layer.setdefault(int(matrix.place.parameter.split(".")[1]), []).append(matrix)
        else:
            yield matrix.name, {"": _kept(checkpoint, matrix)}, False
    calibration = Calibration(open_decoder(source, LoadOptions("float32")), texts)
    for layer in calibration.layers():
        hessians = calibration.hessians(layer)
        for matrix in of_layer[layer.index]:
            yield _fitted(checkpoint, matrix, scheme, layer, hessians)
        calibration.advance(layer)
    checkpoint.source.close()


def _fitted(checkpoint: Checkpoint, matrix: _Matrix, scheme: Scheme, layer: Layer, hessians: Mapping[str, Tensor]) -> _Parts:
    """One matrix, by GPTQ where it is known what it multiplies; the layer gets its values."""
    weight = checkpoint.source.tensor(matrix.stored, torch.float32)
    parameter = matrix.place.parameter.rpartition(".")[2]
    hessian = hessians.get(parameter)
    codes, scale = scheme.rounded(weight) if hessian is None else corrected(weight, hessian, scheme)
    part = matrix.place.part(layer.get_parameter(parameter))
    part.copy_(matrix.place.arrange(scheme.values(codes, scale)))
    return matrix.module, scheme.stored(codes, scale), hessian is not None


def _write_beside(source: Path, folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_beside(source, folder)
    for drafter in _DRAFTERS:
        if (source / drafter / "config.json").is_file():
            shutil.copytree(source / drafter, folder / drafter)
