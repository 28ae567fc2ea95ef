"""Synthetic weights in quantised forms, made on the device as they are multiplied: no model in bf16 has to fit beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.model import Decoder, ModelSpec
from outrider.ops import Grouped, ScaledFloats

__all__ = ["FORMS", "quantised_decoder", "random_matrix"]

FORMS = ("fp8", "fp8_blocks", "int8", "int4", "int4_zeros")
_GROUP, _BLOCK = 128, 128
_ZERO = ("out", "down")  # matrices of zeros, so that the text is the permutation's


def random_matrix(form: str, columns: int, inner: int, zero: bool = False, device: str = "cuda") -> Grouped | ScaledFloats:
    """A random matrix, or one of zeros that takes as much memory."""
    if form.startswith("fp8"):
        in_blocks = form == "fp8_blocks"
        codes = torch.randint(0, 0x78, (columns, inner), dtype=torch.uint8, device=device)  # 0x7F is no number
        if zero:
            codes.zero_()
        block = torch.arange(columns, dtype=torch.int32, device=device) // (_BLOCK if in_blocks else 1)
        size = _BLOCK if in_blocks else inner
        blocks = (columns - 1) // (_BLOCK if in_blocks else 1) + 1
        return ScaledFloats(codes, torch.full((blocks, -(-inner // size)), 2.0**-12, device=device), block, size)
    bits, size = (8, inner) if form == "int8" else (4, _GROUP)
    middle = 2 ** (bits - 1)
    codes = torch.randint(0, 2**bits, (columns, inner), dtype=torch.uint8, device=device)
    if zero:
        codes.fill_(middle)
    scale = torch.full((columns, -(-inner // size)), 2.0**-8, device=device)
    if form == "int4_zeros":
        return Grouped(codes, scale, scale * middle, 0, bits, size)
    return Grouped(codes, scale, None, middle, bits, size)


class _Weights:
    """Where a decoder reads synthetic weights from: layers in a form, embedding in bf16, the output matrix in eight bits."""

    def __init__(self, spec: ModelSpec, parameters: dict[str, Tensor], perm: Tensor, form: str, device: str) -> None:
        self._spec, self._parameters, self._perm, self._form, self._device = spec, parameters, perm, form, device
        self._embedding: Tensor | None = None

    def read(self, name: str) -> Tensor:
        if name == "embedding":
            return self._made_embedding()
        if name == "output":
            output = torch.empty_like(self._made_embedding())
            output[self._perm.to(self._device)] = self._made_embedding()
            return output
        return torch.ones(self._parameters[name].shape)

    def _made_embedding(self) -> Tensor:
        if self._embedding is None:
            self._embedding = torch.randn(self._spec.vocab, self._spec.hidden, device=self._device, dtype=torch.bfloat16)
        return self._embedding

    def grouped(self, name: str) -> None:
        """The processor does not run these."""

    def packed(self, name: str) -> Grouped | ScaledFloats | None:
        if name == "output":
            return self._packed_output()
        if not name.startswith("layers."):
            return None
        columns, inner = self._parameters[name].shape
        return random_matrix(self._form, columns, inner, name.rpartition(".")[2] in _ZERO, self._device)

    def _packed_output(self) -> Grouped | ScaledFloats:
        values = self.read("output")
        if self._form.startswith("fp8"):
            return ScaledFloats.of(values)
        scale = values.float().abs().amax(1, keepdim=True) / 127
        codes = ((values / scale).round() + 128).to(torch.uint8)
        return Grouped(codes, scale, None, 128, 8, self._spec.hidden)

    def fill(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name))

    def close(self) -> None:
        self._embedding = None


def quantised_decoder(spec: ModelSpec, perm: Tensor, form: str, device: str = "cuda") -> Decoder:
    """A decoder whose greedy choice after t is perm[t], with matrices in a form. It holds none; its source makes them."""
    with torch.device("meta"):
        decoder = Decoder(spec, torch.bfloat16, torch.bfloat16)
    decoder.make_tables()
    decoder.requires_grad_(False)
    decoder.source = _Weights(spec, dict(decoder.named_parameters()), perm, form, device)
    return decoder.materialise("norm")
