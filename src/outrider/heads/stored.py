"""Tensors of a head on disk: safetensors and config.json. Strict: every key used, every parameter filled.

Matrices may be int8 with a scale per row beside them, as the decoder's may.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.errors import ModelError, UnknownMethod
from outrider.model.fields import read_json
from outrider.model.files import SCALE, quantised, read_tensors, refuse_quantised

__all__ = [
    "Place",
    "SaveOptions",
    "Stored",
    "check",
    "collect",
    "fill",
    "read_config",
    "read_stored",
    "require_layout",
    "write",
]

_UNUSED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
_IDS = ("d2t", "t2d")  # of EAGLE heads: a map of token ids, no parameter


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to write a head. `standalone` adds the target's tensors, for engines that do not share them."""

    layout: str = "eagle"
    int8: bool = False
    standalone: bool = False
    target: str = ""  # name of the target, for the layouts that record it


class Place(NamedTuple):
    """Where a stored tensor goes: a parameter, and which of its rows."""

    parameter: str
    rows: slice


class Stored(NamedTuple):
    tensor: Tensor
    file: str


def check(skeleton: nn.Module, stored: Mapping[str, Stored], places: Mapping[str, Place], where: Path) -> None:
    """Compare the stored tensors' names and shapes with a head whose parameters take no memory yet."""
    parameters = dict(skeleton.named_parameters())
    missing = set(places)
    for name, (tensor, file) in stored.items():
        if name.endswith(_UNUSED) or name in _IDS:
            continue
        if name not in places:
            raise ModelError(f"{file} in {where} holds {name!r}, which this kind of head does not have")
        expected = tuple(_goal(parameters, places[name]).shape)
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{file} in {where}: {name!r} has shape {tuple(tensor.shape)}, expected {expected}")
        missing.discard(name)
    if missing:
        raise ModelError(f"{where} lacks {len(missing)} tensors, first {min(missing)!r}")


def fill(module: nn.Module, stored: Mapping[str, Stored], places: Mapping[str, Place], dtype: torch.dtype) -> None:
    """Put every stored tensor in its place, after `check`."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, (tensor, _) in stored.items():
            if name in places:
                _goal(parameters, places[name]).copy_(tensor.to(dtype) if tensor.dim() == 2 else tensor)


def _goal(parameters: Mapping[str, Tensor], place: Place) -> Tensor:
    goal = parameters[place.parameter][place.rows]
    return goal[0] if goal.dim() == 3 else goal  # output matrices of several heads, one slice each


def collect(module: nn.Module, places: Mapping[str, Place], int8: bool) -> dict[str, Tensor]:
    """The tensors to store, by name."""
    parameters = dict(module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, place in places.items():
        tensor = parameters[place.parameter].detach()[place.rows].cpu()
        tensor = tensor[0] if tensor.dim() == 3 else tensor
        if int8 and tensor.dim() == 2:
            tensors[name], tensors[name + SCALE] = quantised(tensor)
        else:
            tensors[name] = tensor.contiguous().clone()
    return tensors


def write(directory: Path, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
    """model.safetensors and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(data, indent=2) + "\n")


def read_config(directory: Path) -> dict[str, Any]:
    """The fields of config.json."""
    path = directory / "config.json"
    data = read_json(path, "a head's directory holds config.json and *.safetensors")
    refuse_quantised(data, str(path))
    return data


def read_stored(directory: Path) -> dict[str, Stored]:
    """Every tensor of a directory; pickled files are refused."""
    return {name: Stored(tensor, file) for name, tensor, file in read_tensors(directory)}


def require_layout(layout: str, known: Iterable[str]) -> None:
    """Refuse a layout of another kind of head."""
    if layout not in known:
        raise UnknownMethod("layout", layout, list(known))
