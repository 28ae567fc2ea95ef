"""bitsandbytes: NF4 and FP4 in blocks with a table of sixteen values, and int8 with a scale for each output.

A four-bit `weight` is a column of bytes, the first value in the high half. `absmax` is the scale of each block; it may be
quantised itself, with `nested_absmax`, `nested_quant_map` and an offset. The rest is JSON in bytes, `quant_state`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch import Tensor

from outrider.checks import shown
from outrider.errors import ModelError
from outrider.model.fields import Fields
from outrider.model.formats.bits import fields as bit_fields
from outrider.model.formats.parts import FLOATS, Parts, ceil_div

__all__ = ["BitsAndBytes"]

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_MAP, _ABSMAX, _NESTED, _NESTED_MAP = ".weight.quant_map", ".weight.absmax", ".weight.nested_absmax", ".weight.nested_quant_map"
_LARGEST_STATE = 2**16


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """There is nothing to set: each matrix says how it is quantised."""

    endings = (".weight", _ABSMAX, _MAP, _NESTED, _NESTED_MAP, *_STATES, ".SCB")
    ignored = (".weight_format",)
    name = ".weight"

    @classmethod
    def read(cls, _: Fields) -> BitsAndBytes:
        return cls()

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        if ".SCB" in parts:
            outputs, inputs = parts.shape(".weight", ("I8",))
            parts.require(".SCB", ("F32",), (outputs,))
            return outputs, inputs
        state = _state(parts)
        outputs, inputs = _sizes(state)
        parts.require(".weight", ("U8",), (ceil_div(outputs * inputs, 2), 1))
        parts.require(_MAP, ("F32",), (16,))
        parts.require(_ABSMAX, ("U8",) if _NESTED in parts else ("F32",), (_blocks(state, "blocksize", outputs * inputs),))
        if _NESTED in parts:
            parts.require(_NESTED, ("F32",), (_blocks(state, "nested_blocksize", parts.headers[_ABSMAX].shape[0]),))
            parts.require(_NESTED_MAP, FLOATS, (256,))
        return outputs, inputs

    def integers(self, parts: Parts) -> None:
        """Its values are no integers."""

    def floats(self, parts: Parts) -> None:
        """Its values are no FP8."""

    def decode(self, parts: Parts) -> Tensor:
        outputs, inputs = self.shape(parts)
        if ".SCB" in parts:
            return parts[".weight"].float() * (parts[".SCB"] / 127.0)[:, None]
        state, packed = _state(parts), parts[".weight"].flatten()
        indices = bit_fields(packed, 4).view(-1, 2).flip(1).flatten()[: outputs * inputs]
        scales = _absmax(parts, state).repeat_interleave(state.integer("blocksize", 1, 2**20))[: outputs * inputs]
        return (parts[_MAP][indices.int()] * scales).view(outputs, inputs)


def _absmax(parts: Parts, state: Fields) -> Tensor:
    """The scale of each block."""
    if _NESTED not in parts:
        return parts[_ABSMAX]
    codes = parts[_ABSMAX]
    scales = parts[_NESTED].repeat_interleave(state.integer("nested_blocksize", 1, 2**20))[: len(codes)]
    return parts[_NESTED_MAP].float()[codes.int()] * scales + state.real("nested_offset", -1e30, 1e30, 0.0)


def _state(parts: Parts) -> Fields:
    ending = next((state for state in _STATES if state in parts), None)
    if ending is None:
        raise ValueError(f"lacks {_STATES[0]!r}")
    (size,) = parts.shape(ending, ("U8",), 1)
    if size > _LARGEST_STATE:
        raise ValueError(f"has {ending!r} of {size} bytes")
    try:
        data = json.loads(bytes(parts[ending].tolist()))
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ValueError(f"has {ending!r} that is not a JSON object")
    return Fields(data, ending)


def _sizes(state: Fields) -> tuple[int, int]:
    shape = state.items("shape")
    if len(shape) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or not 0 < n < 2**31 for n in shape):
        raise ValueError(f"says that its shape is {shown(shape)}")
    return shape[0], shape[1]


def _blocks(state: Fields, name: str, values: int) -> int:
    try:
        return ceil_div(values, state.integer(name, 1, 2**20))
    except ModelError as error:
        raise ValueError(f"is described wrongly: {error}") from None
