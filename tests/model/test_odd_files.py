"""Files of a model folder may be broken in any way: the error is typed and names the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.model import load_decoder, read_spec, save_decoder, write_config
from outrider.model.load import generation_defaults
from outrider.sampling import SamplingParams
from tests.support import random_decoder, write_family, write_tokenizer
from tests.support.examples import examples

INDEX = "model.safetensors.index.json"
_BROKEN: list[bytes] = [b"", b"{", b"\xff\xfe", b"null", b"[]", b'"x"', b"1", b"NaN", b"[" * 100_000, b"9" * 5000, b"{}\0"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    decoder = random_decoder(write_family(root / "config", "llama2", vocab_size=300, eos_token_id=0))
    out = write_tokenizer(root / "model")
    save_decoder(decoder, out)
    write_config(decoder.spec, out)
    (out / "generation_config.json").write_text("{}")
    return out


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    out = tmp_path / "model"
    out.mkdir(exist_ok=True)
    for file in original.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def load(directory: Path) -> LLM:
    return LLM(directory, speculation="none", max_model_len=64, max_num_seqs=1)


@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
@pytest.mark.parametrize("content", [*_BROKEN, None], ids=lambda content: "directory" if content is None else str(content[:8]))
def test_broken_json_names_the_file(saved: Path, name: str, content: bytes | None) -> None:
    (saved / name).unlink(missing_ok=True)
    if content is None:
        (saved / name).mkdir()
    else:
        (saved / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        load(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null", b"[]", b"{}", b"[" * 100_000])
def test_broken_tokenizers_load_or_name_the_folder(saved: Path, name: str, content: bytes) -> None:
    (saved / name).write_bytes(content)
    try:
        llm = load(saved)
    except ModelError as error:
        assert str(saved) in str(error)  # noqa: PT017 (either outcome is right)
        return
    llm.generate([[1, 2]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "lacks a 'weight_map'"),
        (None, "lacks a 'weight_map'"),
        ([1], "weight_map must be an object"),
        ({"a": 1}, "'a' must be in a .*file of this folder, got 1"),
        ({"a": None}, "got None"),
        ({"a": "../model/model.safetensors"}, "file of this folder"),
        ({"a": "/etc/passwd"}, "file of this folder"),
        ({"a": "sub/model.safetensors"}, "file of this folder"),
        ({"a": "x\0.safetensors"}, "file of this folder"),
        ({"a": ".."}, "file of this folder"),
        ({"a": "gone.safetensors"}, r"gone\.safetensors is missing"),
    ],
)
def test_an_index_names_files_of_its_folder(saved: Path, weight_map: Any, message: str) -> None:
    (saved / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        load_decoder(saved)


def test_weights_that_are_a_directory(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: it is a directory"):
        load_decoder(saved)


def test_one_tensor_in_two_files(saved: Path) -> None:
    save_file({"model.norm.weight": torch.ones(48)}, saved / "other.safetensors")
    with pytest.raises(ModelError, match=r"holds 'model\.norm\.weight', and so does"):
        load_decoder(saved)


@examples(150)
@given(st.data())
def test_damaged_safetensors_load_or_name_the_file(original: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header changed, or the file cut anywhere."""
    undamaged = (original / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(undamaged[:8], "little")
    cut = data.draw(st.one_of(st.just(len(undamaged)), st.integers(0, len(undamaged))))
    damaged = bytearray(undamaged[:cut])
    for place in data.draw(st.lists(st.integers(0, header - 1), max_size=3)):
        if place < len(damaged):
            damaged[place] = data.draw(st.integers(0, 255))
    (tmp_path / "config.json").write_bytes((original / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(damaged)
    try:
        load_decoder(tmp_path)
    except ModelError as error:
        assert "model.safetensors" in str(error) or str(tmp_path) in str(error)  # noqa: PT017


def test_a_scale_must_fit_its_matrix(saved: Path) -> None:
    file = saved / "model.safetensors"
    decoder = load_decoder(saved)
    save_decoder(decoder, saved, int8=True)
    load_decoder(saved)
    tensors = load_file(file)
    tensors["model.embed_tokens.weight.scale"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight\.scale' must be 300 floats"):
        load_decoder(saved)


_LONG = ["x" * 5000, "/" + "x" * 5000, "x" * 300 + "/y"]
_PATHS = [*_LONG, "", "\0", "a\0b/c", "~nobody-of-that-name/x", "\ud800", "a/b/c", ".", "/dev/null", "/"]


@pytest.mark.parametrize("path", [*_PATHS, b"x", 7, 1.5, [], {}, object()], ids=lambda path: ascii(path)[:20])
def test_odd_paths(original: Path, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OutriderError) as caught:
        LLM(path, speculation="none")
    assert len(str(caught.value)) < 600
    with pytest.raises(OutriderError):
        LLM(original, speculation={"method": "draft_model", "model": path})


def test_folders_of_other_tools_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (gguf, gguf / "model-Q4_K_M.gguf"):
        with pytest.raises(ModelError, match=r"model-Q4_K_M\.gguf is truncated or corrupt"):
            LLM(path)
    with pytest.raises(ModelError, match="pass a directory with config.json, a GGUF file"):
        LLM(tmp_path / "nowhere.gguf")
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"LoRA adapter.*pass its base model.*--lora"):
        LLM(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be a token id"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"top_p": 7}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ],
)
def test_odd_generation_defaults(saved: Path, content: dict[str, Any], message: str) -> None:
    (saved / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"generation_config\.json: .*{message}"):
        load(saved)


def test_ends_beyond_the_output_matrix_are_ignored_and_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer with added tokens has ids that no logit stands for; masking them would index past the matrix."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 300]}))
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7, 10**20]}))
    tokenizer = json.loads((saved / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"][0] | {"id": 305, "content": "<|over|>"}
    (saved / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}))
    settings_ = json.loads((saved / "tokenizer_config.json").read_text())
    (saved / "tokenizer_config.json").write_text(json.dumps(settings_ | {"eos_token": "<|over|>"}))
    with caplog.at_level(logging.WARNING):
        llm = load(saved)
    assert llm.tokenizer is not None
    beyond = llm.tokenizer.eos_id
    assert beyond is not None
    assert beyond >= 300
    assert generation_defaults(saved, read_spec(saved))[1] == {0, 7}
    for file, ids in (("config.json", "300"), ("generation_config.json", f"-1, {10**20}"), ("tokenizer", str(beyond))):
        assert any(file in line and ids in line for line in caplog.messages), file
    output = llm.generate([[1, 2, 3]], SamplingParams(min_tokens=4, max_tokens=6, temperature=0.0))[0].outputs[0]
    assert len(output.token_ids) >= 4


def test_an_empty_model_name_is_not_the_bundled_model() -> None:
    with pytest.raises(InvalidParameter, match="model: must be a directory or a hub id"):
        LLM("")
