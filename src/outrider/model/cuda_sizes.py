"""How many bytes a model's weights take on the device, found from samples before they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.model.cuda_weights import Upload
from outrider.model.decoder import Decoder
from outrider.model.placement import Widths
from outrider.ops import Grouped

__all__ = ["widths_of"]

_SAMPLE_ROWS = 128  # of what is rounded at load
_ROUNDED = {"int8": "int8", "int4": "int8", "fp8": "fp8"}  # what the output matrix is rounded to
_PRODUCTS = ("qkv", "gate_up", "down")


def widths_of(decoder: Decoder) -> Widths:
    """Bytes for each weight of the layers and of the output matrix, in the forms in which the GPU holds them."""
    spec = decoder.spec
    plain = torch.float32 if spec.dtype == "float32" else torch.bfloat16
    if spec.dtype in _ROUNDED:
        if spec.expert_layers:  # experts are held in bf16
            return Widths(plain.itemsize, _rounded(spec.hidden, _ROUNDED[spec.dtype]))
        return Widths(_rounded(spec.hidden, spec.dtype), _rounded(spec.hidden, _ROUNDED[spec.dtype]))
    output = decoder.packed("embedding" if decoder.output is None else "output")
    return Widths(_of_layers(decoder, plain), None if output is None else _width([output], plain))


def _of_layers(decoder: Decoder, plain: torch.dtype) -> float:
    """The widest of the first, the middle and the last layer: formats mix precisions."""
    depth = decoder.spec.depth
    return max(_of_layer(decoder, index, plain) for index in sorted({0, depth // 2, depth - 1}))


def _of_layer(decoder: Decoder, index: int, plain: torch.dtype) -> float:
    layer = decoder.layers[index]
    stored = [decoder.packed(f"layers.{index}.{name}") for name in _PRODUCTS if layer.is_product(name)]  # type: ignore[operator]
    if len(stored) < len(_PRODUCTS) or any(matrix is None for matrix in stored):
        return plain.itemsize
    return _width(stored, plain)


def _width(stored: Sequence[object], plain: torch.dtype) -> float:
    """Bytes for each weight of matrices that are stored in integers or FP8, as the device holds them."""
    upload = Upload(torch.device("cpu"), plain)
    held = weights = 0
    for matrix in stored:
        made = upload.matrix(matrix)  # type: ignore[arg-type]
        held += sum(tensor.nbytes for tensor in made.tensors)
        weights += made.shape[0] * made.shape[1]
    return held / weights


def _rounded(inner: int, kind: str) -> float:
    """Bytes for each weight of what is rounded at load."""
    sample: Tensor | Grouped = torch.ones(_SAMPLE_ROWS, inner)
    made = Upload(torch.device("cpu"), torch.bfloat16, kind).matrix(sample)
    return sum(tensor.nbytes for tensor in made.tensors) / (_SAMPLE_ROWS * inner)
