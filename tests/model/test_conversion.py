"""`outrider convert` and `outrider heads convert`: folders of pickles load as what they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.heads import EAGLE1, SaveOptions, load_eagle, load_medusa, save_eagle, save_medusa
from outrider.model import LoadOptions, load_decoder, save_decoder
from outrider.model.conversion import HEAD, MODEL, convert_folder
from outrider.train.shapes import EagleShape
from tests.support import random_decoder, write_family
from tests.support.heads import toy_eagle, toy_medusa, toy_target

FULL = LoadOptions(dtype="float32")


def pickled(folder: Path, parts: int = 1, name: str = "pytorch_model", suffix: str = ".bin", is_zip: bool = True) -> Path:
    """A folder whose safetensors became so many pickles."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = list(tensors), dict[str, str]()
    for part in range(parts):
        file = f"{name}-{part + 1:05d}-of-{parts:05d}{suffix}" if parts > 1 else f"{name}{suffix}"
        held = {key: tensors[key] for key in names[part::parts]}
        files |= dict.fromkeys(held, file)
        torch.save(held, folder / file, _use_new_zipfile_serialization=is_zip)
    if parts > 1:
        (folder / f"{name}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def model(folder: Path) -> dict[str, torch.Tensor]:
    """A small model; its parameters."""
    decoder = random_decoder(write_family(folder, "llama2"))
    save_decoder(decoder, folder)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "training_args.bin").write_bytes(b"\x80 none of these")
    return dict(decoder.named_parameters())


@pytest.mark.parametrize(("parts", "is_zip"), [(1, False), (3, True)])
def test_a_model_converts(parts: int, is_zip: bool, tmp_path: Path) -> None:
    parameters = model(tmp_path / "in")
    source, out = pickled(tmp_path / "in", parts, is_zip=is_zip), tmp_path / "out"
    done = CliRunner().invoke(app, ["convert", str(source), str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert len(list(out.glob("*.safetensors"))) == parts
    assert (out / "tokenizer.model").read_bytes() == b"pieces"
    assert not list(out.glob("*.bin*"))
    assert not (tmp_path / "out.part").exists()
    converted = dict(load_decoder(out, FULL).named_parameters())
    assert converted.keys() == parameters.keys()
    assert all(torch.equal(converted[name], parameters[name]) for name in parameters)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "reduced", "medusa"])
def test_heads_convert(name: str, tmp_path: Path) -> None:
    target, source, out = toy_target(), tmp_path / "in", tmp_path / "out"
    shapes = {"eagle1": EagleShape(form=EAGLE1), "eagle3": EagleShape(), "reduced": EagleShape(draft_vocab=20)}
    if name == "medusa":
        save_medusa(toy_medusa(target, own_output=True), source)
        pickled(source, name="medusa_lm_head", suffix=".pt", is_zip=False)
    else:
        save_eagle(toy_eagle(target, shapes[name]), source, SaveOptions(standalone=True))
        pickled(source)
    load: Any = load_medusa if name == "medusa" else load_eagle
    with pytest.raises(ModelError, match=r"is a pickle, which can run code; .*outrider heads convert HEAD OUT"):
        load(source, target)
    done = CliRunner().invoke(app, ["heads", "convert", str(source), str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    head = load(out, target, FULL)
    made = toy_medusa(target, own_output=True) if name == "medusa" else toy_eagle(target, shapes[name])
    loaded = head.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in made.state_dict().items())


def test_an_adapter_converts(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "adapter_config.json").write_text('{"r": 4}')
    tensors = {"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(4, 48)}
    torch.save(tensors, source / "adapter_model.bin")
    (written,) = convert_folder(str(source), tmp_path / "out", MODEL)
    assert written.name == "adapter_model.safetensors"
    assert (tmp_path / "out" / "adapter_config.json").read_text() == '{"r": 4}'
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(written).items())


def test_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = model(tmp_path / "cached")
    pickled(tmp_path / "cached", 2)
    asked: list[list[str]] = []

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path / "cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    convert_folder("someone/vicuna", tmp_path / "out", MODEL)
    assert len(dict(load_decoder(tmp_path / "out", FULL).named_parameters())) == len(parameters)
    convert_folder("someone/head", tmp_path / "head", HEAD)
    assert "tokenizer*" in asked[0]
    assert {"pytorch_model.bin", "pytorch_model-*.bin"} < set(asked[0])
    assert not {"*.bin", "*", "*.safetensors", "*.json"} & {pattern for patterns in asked for pattern in patterns}
    assert "medusa_lm_head.pt" in asked[1]
    assert "tokenizer*" not in asked[1]


def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"

    def refused(kind: type[OutriderError], match: str) -> None:
        with pytest.raises(kind, match=match):
            convert_folder(str(source), out, MODEL)
        assert not (tmp_path / "out.part").exists()

    model(source)
    refused(ModelError, "holds safetensors, which load as they are")
    pickled(source, 2)
    index = source / "pytorch_model.bin.index.json"
    for name in ("../x.bin", "model.safetensors", "/etc/passwd"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(ModelError, r"must be in a \*\.bin file of this folder")
    index.write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
    refused(ModelError, r"gone\.bin is missing, but pytorch_model\.bin\.index\.json names it")
    index.unlink()
    shutil.copy(source / "pytorch_model-00001-of-00002.bin", source / "pytorch_model-00002-of-00002.bin")
    refused(ModelError, "and so does another of the files")
    (source / "pytorch_model-00002-of-00002.bin").write_bytes(b"\x80garbage")
    refused(ModelError, r"00002\.bin cannot be converted")
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    refused(InvalidParameter, "is not empty")
    (source / "config.json").unlink()
    out = tmp_path / "other"
    refused(ModelError, "has no config.json")
