"""Writers of quantised matrices, from what the formats' documentation says; and folders to read them back from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.model.formats import format_of
from outrider.model.source import QuantisedSource

__all__ = ["Quantised", "awq", "decoded", "gptq", "quantise"]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns, those that lie in a word from its low end


class Quantised(NamedTuple):
    """Integers from 0 with the scales and zeros of their groups, and what they stand for."""

    values: Tensor  # (outputs, inputs)
    scales: Tensor  # (outputs, groups)
    zeros: Tensor  # (outputs, groups)
    group_of: Tensor  # (inputs,)

    @property
    def matrix(self) -> Tensor:
        return (self.values - self.zeros[:, self.group_of]).float() * self.scales.float()[:, self.group_of]


def quantise(outputs: int, inputs: int, size: int, bits: int, seed: int = 0, act_order: bool = False) -> Quantised:
    """A random matrix. Zeros are from 1 on, as the older writers of GPTQ need."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // size)
    group_of = torch.arange(inputs) // size
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    values = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 2**bits, (outputs, groups), generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) * 2.0 ** (1 - bits) / inputs**0.5 + 1e-3).half()
    return Quantised(values, scales, zeros, group_of)


def gptq(matrix: Quantised, bits: int, less_one: bool = True, with_groups: bool = True) -> dict[str, Tensor]:
    """qweight packs inputs and qzeros outputs, the first in the lowest bits; the older format subtracts one from zeros."""
    zeros = matrix.zeros - int(less_one)
    tensors = {
        "qweight": _words(matrix.values.T, bits),
        "qzeros": _words(zeros, bits).T.contiguous(),
        "scales": matrix.scales.T.contiguous(),
    }
    return tensors | ({"g_idx": matrix.group_of.int()} if with_groups else {})


def awq(matrix: Quantised) -> dict[str, Tensor]:
    """qweight and qzeros pack outputs in AWQ's order."""
    return {
        "qweight": _awq_words(matrix.values.T),
        "qzeros": _awq_words(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }


def _words(values: Tensor, bits: int) -> Tensor:
    """Along the first dimension, from the lowest bits on."""
    by_word = values.unflatten(0, (-1, 32 // bits))
    shifts = torch.arange(0, 32, bits)[:, None]
    return _int32((by_word << shifts).sum(1))


def _awq_words(values: Tensor) -> Tensor:
    by_word = values.unflatten(1, (-1, 8))
    words = sum(by_word[..., column] << (4 * place) for place, column in enumerate(_AWQ_ORDER))
    return _int32(words)  # type: ignore[arg-type]


def _int32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def decoded(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = "m.weight") -> Tensor:
    """A matrix that is written to a folder and read back, in float32 and with the shape that was announced."""
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": dict(settings)}))
    form = format_of({"quantization_config": dict(settings)}, "config.json")
    assert form is not None
    source = QuantisedSource(directory, form)
    matrix = source.tensor(name)
    source.close()
    assert source.headers()[name].shape == tuple(matrix.shape)
    return matrix
