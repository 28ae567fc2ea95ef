"""Tensors of a head on disk: safetensors and config.json. Strict: every key used, every parameter filled.

Matrices may be int8 with a scale per row beside them, as the decoder's may.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ModelError, UnknownMethod
from outrider.model.families import Place
from outrider.model.fields import Fields, read_json
from outrider.model.files import SCALE, int8_mark, quantised, read_tensors, refuse_quantised

__all__ = [
    "SaveOptions", "Stored", "StoredHead", "collect", "require_layout", "speculators_data", "stored_vocabulary",
    "vocabulary_tensors", "write",
]  # fmt: skip

H = TypeVar("H", bound=nn.Module)
_UNUSED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
_IDS = ("d2t", "t2d")  # of EAGLE heads: a map of token ids, no parameter


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to write a head. `standalone` adds the target's tensors, for engines that do not share them."""

    layout: str = "eagle"
    int8: bool = False
    standalone: bool = False
    target: str = ""  # name of the target, for the layouts that record it


class Stored(NamedTuple):
    """A tensor, and the name of its file."""

    tensor: Tensor
    file: str


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A folder with a head: the fields of config.json, and every tensor. Pickled files are refused."""

    directory: Path
    data: dict[str, Any]
    tensors: dict[str, Stored]

    @classmethod
    def read(cls, directory: Path) -> StoredHead:
        path = directory / "config.json"
        data = read_json(path, "a head's directory holds config.json and *.safetensors")
        refuse_quantised(data, str(path))
        return cls(directory, data, {name: Stored(tensor, file) for name, tensor, file in read_tensors(directory)})

    @property
    def fields(self) -> Fields:
        return Fields(self.data, str(self.directory / "config.json"))

    def fill(self, make: Callable[[torch.dtype], H], places: Mapping[str, Place], dtype: torch.dtype, widen: bool) -> H:
        """The head that `make` makes, with the stored weights. Names and shapes are checked before it takes memory."""
        with torch.device("meta"):
            self._check(dict(make(dtype).named_parameters()), places)
        head = make(torch.float32 if widen else dtype).requires_grad_(False)
        parameters = dict(head.named_parameters())
        for name, place in places.items():
            tensor = place.arrange(self.tensors[name].tensor)
            is_rounded = tensor.dim() > 1 and not place.parameter.endswith(".router")  # a router chooses, so it stays precise
            _goal(parameters, place).copy_(tensor.to(dtype) if is_rounded else tensor)
        return head.eval()

    def _check(self, parameters: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        for name, (tensor, file) in self.tensors.items():
            if name.endswith(_UNUSED) or name in _IDS:
                continue
            if name not in places:
                raise ModelError(f"{file} in {self.directory} holds {name!r}, which this kind of head does not have")
            expected = _shape(parameters, places[name])
            if tuple(tensor.shape) != expected:
                raise ModelError(f"{file} in {self.directory}: {name!r} has shape {tuple(tensor.shape)}, expected {expected}")
        if missing := set(places).difference(self.tensors):
            raise ModelError(f"{self.directory} lacks {len(missing)} tensors, first {min(missing)!r}")


def _goal(parameters: Mapping[str, Tensor], place: Place) -> Tensor:
    goal = place.part(parameters[place.parameter].detach())
    return goal[0] if _is_slice(goal, place) else goal


def _shape(parameters: Mapping[str, Tensor], place: Place) -> tuple[int, ...]:
    """The shape that a tensor must be stored in."""
    parameter = parameters[place.parameter]
    shape = place.shape(parameter)
    return shape[-2:] if _is_slice(parameter, place) else shape


def _is_slice(parameter: Tensor, place: Place) -> bool:
    """Whether a tensor is one of several matrices that a parameter holds, as the output matrices of several heads are."""
    return parameter.dim() == 3 and not place.experts and place.rows != slice(None)


def collect(module: nn.Module, places: Mapping[str, Place], int8: bool) -> dict[str, Tensor]:
    """The tensors to store, by name."""
    parameters = dict(module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, place in places.items():
        tensor = _goal(parameters, place).cpu()
        if int8 and tensor.dim() == 2:
            tensors[name], tensors[name + SCALE] = quantised(tensor)
        else:
            tensors[name] = tensor.contiguous().clone()
    return tensors


def write(directory: Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """model.safetensors and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    mark = int8_mark() if any(name.endswith(SCALE) for name in tensors) else {}
    (directory / "config.json").write_text(json.dumps(data | mark, indent=2) + "\n")


def vocabulary_tensors(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    """A reduced vocabulary as heads store it: d2t (target id = draft id + d2t[draft id]) and t2d."""
    ids = ids.cpu()
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)}


def stored_vocabulary(stored: StoredHead, vocab: int, outputs: int) -> Tensor:
    """The target's ids of a reduced vocabulary by d2t, checked against t2d."""
    offsets, known = stored.tensors.get("d2t"), stored.tensors.get("t2d")
    if offsets is None:
        raise ModelError(f"{stored.directory} drafts {outputs} of {vocab} tokens but has no 'd2t'")
    if (shape := tuple(offsets.tensor.shape)) != (outputs,):
        raise ModelError(f"{offsets.file}: 'd2t' has shape {shape}, config.json asks for ({outputs},)")
    ids = torch.arange(outputs) + offsets.tensor.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != len(ids):
        raise ModelError(f"{offsets.file}: 'd2t' gives ids outside the vocabulary of {vocab}, or one twice")
    if known is not None and not torch.equal(known.tensor.nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{known.file}: 't2d' marks other tokens than 'd2t'")
    return ids


def speculators_data(algorithm: str, layer: dict[str, Any], options: SaveOptions, tokens: int) -> dict[str, Any]:
    """The fields of config.json by which the `speculators` package and vLLM know a head."""
    verifier = {"name_or_path": options.target, "architectures": layer["architectures"]}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
    }


def require_layout(layout: str, known: Iterable[str]) -> None:
    """Refuse a layout of another kind of head."""
    if layout not in known:
        raise UnknownMethod("layout", layout, list(known))
