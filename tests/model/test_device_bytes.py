"""What quantised layers take on a GPU is known from headers, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.model import read_spec
from outrider.model.device_bytes import with_layer_bytes
from outrider.model.load import LoadOptions, served_spec
from tests.support.families import build_reference
from tests.support.packing import write_quantised

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
         "num_hidden_layers": 2, "head_dim": 64}  # fmt: skip


TAKEN = {"gptq": 0.58, "awq": 0.58, "w8a8": 1.0, "fp8_128": 1.0, "fp8": 0.0, "nf4": 0.0}


@pytest.mark.parametrize("kind", TAKEN)
def test_headers_say_what_a_weight_takes(tmp_path: Path, kind: str) -> None:
    write_quantised(tmp_path / kind, build_reference("llama", None, **SIZES), kind)
    spec = with_layer_bytes(read_spec(tmp_path / kind), tmp_path / kind)
    assert spec.layer_bytes == pytest.approx(TAKEN[kind], abs=0.05), "what is decoded takes what its dtype says"
    assert served_spec(tmp_path / kind, LoadOptions("bfloat16")).layer_bytes == 0.0, "a dtype that was asked for is served"
    (tmp_path / kind / "model.safetensors").unlink()
    assert with_layer_bytes(read_spec(tmp_path / kind), tmp_path / kind).layer_bytes == 0.0, "no weights, as for a plan"


def test_models_in_floating_point_have_no_such_size(tmp_path: Path) -> None:
    build_reference("llama", tmp_path, **SIZES)
    assert with_layer_bytes(read_spec(tmp_path), tmp_path).layer_bytes == 0.0
