"""The folder of a head may hold anything: a typed error that names it, or a head that fits its target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from outrider.errors import ModelError, OutriderError
from outrider.heads import SaveOptions, load_eagle, load_medusa, save_eagle, save_medusa
from outrider.model import Decoder
from outrider.train.shapes import EagleShape
from tests.support.examples import examples
from tests.support.heads import toy_eagle, toy_medusa, toy_target

_TAPS = "eagle_aux_hidden_state_layer_ids"
_FIELDS = [
    *("architectures", "draft_vocab_size", "dtype", "eagle_config", "fc_norm", "head_dim", "hidden_size", "intermediate_size"),
    *("max_position_embeddings", "medusa_choices", "medusa_num_heads", "medusa_num_layers", "norm_before_fc", "norm_output"),
    *(
        "num_attention_heads",
        "num_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "quantization_config",
        "rms_norm_eps",
        _TAPS,
    ),
    *(
        "rope_scaling",
        "rope_theta",
        "speculators_model_type",
        "target_hidden_size",
        "transformer_layer_config",
        "vocab_size",
        _TAPS,
    ),
]
_ODD: list[Any] = [
    *(None, True, 0, -1, 1, 2, 7, 20, 10**12, 2**31, 0.5, math.nan, math.inf, "", "x", "eagle3", "float16", [], [0], [99], [[0]]),
    *([[0, 0]], [["x"]], [1, "x"], {}, {"a": 1}, {_TAPS: [9]}, {_TAPS: "x"}),
]
Load = Callable[[Path, Decoder], nn.Module]


@pytest.fixture(scope="module")
def target() -> Decoder:
    return toy_target()


@pytest.fixture(scope="module")
def heads(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    save_eagle(toy_eagle(target), root / "eagle")
    save_eagle(toy_eagle(target, EagleShape(draft_vocab=20)), root / "reduced", SaveOptions(layout="speculators"))
    save_medusa(toy_medusa(target), root / "medusa")
    return {name: root / name for name in ("eagle", "reduced", "medusa")}


@examples(150)
@given(
    st.sampled_from(["eagle", "reduced", "medusa"]),
    st.dictionaries(st.sampled_from(_FIELDS), st.sampled_from(_ODD), min_size=1, max_size=2),
)
@example("eagle", {"hidden_size": 64})
@example("eagle", {"vocab_size": 65})
@example("eagle", {_TAPS: [9]})
@example("eagle", {"target_hidden_size": 16})
@example("eagle", {"intermediate_size": 2**20})
@example("reduced", {"transformer_layer_config": None})
@example("medusa", {"medusa_num_heads": 10**9})
@example("medusa", {"medusa_choices": [[0, 0]]})
def test_mutated_heads_load_or_say_why(
    target: Decoder, heads: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    data = json.loads((heads[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | changes))
    (tmp_path / "model.safetensors").write_bytes((heads[name] / "model.safetensors").read_bytes())
    load: Load = load_medusa if name == "medusa" else load_eagle
    try:
        head = load(tmp_path, target)
    except OutriderError as error:
        assert len(str(error)) < 600  # noqa: PT017 (either outcome is right)
        return
    assert all(isinstance(value, torch.Tensor) for value in head.state_dict().values())


@pytest.mark.parametrize("name", ["eagle", "medusa"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000])
def test_broken_files_of_heads_are_named(target: Decoder, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    load: Load = load_medusa if name == "medusa" else load_eagle
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path, target)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path, target)


def test_quantised_heads_are_refused(target: Decoder, heads: dict[str, Path], tmp_path: Path) -> None:
    data = json.loads((heads["eagle"] / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").write_bytes((heads["eagle"] / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="quantised with fp8"):
        load_eagle(tmp_path, target)
