"""Quantised matrices whose tensors do not fit together: a ModelError that names the file and the matrix."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.formats import format_in, format_of
from tests.support.packing import FOLDERS, decoded

SHAPE = (64, 96)
NEEDED = {
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "awq": (".qweight", ".qzeros", ".scales"),
    "w4a16": (".weight_packed", ".weight_scale", ".weight_zero_point"),
    "w8a8": (".weight", ".weight_scale"),
    "fp8": (".weight", ".weight_scale_inv"),
    "nf4": (".weight", ".weight.absmax", ".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
}
MISSING = [(kind, part) for kind, parts in NEEDED.items() for part in parts]

# These fit together: they are a matrix of another shape.
ANOTHER_MATRIX = {
    ("awq", ".qweight", "shorter"), ("fp8", ".weight", "shorter"), ("fp8", ".weight", "narrower"),
    ("w8a8", ".weight", "narrower"),
}  # fmt: skip


def stored(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, store = FOLDERS[kind]
    return deepcopy(config), {f"layer.m{ending}": part for ending, part in store(SHAPE, 0)[0].items()}


def refused(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], message: str = "") -> None:
    with pytest.raises(ModelError, match=rf"model\.safetensors.*'layer\.m.*{message}") as caught:
        decoded(tmp_path, config, tensors, "layer.m.weight")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_matrices_themselves_are_read(tmp_path: Path, kind: str) -> None:
    assert decoded(tmp_path, *stored(kind), "layer.m.weight").shape == SHAPE


@pytest.mark.parametrize(("kind", "part"), MISSING)
def test_a_missing_part(tmp_path: Path, kind: str, part: str) -> None:
    config, tensors = stored(kind)
    del tensors["layer.m" + part]
    refused(tmp_path, config, tensors)


@pytest.mark.parametrize(("kind", "part"), MISSING)
@pytest.mark.parametrize("change", ["shorter", "narrower", "flat", "int16", "float64"])
def test_a_part_of_another_shape_or_dtype(tmp_path: Path, kind: str, part: str, change: str) -> None:
    config, tensors = stored(kind)
    tensor = tensors["layer.m" + part]
    changed = {
        "shorter": lambda: tensor[:-1], "narrower": lambda: tensor[..., :-1], "flat": lambda: tensor.flatten()[:3],
        "int16": lambda: tensor.to(torch.int16), "float64": lambda: tensor.double(),
    }[change]()  # fmt: skip
    tensors["layer.m" + part] = changed
    if (kind, part, change) in ANOTHER_MATRIX:
        assert decoded(tmp_path, config, tensors, "layer.m.weight").shape != SHAPE  # which the loader compares with config.json
    else:
        refused(tmp_path, config, tensors)


@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16"])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_a_wrong_group_size(tmp_path: Path, kind: str, size: int) -> None:
    config, tensors = stored(kind)
    if kind == "w4a16":
        config["config_groups"] = {"g": {"weights": config["config_groups"]["group_0"]["weights"] | {"group_size": size}}}
    refused(tmp_path, config | ({} if kind == "w4a16" else {"group_size": size}), tensors)


@pytest.mark.parametrize("bits", [2, 8])
def test_wrong_bits(tmp_path: Path, bits: int) -> None:
    config, tensors = stored("gptq")
    refused(tmp_path, config | {"bits": bits}, tensors)


def test_act_order_without_groups(tmp_path: Path) -> None:
    config, tensors = stored("gptq")
    del tensors["layer.m.g_idx"]
    refused(tmp_path, config, tensors, "lacks '.g_idx', which desc_act needs")
    config, tensors = stored("w4a16")
    config["config_groups"]["group_0"] = {"weights": config["config_groups"]["group_0"]["weights"] | {"actorder": "group"}}
    refused(tmp_path, config, tensors, "lacks '.weight_g_idx', which its act-order needs")


@pytest.mark.parametrize("group", [-1, 3, 2**31 - 1])
def test_groups_that_do_not_exist(tmp_path: Path, group: int) -> None:
    config, tensors = stored("gptq")
    tensors["layer.m.g_idx"][5] = group
    refused(tmp_path, config, tensors, "columns in groups beyond the 3 that have scales")


@pytest.mark.parametrize(
    "state", [b"", b"{", b"[]", b'{"shape": [64, 96]}', b'{"blocksize": 64}', b'{"blocksize": 0, "shape": [64, 96]}']
)
def test_a_quant_state_that_is_none(tmp_path: Path, state: bytes) -> None:
    config, tensors = stored("nf4")
    tensors["layer.m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    refused(tmp_path, config, tensors)


def test_a_shape_beyond_what_is_packed(tmp_path: Path) -> None:
    config, tensors = stored("w4a16")
    for shape in ([64, 97], [65, 96], [64, -96], [64, 2**62]):
        refused(tmp_path, config, tensors | {"layer.m.weight_shape": torch.tensor(shape)}, "says that its shape is")


def test_a_matrix_that_is_stored_twice(tmp_path: Path) -> None:
    config, tensors = stored("gptq")
    refused(tmp_path, config, tensors | {"layer.m.weight": torch.ones(SHAPE)}, "both quantised and in floating point")


def test_a_tensor_that_is_no_part(tmp_path: Path) -> None:
    config, tensors = stored("awq")
    refused(
        tmp_path, config, tensors | {"layer.m.other": torch.ones(3, dtype=torch.int32)}, "stored as I32, which is no part of AWQ"
    )


VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 10**30, 1e308, float("nan"), "", "x", "re:(", [], [None], [0, 0], [128, 128], [-1, 1], {},
    {"a": None}, {"group_0": None}, {"group_0": {"weights": None}}, {"weights": {"num_bits": [4]}},
]  # fmt: skip
NAMES = [
    "quant_method", "bits", "group_size", "desc_act", "sym", "version", "format", "config_groups", "ignore", "kv_cache_scheme",
    "sparsity_config", "activation_scheme", "weight_block_size", "modules_to_not_convert", "modules_in_block_to_quantize",
    "bnb_4bit_quant_type", "llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "zero_point", "dynamic", "checkpoint_format",
]  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_settings_of_any_value(tmp_path: Path, kind: str) -> None:
    """Any value of any setting: the matrix comes out, or a ModelError."""
    config, tensors = stored(kind)
    for name in {*NAMES, *config}:
        for value in VALUES:
            try:
                format_of({"quantization_config": config | {name: value}}, "config.json")
            except ModelError as error:
                assert str(error).startswith("config.json: "), (name, value)  # noqa: PT017
                continue
            try:
                decoded(tmp_path, config | {name: value}, tensors, "layer.m.weight")
            except ModelError as error:
                assert "layer.m" in str(error) or "none of them is" in str(error), (name, value)  # noqa: PT017


@pytest.mark.parametrize("value", ["x", 5, [1], [[1, 2]]])
def test_a_file_beside_the_config_that_is_none(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_config.json").write_text(json.dumps({"quantization": value}))
    with pytest.raises(ModelError, match=r"quant_config\.json: quantization must be an object"):
        format_in(tmp_path)


DTYPES = [torch.int32, torch.uint8, torch.int8, torch.float32, torch.float16, torch.float8_e4m3fn]


@settings(max_examples=200)
@given(kind=st.sampled_from(list(FOLDERS)), data=st.data())
def test_random_parts(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    """Any parts in any shapes: a matrix comes out, or a ModelError."""
    config, tensors = stored(kind)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, unique=True)):
        shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
        tensors[name] = torch.zeros(shape).to(data.draw(st.sampled_from(DTYPES)))
    try:
        decoded(tmp_path_factory.getbasetemp(), config, tensors, "layer.m.weight")
    except ModelError as error:
        assert "layer.m" in str(error) or "none of them is" in str(error)  # noqa: PT017
