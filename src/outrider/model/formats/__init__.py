"""Readers of quantised checkpoints, one file per format: the stored tensors of one matrix become its values.

`FORMATS` maps the `quant_method` of config.json to the class that reads it. To add a format, write a class like those and list
it here. GGUF files have their own container, `outrider.gguf`, and are read by `gguf_config` and `gguf_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model.fields import Fields, read_json
from outrider.model.formats.awq import AWQ
from outrider.model.formats.bitsandbytes import BitsAndBytes
from outrider.model.formats.compressed_tensors import CompressedTensors
from outrider.model.formats.fp8 import FP8
from outrider.model.formats.gptq import GPTQ
from outrider.model.formats.mxfp4 import MXFP4
from outrider.model.formats.parts import Integers, Parts
from outrider.ops import FourBitFloats, ScaledFloats

__all__ = ["FORMATS", "Format", "format_in", "format_of"]

_KEYS = ("quantization_config", "compression_config")
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}  # of older tools


class Format(Protocol):
    """How the matrices of a checkpoint are stored."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the tensors that make up one matrix."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of tensors that do not describe weights."""

    @property
    def name(self) -> str:
        """The ending that a decoded matrix has."""

    @classmethod
    def read(cls, fields: Fields, /) -> Self:
        """The format with the settings of config.json."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape of a decoded matrix. ValueError where its tensors do not fit together."""

    def integers(self, parts: Parts) -> Integers | None:
        """A matrix as it is stored; None where its values are no integers. ValueError where its tensors do not fit together."""

    def floats(self, parts: Parts) -> ScaledFloats | FourBitFloats | None:
        """A matrix as its FP8 or four-bit values; None where there are none. ValueError where its tensors do not fit."""

    def decode(self, parts: Parts) -> Tensor:
        """A matrix in floating point. ValueError where its tensors do not fit together."""


FORMATS: dict[str, type[Format]] = {
    "gptq": GPTQ, "awq": AWQ, "fp8": FP8, "fbgemm_fp8": FP8, "modelopt": FP8, "compressed-tensors": CompressedTensors,
    "mxfp4": MXFP4, "bitsandbytes": BitsAndBytes,
}  # fmt: skip


def format_in(directory: Path) -> Format | None:
    """The format of the weights in a directory, by its config.json or the file that older tools wrote beside it."""
    where = directory / "config.json"
    found = format_of(read_json(where), str(where))
    for name, method in _BESIDE.items():
        if found is None and (path := directory / name).exists():
            settings = read_json(path)
            settings = settings.get("quantization") or settings
            if not isinstance(settings, Mapping):
                raise ModelError(f"{path}: quantization must be an object, got {shown(settings)}")
            found = format_of({"quantization_config": {**settings, "quant_method": method}}, str(path))
    return found


def format_of(data: Mapping[str, Any], where: str) -> Format | None:
    """The format of the weights that a config.json describes; None where they are stored as they are."""
    for key in _KEYS:
        settings = data.get(key)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise ModelError(f"{where}: {key} must be an object, got {shown(settings)}")
        method = _method(settings, key)
        if not isinstance(method, str) or method not in FORMATS:
            raise ModelError(
                f"{where}: the weights are quantised with {shown(method)} ({key}), which is not read; "
                f"known: {', '.join(FORMATS)}; for others pass the unquantised model"
            )
        return FORMATS[method].read(Fields(settings, f"{where}: {key}"))
    return None


def _method(settings: Mapping[str, Any], key: str) -> Any:
    """The name of the method. Older configs of bitsandbytes and compressed-tensors leave it out."""
    if settings.get("quant_method"):
        return settings["quant_method"]
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if key == "compression_config" or "config_groups" in settings:
        return "compressed-tensors"
    return settings.get("quant_algo") or settings.get("quant_type") or settings.get("format") or "?"
