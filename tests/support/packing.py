"""Writers of quantised matrices, from what the formats' documentation says; and folders to read them back from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.model.formats import format_of
from outrider.model.source import QuantisedSource

__all__ = ["FOLDERS", "Quantised", "awq", "decoded", "gptq", "quantise", "write_quantised"]

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
        # matrices that read the same rows have one order, as in real files
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
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


def _gptq_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    matrix = quantise(*shape, 32, 4, seed, act_order=True)
    return {f".{name}": tensor for name, tensor in gptq(matrix, 4).items()}, matrix.matrix


def _awq_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    matrix = quantise(*shape, 32, 4, seed)
    return {f".{name}": tensor for name, tensor in awq(matrix).items()}, matrix.matrix


def _packed_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    matrix = quantise(*shape, 32, 4, seed)
    parts = {".weight_packed": _words(matrix.values.T, 4).T, ".weight_scale": matrix.scales, ".weight_shape": torch.tensor(shape)}
    return parts | {".weight_zero_point": _words(matrix.zeros, 4)}, matrix.matrix


def _int8_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    matrix = quantise(*shape, shape[1], 8, seed)
    values = (matrix.values - 128).to(torch.int8)
    return {".weight": values, ".weight_scale": matrix.scales}, values.float() * matrix.scales.float()


def _fp8_channel_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0], 1, generator=generator) / 300
    return {".weight": values, ".weight_scale": scales}, values.float() * scales


def _fp8_parts(shape: tuple[int, int], seed: int, block: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(shape, generator=generator) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // block), -(-shape[1] // block), generator=generator) / 300
    spread = scales.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]
    return {".weight": values, ".weight_scale_inv": scales}, values.float() * spread


def _nf4_parts(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """With a table of sixteen values of its own: the file says which."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 16, (shape[0] * shape[1] // 2, 2), generator=generator)
    table, absmax = torch.linspace(-1, 1, 16), torch.rand(shape[0] * shape[1] // 64, generator=generator) / 3
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}).encode()
    parts = {
        ".weight": (indices[:, :1] * 16 + indices[:, 1:]).to(torch.uint8),
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
    }
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    return parts, (table[indices].view(-1, 64) * absmax[:, None]).view(shape)


def _scheme(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


# What config.json says, and how a matrix is stored.
FOLDERS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], tuple[dict[str, Tensor], Tensor]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, _gptq_parts),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, _awq_parts),
    "w4a16": (_scheme(num_bits=4, strategy="group", group_size=32, symmetric=False), _packed_parts),
    "w8a8": (_scheme(num_bits=8, strategy="channel"), _int8_parts),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, _fp8_parts),
    "fp8_channel": (_scheme(num_bits=8, type="float", strategy="channel"), _fp8_channel_parts),
    "fp8_128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, partial(_fp8_parts, block=128)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4_parts),
}  # fmt: skip


def write_quantised(directory: Path, model: Any, kind: str) -> None:
    """A folder with a model whose layers' matrices are quantised; the model's weights become what they stand for."""
    settings, store = FOLDERS[kind]
    tensors: dict[str, Tensor] = {}
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        if tensor.dim() != 2 or ".layers." not in name:
            tensors[name] = tensor.clone()
            continue
        parts, matrix = store(tuple(tensor.shape), i)  # type: ignore[arg-type]
        tensor.copy_(matrix)
        tensors |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": settings, "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(config))


def decoded(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = "m.weight") -> Tensor:
    """A matrix that is written to a folder and read back, in float32 and with the shape that was announced."""
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": dict(settings)}))
    form = format_of({"quantization_config": dict(settings)}, "config.json")
    assert form is not None
    source = QuantisedSource(directory, form)
    matrix, floats = source.tensor(name), source.floats(name)
    assert floats is None or torch.equal(floats.values(), matrix)
    source.close()
    assert source.headers()[name].shape == tuple(matrix.shape)
    return matrix
