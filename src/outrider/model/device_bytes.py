"""How many bytes the weights of a layer take on a GPU: known from headers, before anything is loaded."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from outrider.gguf import Gguf, find_gguf
from outrider.model.files import Header, stored_tensors
from outrider.model.formats import format_in
from outrider.model.formats.awq import AWQ
from outrider.model.formats.compressed_tensors import CompressedTensors
from outrider.model.formats.fp8 import FP8
from outrider.model.formats.gptq import GPTQ
from outrider.model.spec import ModelSpec

__all__ = ["with_layer_bytes"]

_KEPT = (AWQ, CompressedTensors, FP8, GPTQ)  # formats that products take as they are stored; others are decoded
# Bytes of a weight: codes of four bits or a byte, and the scales and values of their groups.
_GGUF = {
    "Q4_0": 0.5625, "Q4_1": 0.6875, "Q2_K": 1.0, "Q3_K": 0.75, "Q4_K": 0.75, "Q8_0": 1.0625, "Q5_0": 1.0625, "Q5_1": 1.1875,
    "Q5_K": 1.25, "Q6_K": 1.25, "IQ4_NL": 1.0625, "IQ4_XS": 1.125,
}  # fmt: skip
_DECODED = 2.0


def with_layer_bytes(spec: ModelSpec, directory: Path) -> ModelSpec:
    """A spec that says what a weight of its layers takes, where they are stored quantised and served so."""
    weights = sum(layer.parameters(spec.hidden) for layer in spec.layers)
    stored = 0.0
    if (gguf := find_gguf(directory)) is not None:
        for name, tensor in Gguf(gguf).tensors.items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                count = tensor.nbytes / tensor.kind.nbytes * tensor.kind.values
                stored += count * _GGUF.get(tensor.kind.name, _DECODED)
    elif isinstance(format_in(directory), _KEPT):
        stored = sum(_bytes(header) for name, header in stored_tensors(directory).items() if ".layers." in name)
    return replace(spec, layer_bytes=min(stored / weights, _DECODED)) if stored and weights else spec


def _bytes(header: Header) -> float:
    """Of a tensor whose dtype is named as safetensors does: F8_E4M3, I32, ..."""
    bits = re.match(r"[A-Z]+(\d+)", header.dtype)
    return math.prod(header.shape) * (int(bits[1]) if bits else 8) / 8
