"""FP8 (e4m3) matrices with scales: one, one for each output, or one for each block of 128 x 128.

Checkpoints of Qwen and DeepSeek call the scales of blocks `weight_scale_inv`; they are multiplied all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.checks import shown
from outrider.model.fields import Fields
from outrider.model.formats.parts import FLOATS, Parts, block_scaled, ceil_div
from outrider.ops import ScaledFloats

__all__ = ["FP8", "scale_block"]

_SCALES = (*FLOATS, "F8_E8M0")


@dataclass(frozen=True, slots=True)
class FP8:
    """How a checkpoint was quantised."""

    block: tuple[int, int] | None

    endings = (".weight", ".weight_scale_inv", ".weight_scale")
    ignored = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".kv_scale", ".q_scale")
    name = ".weight"

    @classmethod
    def read(cls, fields: Fields) -> FP8:
        algorithm = fields.word("quant_algo", "FP8").upper()  # of ModelOpt
        if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN") or fields.word("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise fields.error(f"FP8 of the kind {algorithm} {fields.word('fmt', 'e4m3')} is not read; known: FP8 e4m3")
        block = fields.items("weight_block_size")
        if block and (len(block) != 2 or any(not isinstance(n, int) or not 0 < n <= 2**20 for n in block)):
            raise fields.error(f"weight_block_size must be two sizes, got {shown(block)}")
        return cls((block[0], block[1]) if block else None)

    def shape(self, parts: Parts) -> tuple[int, int]:
        """(outputs, inputs)"""
        outputs, inputs = parts.shape(".weight", ("F8_E4M3",))
        scale_block(parts, self._scale(parts), (outputs, inputs), self.block, _SCALES)
        return outputs, inputs

    def integers(self, parts: Parts) -> None:
        """Its values are no integers."""

    def floats(self, parts: Parts) -> ScaledFloats:
        scales, block = self._scales(parts)
        return ScaledFloats.stored(parts[".weight"], scales, block)

    def decode(self, parts: Parts) -> Tensor:
        scales, block = self._scales(parts)
        return block_scaled(parts[".weight"], scales, block)

    def _scales(self, parts: Parts) -> tuple[Tensor, tuple[int, int]]:
        """A scale for each block, and the rows and columns of a block."""
        shape, ending = self.shape(parts), self._scale(parts)
        block = scale_block(parts, ending, shape, self.block, _SCALES)
        return parts[ending].float().reshape(ceil_div(shape[0], block[0]), ceil_div(shape[1], block[1])), block

    def _scale(self, parts: Parts) -> str:
        return ".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"


def scale_block(
    parts: Parts, ending: str, shape: tuple[int, int], block: tuple[int, int] | None, dtypes: tuple[str, ...]
) -> tuple[int, int]:
    """The rows and columns that share a scale: the settings' block; else all or one row, by how many scales there are."""
    stored = parts.shape(ending, dtypes, None)
    outputs, inputs = shape
    if block is not None and stored == (ceil_div(outputs, block[0]), ceil_div(inputs, block[1])):
        return block
    if block is None and stored in ((), (1,), (1, 1)):
        return outputs, inputs
    if block is None and stored in ((outputs,), (outputs, 1)):
        return 1, inputs
    wanted = "one scale, or one for each row" if block is None else f"scales for blocks of {list(block)}"
    raise ValueError(f"of shape {list(shape)} has {ending!r} of shape {list(stored)}; {wanted} are needed")
