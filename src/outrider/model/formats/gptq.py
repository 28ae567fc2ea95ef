"""GPTQ: integers packed along the input, eight or four to a word, with a scale and a zero for each output and group of inputs.

`qweight` is (inputs / pack, outputs), `qzeros` (groups, outputs / pack), `scales` (groups, outputs). `g_idx` names the group of
each input where inputs were quantised in another order ("act-order"). Zeros are stored less one, except in the format gptq_v2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.model.fields import Fields
from outrider.model.formats.bits import unpacked
from outrider.model.formats.parts import FLOATS, Integers, Parts, ceil_div

__all__ = ["GPTQ"]

_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """How a checkpoint was quantised."""

    bits: int
    group_size: int  # -1: all inputs
    act_order: bool
    zeros_less_one: bool
    mixed: bool  # some matrices have settings of their own

    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    ignored = ()
    name = ".weight"

    @classmethod
    def read(cls, fields: Fields) -> GPTQ:
        bits, version = fields.integer("bits", 2, 8), fields.word("checkpoint_format", "gptq")
        if bits not in _BITS or version not in ("gptq", "gptq_v2"):
            raise fields.error(f"GPTQ with {bits} bits in the format {version!r} is not read; known: 2, 4, 8 and gptq, gptq_v2")
        group_size = fields.integer("group_size", -1, 2**20, 128)
        mixed = bool(fields.mapping("dynamic"))
        return cls(bits, group_size, fields.boolean("desc_act", False), version == "gptq", mixed)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        groups, outputs = parts.shape(".scales", FLOATS)
        words, of_words = parts.shape(".qweight", ("I32",))
        bits, inputs = self._bits(parts), words * 32 // self._bits(parts)
        if of_words != outputs or outputs * bits % 32:
            raise ValueError(f"has scales for {outputs} outputs and integers for {of_words}")
        parts.require(".qzeros", ("I32",), (groups, outputs * bits // 32))
        size = self._group_size(inputs, groups)
        if groups != ceil_div(inputs, size):
            raise ValueError(f"has {groups} groups; groups of {size} make {ceil_div(inputs, size)} of its {inputs} inputs")
        if ".g_idx" in parts:
            parts.require(".g_idx", ("I32", "I64"), (inputs,))
        elif self.act_order and groups > 1:
            raise ValueError("lacks '.g_idx', which desc_act needs")
        return outputs, inputs

    def integers(self, parts: Parts) -> Integers:
        _, inputs = self.shape(parts)
        bits, scales, zeros = self._bits(parts), parts[".scales"], parts[".qzeros"]
        if self.zeros_less_one:
            zeros = zeros + _ones(bits)  # in the words, as the writers subtract it: what overflows a field carries on
        values = unpacked(parts[".qweight"], bits, 0).T
        size, group_of = self._group_size(inputs, len(scales)), parts.get(".g_idx")
        if group_of is not None and torch.equal(group_of.long(), torch.arange(inputs) // size):
            group_of = None
        return Integers(values, scales.T, unpacked(zeros, bits, 1).T, group_of, size, bits)

    def floats(self, parts: Parts) -> None:
        """Its values are integers."""

    def decode(self, parts: Parts) -> Tensor:
        return self.integers(parts).decoded()

    def _bits(self, parts: Parts) -> int:
        """Bits of this matrix: those of the settings, or as the shapes say where matrices differ."""
        if not self.mixed:
            return self.bits
        outputs, words = parts.shape(".scales", FLOATS)[1], parts.shape(".qzeros", ("I32",))[1]
        bits = words * 32 // outputs
        if bits not in _BITS:
            raise ValueError(f"has {words} words of zeros for {outputs} outputs")
        return bits

    def _group_size(self, inputs: int, groups: int) -> int:
        if self.mixed:
            return ceil_div(inputs, groups)
        return inputs if self.group_size <= 0 else self.group_size


def _ones(bits: int) -> Tensor:
    """One in every field of a word."""
    word = sum(1 << at for at in range(0, 32, bits))
    return torch.tensor(word, dtype=torch.int64).to(torch.int32)
