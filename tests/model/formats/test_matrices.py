"""Matrices of quantised checkpoints against the formats' own libraries, bit for bit; GPTQ and AWQ against their documentation.

Every matrix is written to a safetensors file and read back through the source that serves models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.packing import awq, decoded, gptq, quantise

ODD = [(8, 32), (40, 96), (24, 104)]  # of groups of 32, the last has a smaller one


def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"m.{ending}": tensor for ending, tensor in tensors.items()}


@pytest.mark.parametrize("bits", [4, 8, 2])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (48, 96)])
def test_gptq(tmp_path: Path, bits: int, version: str, act_order: bool, shape: tuple[int, int]) -> None:
    matrix = quantise(*shape, 32, bits, act_order=act_order)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order, "checkpoint_format": version}
    tensors = gptq(matrix, bits, less_one=version == "gptq")
    assert torch.equal(decoded(tmp_path, settings, named(tensors)), matrix.matrix)


@pytest.mark.parametrize("size", [-1, 32])
def test_gptq_without_a_list_of_groups(tmp_path: Path, size: int) -> None:
    matrix = quantise(32, 80, 80 if size < 0 else size, 4)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False}
    assert torch.equal(decoded(tmp_path, settings, named(gptq(matrix, 4, with_groups=False))), matrix.matrix)


def test_gptq_with_settings_of_their_own(tmp_path: Path) -> None:
    """`dynamic` gives some matrices other settings; their shapes tell which."""
    matrix = quantise(32, 64, 16, 8)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*m": {"bits": 8, "group_size": 16}}}
    assert torch.equal(decoded(tmp_path, settings, named(gptq(matrix, 8))), matrix.matrix)


@pytest.mark.parametrize("settings", [{"bits": 4, "group_size": 32}, {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}])
@pytest.mark.parametrize("shape", ODD)
def test_awq(tmp_path: Path, settings: dict[str, Any], shape: tuple[int, int]) -> None:
    matrix = quantise(*shape, 32, 4)
    got = decoded(tmp_path, {"quant_method": "awq"} | settings, named(awq(matrix)))
    assert torch.equal(got, matrix.matrix)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (128, 130)])
def test_fp8_by_blocks(tmp_path: Path, shape: tuple[int, int]) -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) / 100
    want = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    got = decoded(tmp_path, settings, {"m.weight": weight, "m.weight_scale_inv": scales})
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(), (1,), (24, 1), (24,)])
def test_fp8_per_tensor_and_per_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = (torch.randn(24, 40) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) / 100
    want = Fp8Dequantize(None)._dequantize_one(weight, scale.view(-1, 1))
    tensors = {"m.weight": weight, "m.weight_scale": scale, "m.input_scale": torch.ones(1), "m.k_scale": torch.ones(1)}
    assert torch.equal(decoded(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, tensors), want)


def test_mxfp4_experts(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 20, 5, 16), dtype=torch.uint8)
    scales = torch.randint(2, 250, (3, 20, 5), dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales)
    tensors = {
        "experts.down_proj_blocks": blocks,
        "experts.down_proj_scales": scales,
        "experts.down_proj_bias": torch.ones(3, 20),
    }
    got = decoded(tmp_path, {"quant_method": "mxfp4"}, tensors, "experts.down_proj")
    assert torch.equal(got.bfloat16(), want)
    assert got.shape == (3, 160, 20)


COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8 rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 whole": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8 zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 groups": ("naive-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int4 rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 rows, zeros": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int2 packed": ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 32, "symmetric": False}),
    "fp8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 whole": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 blocks": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def scale_shape(args: dict[str, Any], shape: tuple[int, int]) -> tuple[int, ...]:
    if args["strategy"] in ("group", "tensor_group"):
        return shape[0], shape[1] // args["group_size"]
    if args["strategy"] == "block":
        return -(-shape[0] // args["block_structure"][0]), -(-shape[1] // args["block_structure"][1])
    return (shape[0], 1) if args["strategy"] == "channel" else (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("shape", [(24, 96), (37, 160)])
def test_compressed_tensors(tmp_path: Path, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the oracle")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form, args = COMPRESSED[kind]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    bits, generator = args["num_bits"], torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    scale = (torch.rand(scale_shape(args, shape), generator=generator) / 2**bits + 0.01).to(dtype)
    state = {"weight": weight, "weight_scale": scale}
    if kind == "mxfp4":
        state["weight_scale"] = torch.exp2(torch.randint(-6, 2, scale.shape, generator=generator).float()).to(dtype)
    if kind == "nvfp4":
        state["weight_global_scale"] = torch.tensor([37.5])
        state["weight_scale"] = scale * 300
    if not args.get("symmetric", True):
        low = -(2 ** (bits - 1))
        state["weight_zero_point"] = torch.randint(low, -low, scale.shape, generator=generator, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    want = compressor.decompress(stored, scheme)["weight"]

    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json")}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    got = decoded(tmp_path, settings, named({name: torch.as_tensor(tensor) for name, tensor in stored.items()}))
    assert torch.equal(got.to(want.dtype), want)


def test_compressed_tensors_in_another_order(tmp_path: Path) -> None:
    """Groups of columns that lie apart, which writers no longer make and older files have."""
    matrix = quantise(40, 96, 32, 4, act_order=True)
    packed = gptq(matrix._replace(values=matrix.values), 4)["qweight"].T.contiguous()  # packs inputs too, from low bits on
    zeros = gptq(matrix._replace(zeros=matrix.zeros), 4, less_one=False)["qzeros"].T.contiguous()
    tensors = {"weight_packed": packed, "weight_scale": matrix.scales, "weight_zero_point": zeros}
    tensors |= {"weight_shape": torch.tensor([40, 96]), "weight_g_idx": matrix.group_of.int()}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    assert torch.equal(decoded(tmp_path, settings | {"format": "pack-quantized"}, named(tensors)), matrix.matrix)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(24, 64), (37, 65)])
def test_bitsandbytes_four_bits(tmp_path: Path, kind: str, nested: bool, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the oracle")
    packed, state = functional.quantize_4bit(torch.randn(shape), blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"m.weight": packed} | {f"m.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    got = decoded(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)
    assert torch.equal(got, functional.dequantize_4bit(packed, state))


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the oracle")
    quantised, scales, _ = functional.int8_vectorwise_quant(torch.randn(24, 64).half())
    tensors = {"m.weight": quantised, "m.SCB": scales, "m.weight_format": torch.zeros((), dtype=torch.uint8)}
    got = decoded(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors)
    torch.testing.assert_close(got, functional.int8_vectorwise_dequant(quantised, scales), rtol=1e-6, atol=0)
