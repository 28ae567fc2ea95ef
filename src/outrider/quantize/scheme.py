"""What a matrix is stored as: integers or e4m3 values with a scale for each row, or for each group of inputs of a row.

A value is code * scale. The names, layouts and settings are those of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider import checks
from outrider.errors import InvalidParameter
from outrider.model.formats.bits import packed_words
from outrider.model.shards import Shape

__all__ = ["GROUP_SIZES", "SCHEMES", "Scheme"]

GROUP_SIZES = (128, 64, 32)  # the first that divides the inputs of every matrix is the default
_CLIPS = torch.arange(1.0, 0.69, -0.03)  # shares of a group's range that are tried as its largest value
_FORMATS = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}
SCHEMES = tuple(_FORMATS)
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_INT4_OFFSET = 8


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are quantised. int8 and fp8 have a scale for each row, int4 for each group of inputs."""

    name: str
    group_size: int = 0  # of int4; 0: not chosen yet
    scales: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        checks.choice("to", self.name, SCHEMES)
        checks.integer("group_size", self.group_size, 0, 2**16)
        if self.group_size and self.name != "int4":
            raise InvalidParameter("group_size", f"is int4's; {self.name} has a scale for each row")
        if self.group_size % 16:
            raise InvalidParameter("group_size", f"must be a multiple of 16, got {self.group_size}")

    def settings(self, ignored: list[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json; `ignored` are the linear layers that stay as they are."""
        kind, bits = ("float", 8) if self.name == "fp8" else ("int", 4 if self.name == "int4" else 8)
        strategy = {"strategy": "group", "group_size": self.group_size} if self.name == "int4" else {"strategy": "channel"}
        weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False} | strategy
        rows = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None if self.name == "int4" else rows}
        return {
            "quant_method": "compressed-tensors", "format": _FORMATS[self.name], "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"output_activations": None}}, "ignore": ignored, "kv_cache_scheme": None,
        }  # fmt: skip

    def shapes(self, outputs: int, inputs: int) -> dict[str, Shape]:
        """The stored tensors of a matrix, by the endings of their names."""
        groups = inputs // self.group_size if self.name == "int4" else 1
        scale = {".weight_scale": Shape(self.scales, (outputs, groups))}
        if self.name != "int4":
            return {".weight": Shape(torch.int8 if self.name == "int8" else torch.float8_e4m3fn, (outputs, inputs))} | scale
        words = Shape(torch.int32, (outputs, inputs * 4 // 32))
        return {".weight_packed": words, ".weight_shape": Shape(torch.int64, (2,))} | scale

    def stored(self, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The stored tensors of codes (outputs, inputs) with their scales (outputs, groups)."""
        if self.name != "int4":
            return {".weight": codes.to(torch.int8 if self.name == "int8" else torch.float8_e4m3fn), ".weight_scale": scale}
        words = packed_words((codes + _INT4_OFFSET).to(torch.uint8), 4)
        return {".weight_packed": words, ".weight_shape": torch.tensor(codes.shape), ".weight_scale": scale}

    def scale_of(self, weight: Tensor, importance: Tensor | None = None) -> Tensor:
        """The scale of every group of a matrix (outputs, inputs).

        Of four bits it is the one with the least squared error among some that clip the largest values; errors count by the
        `importance` (inputs,) of their input.
        """
        groups = self._groups(weight)
        scale = self._rounded_scale(groups.abs().amax(2) / _LARGEST[self.name])
        if self.name != "int4":
            return scale
        weights = 1.0 if importance is None else importance.view(-1, self.group_size)
        best, least = scale, torch.full(scale.shape, torch.inf)
        for clip in _CLIPS:
            tried = self._rounded_scale(scale.float() * clip)
            error = (self.codes(groups, tried[..., None]) * tried.float()[..., None] - groups).square_().mul_(weights).sum(2)
            better = error < least
            best, least = torch.where(better, tried, best), torch.where(better, error, least)
        return best

    def codes(self, values: Tensor, scale: Tensor) -> Tensor:
        """The nearest codes of values in float32, whose scales have a shape that broadcasts."""
        scaled, largest = values / scale.float(), _LARGEST[self.name]
        if self.name == "fp8":
            return scaled.clamp_(-largest, largest).to(torch.float8_e4m3fn).float()
        return scaled.round_().clamp_(-largest - (self.name == "int4"), largest)

    def rounded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a matrix, each value rounded to the nearest."""
        scale = self.scale_of(weight)
        return self.codes(self._groups(weight), scale[..., None]).view(weight.shape), scale

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        """What codes and scales stand for, in float32."""
        return (self._groups(codes) * scale.float()[..., None]).view(codes.shape)

    def _groups(self, matrix: Tensor) -> Tensor:
        """(outputs, groups, inputs of a group)"""
        return matrix.view(len(matrix), -1, self.group_size if self.name == "int4" else matrix.shape[1])

    def _rounded_scale(self, scale: Tensor) -> Tensor:
        """Scales as they are stored; one where a group is all zeros."""
        stored = scale.to(self.scales)
        return torch.where(stored > 0, stored, 1.0)
