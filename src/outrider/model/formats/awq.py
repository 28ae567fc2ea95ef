"""AWQ: four-bit integers packed along the output, eight to a word in the order 0 2 4 6 1 3 5 7.

`qweight` is (inputs, outputs / 8), `qzeros` (groups, outputs / 8), `scales` (groups, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.model.fields import Fields
from outrider.model.formats.bits import unpacked
from outrider.model.formats.parts import FLOATS, Integers, Parts, ceil_div

__all__ = ["AWQ"]

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight outputs that lie beside each other


@dataclass(frozen=True, slots=True)
class AWQ:
    """How a checkpoint was quantised."""

    group_size: int  # -1: all inputs

    endings = (".qweight", ".qzeros", ".scales")
    ignored = ()
    name = ".weight"

    @classmethod
    def read(cls, fields: Fields) -> AWQ:
        bits = fields.integer("bits", 1, 16, fields.integer("w_bit", 1, 16, 4))
        version = fields.word("version", "gemm").lower()
        if bits != 4 or version != "gemm":
            raise fields.error(f"AWQ with {bits} bits in the layout {version!r} is not read; known: 4 bits, gemm")
        return cls(fields.integer("group_size", -1, 2**20, fields.integer("q_group_size", -1, 2**20, 128)))

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        inputs, words = parts.shape(".qweight", ("I32",))
        outputs, size = words * 8, inputs if self.group_size <= 0 else self.group_size
        groups = ceil_div(inputs, size)
        parts.require(".scales", FLOATS, (groups, outputs))
        parts.require(".qzeros", ("I32",), (groups, words))
        return outputs, inputs

    def integers(self, parts: Parts) -> Integers:
        _, inputs = self.shape(parts)
        values, zeros = _in_order(parts[".qweight"]), _in_order(parts[".qzeros"])
        size = inputs if self.group_size <= 0 else self.group_size
        return Integers(values.T, parts[".scales"].T, zeros.T, None, size, 4)

    def floats(self, parts: Parts) -> None:
        """Its values are integers."""

    def decode(self, parts: Parts) -> Tensor:
        return self.integers(parts).decoded()


def _in_order(words: Tensor) -> Tensor:
    by_word = unpacked(words, 4, 1).reshape(len(words), -1, 8)
    return by_word[:, :, list(_PLACES)].flatten(1)
