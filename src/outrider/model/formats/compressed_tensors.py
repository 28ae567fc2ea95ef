"""compressed-tensors: int8 and FP8 matrices, and integers of 2 to 8 bits packed along the input, with scales for outputs,
groups, blocks or all; FP4 with groups of 16 (NVFP4) or 32 (MXFP4).

The settings have one scheme, or several for different matrices. A matrix is read by the first one that its tensors fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.checks import shown
from outrider.model.fields import Fields
from outrider.model.formats.bits import E2M1, fields, unpacked
from outrider.model.formats.fp8 import scale_block
from outrider.model.formats.mxfp4 import powers_of_two
from outrider.model.formats.parts import FLOATS, Integers, Parts, block_scaled, ceil_div
from outrider.ops import ScaledFloats

__all__ = ["CompressedTensors"]

_REFUSED = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask", "mxfp6-pack-quantized", "mxfp8-quantized")
_SCALE, _ZERO, _GROUP_OF, _PACKED, _SHAPE, _GLOBAL = (
    ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_packed", ".weight_shape", ".weight_global_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some matrices were quantised."""

    bits: int
    kind: str  # int or float
    group_size: int  # 0: no groups
    block: tuple[int, int] | None
    symmetric: bool
    act_order: bool

    @classmethod
    def read(cls, f: Fields, act_order: bool) -> Scheme:
        strategy, block = f.word("strategy", "group" if "group_size" in f else "tensor"), f.items("block_structure")
        if strategy == "block" and (len(block) != 2 or any(not isinstance(n, int) or not 0 < n <= 2**20 for n in block)):
            raise f.error(f"block_structure must be two sizes, got {shown(block)}")
        grouped = strategy in ("group", "tensor_group")
        return cls(
            bits=f.integer("num_bits", 1, 16, 8),
            kind=f.word("type", "int"),
            group_size=f.integer("group_size", 1, 2**20) if grouped else 0,
            block=(block[0], block[1]) if strategy == "block" else None,
            symmetric=f.boolean("symmetric", True),
            act_order=act_order,
        )

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        if _PACKED not in parts:
            return self._plain_shape(parts)
        return self._fp4_shape(parts) if self.kind == "float" else self._packed_shape(parts)

    def decode(self, parts: Parts) -> Tensor:
        shape = self.shape(parts)
        if _PACKED not in parts:
            return self._decode_plain(parts, shape)
        return self._decode_fp4(parts) if self.kind == "float" else self._packed_integers(parts, shape).decoded()

    def integers(self, parts: Parts) -> Integers | None:
        shape = self.shape(parts)
        if self.kind != "int":
            return None
        if _PACKED in parts:
            return self._packed_integers(parts, shape)
        if self.group_size or _ZERO in parts or scale_block(parts, _SCALE, shape, self.block, FLOATS) != (1, shape[1]):
            return None
        scales = parts[_SCALE].reshape(-1, 1)
        return Integers(parts[".weight"].short() + 128, scales, scales.new_full(scales.shape, 128), None, shape[1], 8)

    def floats(self, parts: Parts) -> ScaledFloats | None:
        shape = self.shape(parts)
        if self.kind != "float" or _PACKED in parts or self.group_size:
            return None
        block = scale_block(parts, _SCALE, shape, self.block, FLOATS)
        blocks = (ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1]))
        return ScaledFloats.stored(parts[".weight"], parts[_SCALE].float().reshape(blocks), block)

    def _plain_shape(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.shape(".weight", ("I8",) if self.kind == "int" else ("F8_E4M3",))
        if self.group_size:
            parts.require(_SCALE, FLOATS, (outputs, ceil_div(inputs, self.group_size)))
        else:
            scale_block(parts, _SCALE, (outputs, inputs), self.block, FLOATS)
        if _ZERO in parts:
            parts.require(_ZERO, ("I8", "F8_E4M3"), parts.headers[_SCALE].shape)
        elif not self.symmetric:
            raise ValueError(f"lacks {_ZERO!r}, and its settings say that it is not symmetric")
        self._check_order(parts, inputs)
        return outputs, inputs

    def _decode_plain(self, parts: Parts, shape: tuple[int, int]) -> Tensor:
        values, scales = parts[".weight"], parts[_SCALE]
        zeros = parts[_ZERO] if _ZERO in parts and self.kind == "int" else None
        if self.group_size:
            return Integers(values, scales, zeros, self._group_of(parts), self.group_size).decoded()
        block = scale_block(parts, _SCALE, shape, self.block, FLOATS)
        blocks = (ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1]))
        if zeros is not None:
            values = values.float() - block_scaled(values.new_ones(shape), zeros.float().reshape(blocks), block)
        return block_scaled(values, scales.float().reshape(blocks), block)

    def _packed_shape(self, parts: Parts) -> tuple[int, int]:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"is packed with {self.bits} bits; known: 2, 4 and 8")
        outputs, words = parts.shape(_PACKED, ("I32",))
        inputs = words * 32 // self.bits
        if _SHAPE in parts:
            parts.require(_SHAPE, ("I64", "I32"), (2,))
            stored = parts[_SHAPE].tolist()
            if stored[0] != outputs or not 0 < stored[1] <= inputs or ceil_div(stored[1] * self.bits, 32) != words:
                raise ValueError(f"says that its shape is {stored}, and has {[outputs, words]} words of {self.bits} bits")
            inputs = stored[1]
        groups = ceil_div(inputs, self.group_size) if self.group_size else 1
        if parts.shape(_SCALE, FLOATS, None) not in ((outputs, groups), *(((outputs,),) if groups == 1 else ())):
            raise ValueError(f"has scales of shape {list(parts.headers[_SCALE].shape)}; {[outputs, groups]} is needed")
        if not self.symmetric:
            parts.require(_ZERO, ("I32",), (ceil_div(outputs * self.bits, 32), groups))
        self._check_order(parts, inputs)
        return outputs, inputs

    def _packed_integers(self, parts: Parts, shape: tuple[int, int]) -> Integers:
        outputs, inputs = shape
        middle = 2 ** (self.bits - 1)
        values = unpacked(parts[_PACKED], self.bits, 1)[:, :inputs]
        zeros = None if self.symmetric else unpacked(parts[_ZERO], self.bits, 0)[:outputs]  # both less the middle
        scales = parts[_SCALE].reshape(outputs, -1)
        if zeros is None:
            zeros = scales.new_full(scales.shape, middle)
        return Integers(values, scales, zeros, self._group_of(parts), self.group_size or inputs, self.bits)

    def _fp4_shape(self, parts: Parts) -> tuple[int, int]:
        outputs, packed = parts.shape(_PACKED, ("U8",))
        inputs, size = 2 * packed, self.group_size
        if self.bits != 4 or size not in (16, 32) or inputs % size:
            raise ValueError(f"has {inputs} inputs of {self.bits} bits in groups of {size}; FP4 with groups of 16 or 32 is read")
        parts.require(_SCALE, ("U8",) if size == 32 else ("F8_E4M3",), (outputs, inputs // size))
        if size == 16:
            parts.shape(_GLOBAL, ("F32",), None)
            if parts.headers[_GLOBAL].shape not in ((), (1,)):
                raise ValueError(f"has several of {_GLOBAL!r}")
        return outputs, inputs

    def _decode_fp4(self, parts: Parts) -> Tensor:
        values = E2M1[fields(parts[_PACKED], 4).int()]
        scales = parts[_SCALE].float() / parts[_GLOBAL] if self.group_size == 16 else powers_of_two(parts[_SCALE])
        return Integers(values, scales, None, None, self.group_size).decoded()

    def _check_order(self, parts: Parts, inputs: int) -> None:
        if _GROUP_OF in parts:
            parts.require(_GROUP_OF, ("I32", "I64"), (inputs,))
        elif self.act_order and self.group_size:
            raise ValueError(f"lacks {_GROUP_OF!r}, which its act-order needs")

    def _group_of(self, parts: Parts) -> Tensor | None:
        """The group of each input. A list of -1 is what writers leave where inputs were not reordered."""
        group_of = parts.get(_GROUP_OF)
        return None if group_of is None or bool((group_of == -1).all()) else group_of


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """How a checkpoint was quantised."""

    schemes: tuple[Scheme, ...]

    endings = (".weight", _PACKED, _SCALE, _ZERO, _GROUP_OF, _SHAPE, _GLOBAL)
    ignored = (
        ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
        ".q_scale", ".k_zero_point", ".v_zero_point",
    )  # fmt: skip
    name = ".weight"

    @classmethod
    def read(cls, f: Fields) -> CompressedTensors:
        formats = [f.word("format", "dense")]
        schemes = []
        for name, group in f.mapping("config_groups").items():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                nested = f.nested("config_groups").nested(name)
                # columns of a group lie apart with "group"; with the other orders they do not
                schemes.append(Scheme.read(nested.nested("weights"), weights.get("actorder") in (True, "group")))
                formats.append(nested.word("format", "dense"))
        for refused in formats:
            if refused in _REFUSED:
                raise f.error(f"the format {refused!r} of compressed-tensors is not read; pass the unquantised model")
        if not schemes:
            raise f.error("config_groups names no weights")
        return cls(tuple(schemes))

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        return self._scheme(parts).shape(parts)

    def decode(self, parts: Parts) -> Tensor:
        return self._scheme(parts).decode(parts)

    def integers(self, parts: Parts) -> Integers | None:
        return self._scheme(parts).integers(parts)

    def floats(self, parts: Parts) -> ScaledFloats | None:
        return self._scheme(parts).floats(parts)

    def _scheme(self, parts: Parts) -> Scheme:
        reasons = []
        for scheme in self.schemes:
            try:
                scheme.shape(parts)
            except ValueError as error:
                reasons.append(str(error))
            else:
                return scheme
        raise ValueError("; or ".join(dict.fromkeys(reasons)))
