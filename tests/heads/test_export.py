"""`outrider export`: what it writes loads in Transformers and computes there what the engine computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.errors import InvalidParameter, ModelError
from outrider.heads import load_block, load_eagle, load_medusa
from outrider.heads.export import ExportOptions, export_folder
from outrider.model import LoadOptions, load_decoder
from outrider.model.bundled import bundled_model
from outrider.model.files import stored_tensors

PROMPTS = ("def load(path):\n", "import os\nimport sys\n\n\nclass Config:\n")
TOKENS = 24


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "pyrite"
    done = CliRunner().invoke(app, ["export", "--out", str(out), "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    folders = json.loads(done.stdout.splitlines()[-1])["folders"]
    assert folders == [str(out), *(str(out / name) for name in ("draft", "eagle", "medusa", "dflash"))]
    return out


@pytest.fixture(scope="module", params=["", "draft"])
def pair(request: pytest.FixtureRequest, exported: Path) -> Iterator[tuple[LLM, Any, Any]]:
    """The engine on the bundled folder, and Transformers' model and tokenizer from the exported one."""
    folder = exported / request.param
    with LLM(str(bundled_model() / request.param), dtype="float32", speculation="none") as llm:
        yield llm, AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_greedy_text_and_log_probabilities_are_the_engine_s(pair: tuple[LLM, Any, Any]) -> None:
    llm, model, tokenizer = pair
    assert model.dtype == torch.float32
    for prompt in PROMPTS:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=5))[0].outputs[0]
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=TOKENS)[0, length:].tolist()
        assert ids[: len(output.token_ids)] == output.token_ids
        assert tokenizer.decode(output.token_ids) == output.text
        whole = torch.tensor([[*inputs["input_ids"][0].tolist(), *output.token_ids]])
        logprobs = model(whole).logits[0].log_softmax(-1)[length - 1 : -1]
        assert output.logprobs is not None
        for row, at in zip(logprobs, output.logprobs, strict=True):
            for token, entry in at.items():
                assert row[token].item() == pytest.approx(entry.logprob, abs=2e-4)


def test_the_draft_model_assists_in_transformers(exported: Path) -> None:
    """Vocabulary and end tokens fit, and generation_config.json came along."""
    model, draft = (AutoModelForCausalLM.from_pretrained(exported / name) for name in ("", "draft"))
    inputs = AutoTokenizer.from_pretrained(exported)(PROMPTS[0], return_tensors="pt")
    plain, assisted = (model.generate(**inputs, max_length=40, assistant_model=drafter) for drafter in (None, draft))
    assert torch.equal(plain, assisted)
    assert model.generation_config.eos_token_id == [0]


def test_heads_hold_all_they_use_and_read_back(exported: Path) -> None:
    target = load_decoder(bundled_model(), LoadOptions("float32"))
    for name, load in (("eagle", load_eagle), ("medusa", load_medusa), ("dflash", load_block)):
        before, after = (load(folder / name, target, LoadOptions("float32")) for folder in (bundled_model(), exported))
        parameters = dict(after.named_parameters())
        for key, value in before.named_parameters():
            assert torch.equal(value, parameters[key]), (name, key)
    eagle, medusa = (set(stored_tensors(exported / name)) for name in ("eagle", "medusa"))
    assert {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} <= eagle
    assert {"0.2.weight", "1.2.weight"} <= medusa  # the output matrix, behind the residual blocks of each head


def test_vllm_s_layout_and_bfloat16(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(bundled_model() / "draft", source)
    export_folder(source, tmp_path / "out", ExportOptions("bfloat16", "vllm"))
    assert {header.dtype for header in stored_tensors(tmp_path / "out").values() if len(header.shape) == 2} == {"BF16"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["", "draft", "eagle", "medusa"])
def test_transformers_refuses_the_int8_folders_and_names_the_cure(name: str) -> None:
    with pytest.raises((OSError, ValueError), match="outrider-export|medusa"):
        AutoModelForCausalLM.from_pretrained(bundled_model() / name)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    with pytest.raises(InvalidParameter, match="is not empty"):
        export_folder(bundled_model() / "draft", tmp_path / "full")
    with pytest.raises(InvalidParameter, match="bfloat16"):
        ExportOptions("int8")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="GGUF"):
        export_folder(gguf, tmp_path / "out")
    config = json.loads((bundled_model() / "config.json").read_text())
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "config.json").write_text(json.dumps({"text_config": config}))
    with pytest.raises(ModelError, match="images"):
        export_folder(tmp_path / "images", tmp_path / "out")
