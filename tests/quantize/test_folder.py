"""Written folders are what other tools read: compressed-tensors gives the same matrices bit for bit, Transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.model import LoadOptions, load_decoder
from outrider.model.families import read_spec
from outrider.model.files import INDEX
from outrider.model.source import open_source
from outrider.quantize import folder as folders
from outrider.quantize.folder import quantise_folder
from outrider.quantize.scheme import Scheme
from tests.support import VOCAB
from tests.support.families import build_reference

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "head_dim": 32, "dtype": torch.bfloat16,
}  # fmt: skip
TEXTS = [[i * 37 % VOCAB for i in range(start, start + 70)] for start in range(3)]
KINDS = [("int8", 0), ("int4", 0), ("int4", 32), ("fp8", 0)]


def model(directory: Path, family: str = "llama", **sizes: Any) -> Path:
    build_reference(family, None, **SIZES | sizes).bfloat16().save_pretrained(directory)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("texts", [(), TEXTS], ids=["rtn", "gptq"])
@pytest.mark.parametrize(("name", "size"), KINDS)
def test_compressed_tensors_reads_the_same_matrices(tmp_path: Path, name: str, size: int, texts: Any) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the oracle")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = model(tmp_path / "plain", "qwen2", tie_word_embeddings=False)
    written = quantise_folder(source, tmp_path / "out", Scheme(name, size), texts)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig(**settings).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    stored, ours = tensors_of(tmp_path / "out"), open_source(tmp_path / "out", read_spec(tmp_path / "out"))
    modules = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert len(modules) == written.matrices == 2 * 7
    assert written.corrected == (len(modules) if texts else 0)
    for module in modules:
        parts = {key.removeprefix(f"{module}."): tensor for key, tensor in stored.items() if key.startswith(f"{module}.weight")}
        want = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(ours.tensor(f"{module}.weight").to(want.dtype), want), module
    plain = tensors_of(source)
    for key in set(plain).difference(f"{module}.weight" for module in modules):
        assert torch.equal(stored[key], plain[key]), key


@pytest.mark.parametrize(("name", "size"), KINDS)
def test_values_are_near_those_before(tmp_path: Path, name: str, size: int) -> None:
    source = model(tmp_path / "plain")
    quantise_folder(source, tmp_path / "out", Scheme(name, size))
    before, after = (load_decoder(path, LoadOptions("float32")) for path in (source, tmp_path / "out"))
    for (parameter, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        error = float((a - b).norm() / a.norm())
        quantised = parameter.startswith("layers.") and a.dim() == 2
        assert error < {"int8": 0.01, "int4": 0.13, "fp8": 0.04}[name] if quantised else error == 0.0, parameter
        assert error > 0.0 or not quantised, parameter


@pytest.mark.parametrize(("name", "size"), [("int8", 0), ("int4", 0)])
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_written_folder(tmp_path: Path, name: str, size: int) -> None:
    pytest.importorskip("compressed_tensors", reason="Transformers reads these folders with compressed-tensors only")
    from transformers import AutoModelForCausalLM

    quantise_folder(model(tmp_path / "plain"), tmp_path / "out", Scheme(name, size))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = loaded(torch.tensor(TEXTS[:1])).logits
    assert bool(logits.isfinite().all())
    ours = open_source(tmp_path / "out", read_spec(tmp_path / "out"))
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = loaded.get_submodule(module).weight
        assert torch.equal(weight.float(), ours.tensor(f"{module}.weight").bfloat16().float())


def test_large_models_are_cut_into_shards(tmp_path: Path) -> None:
    source = model(tmp_path / "plain")
    whole = quantise_folder(source, tmp_path / "whole", Scheme("int4"))
    cut = quantise_folder(source, tmp_path / "cut", Scheme("int4"), shard_bytes=60_000)
    index = json.loads((tmp_path / "cut" / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 2
    assert whole.bytes == cut.bytes == index["metadata"]["total_size"]
    tensors = tensors_of(tmp_path / "whole")
    assert {name: tensor.dtype for name, tensor in tensors.items()}.keys() == index["weight_map"].keys()
    for name, tensor in tensors_of(tmp_path / "cut").items():
        assert torch.equal(tensor, tensors[name]), name


def test_experts_and_routers(tmp_path: Path) -> None:
    """Experts that are matrices of their own are rounded, also where the rest is corrected; routers stay as they are."""
    source = model(tmp_path / "plain", "qwen3-moe", moe_intermediate_size=64)
    written = quantise_folder(source, tmp_path / "out", Scheme("int4", 32), TEXTS)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    assert written.corrected == 2 * 4 < written.matrices
    assert load_decoder(tmp_path / "out", LoadOptions("float32")).spec.expert_layers == 2


def test_a_drafter_beside_the_model_keeps_its_precision(tmp_path: Path) -> None:
    source = model(tmp_path / "plain")
    model(source / "draft", num_hidden_layers=1)
    quantise_folder(source, tmp_path / "out", Scheme("int8"))
    draft = tensors_of(tmp_path / "out" / "draft")
    assert {tensor.dtype for tensor in draft.values()} == {torch.bfloat16}


def test_what_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "plain")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidParameter, match="exists and is not empty; choose a new folder"):
        quantise_folder(source, tmp_path / "full", Scheme("int8"))
    with pytest.raises(InvalidParameter, match=r"48 does not divide the 128 inputs of 'model.layers.0.*'; these do: 64, 32"):
        quantise_folder(source, tmp_path / "out", Scheme("int4", 48))
    with pytest.raises(InvalidParameter, match="is int4's; int8 has a scale for each row"):
        Scheme("int8", 64)
    with pytest.raises(InvalidParameter, match="known: int8, int4, fp8"):
        Scheme("int3")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="pass the model's folder"):
        quantise_folder(tmp_path / "m.gguf", tmp_path / "out", Scheme("int8"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_of_what_did_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def fail(*_: Any) -> None:
        raise error("the disk is full")

    source = model(tmp_path / "plain")
    monkeypatch.setattr(folders, "copy_beside", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else OutriderError):
        quantise_folder(source, tmp_path / "out", Scheme("int8"))
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
