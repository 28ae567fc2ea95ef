"""A head of another target is refused when the engine is built, and one that is hardly ever accepted is reported."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from outrider import LLM, SamplingParams
from outrider.errors import ModelError
from outrider.heads import (
    EagleHead,
    load_block,
    load_eagle,
    load_medusa,
    load_mtp,
    save_block,
    save_eagle,
    save_medusa,
    save_mtp,
)
from outrider.heads.fit import TRAINED_FOR, target_record
from outrider.model import Decoder, LoadOptions, load_decoder
from outrider.model.bundled import bundled_model
from outrider.train.shapes import EagleShape, MtpShape
from tests.support.blocks import random_block
from tests.support.heads import toy_eagle, toy_head, toy_medusa, toy_target


def toy_mtp(target: Decoder) -> EagleHead:
    return toy_head(target, MtpShape().config(target.spec))


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., None], Callable[..., nn.Module]]] = {
    "eagle": (toy_eagle, save_eagle, load_eagle),
    "mtp": (toy_mtp, save_mtp, load_mtp),
    "medusa": (toy_medusa, save_medusa, load_medusa),
    "dflash": (lambda target: random_block(target, "dspark"), save_block, load_block),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_knows_its_target(kind: str, tmp_path: Path) -> None:
    """Another model of the same shape is another target; the same one in fewer bits is not."""
    make, save, load = KINDS[kind]
    target = toy_target()
    save(make(target), tmp_path)
    load(tmp_path, target)
    narrow = toy_target()
    for parameter in narrow.parameters():
        if parameter.dim() > 1:
            parameter.copy_((parameter * 4).round() / 4)
    load(tmp_path, narrow)
    with pytest.raises(ModelError, match=r"config\.json: .* trained for another model .*its last norm has other values"):
        load(tmp_path, toy_target(seed=1))
    data = json.loads((tmp_path / "config.json").read_text())
    for change, said in (({"num_hidden_layers": 5}, "num_hidden_layers is 4"), ({"vocab_size": None}, "vocab_size is 64")):
        (tmp_path / "config.json").write_text(json.dumps(data | {TRAINED_FOR: data[TRAINED_FOR] | change}))
        with pytest.raises(ModelError, match=said):
            load(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(data | {TRAINED_FOR: [1]}))
    with pytest.raises(ModelError, match="must be an object"):
        load(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in data.items() if name != TRAINED_FOR}))
    load(tmp_path, toy_target(seed=1))


def test_the_record_is_that_of_the_stored_norm_in_any_dtype() -> None:
    marks = []
    for dtype in ("float32", "bfloat16"):
        decoder = load_decoder(bundled_model(), LoadOptions(dtype=dtype))
        marks.append(target_record(decoder.spec, decoder.norm))
    assert marks[0] == marks[1]


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that fits the bundled model and guesses at random."""
    target = load_decoder(bundled_model(), LoadOptions(dtype="float32"))
    folder = tmp_path_factory.mktemp("head") / "eagle"
    save_eagle(toy_eagle(target, EagleShape()), folder)
    return folder


def test_an_engine_is_not_built_with_another_target_s_head(random_head: Path, tmp_path: Path) -> None:
    other = tmp_path / "head"
    shutil.copytree(random_head, other)
    data = json.loads((other / "config.json").read_text())
    data[TRAINED_FOR]["norm_sha256"] = "0" * 16
    (other / "config.json").write_text(json.dumps(data))
    for method in ("eagle", "auto"):
        with pytest.raises(ModelError, match="trained for another model"):
            LLM(speculation={"method": method, "model": str(other)}, max_model_len=256)


def test_an_engine_is_not_built_with_another_tokenizer_s_head(random_head: Path, tmp_path: Path) -> None:
    other = tmp_path / "head"
    shutil.copytree(random_head, other)
    for path in bundled_model().glob("tokenizer*"):
        shutil.copy(path, other / path.name)
    LLM(speculation={"method": "eagle", "model": str(other)}, max_model_len=256)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = sorted(vocab, key=vocab.get)
    tokenizer["model"]["vocab"] = {name: vocab[names[(i + 1) % len(names)]] for i, name in enumerate(names)}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="made for another tokenizer: .* tokens are not the target's"):
        LLM(speculation={"method": "eagle", "model": str(other)}, max_model_len=256)


@pytest.mark.parametrize("settings", [{"adaptive": False}, {}])
def test_a_head_that_is_hardly_ever_accepted_is_reported_once(
    settings: dict[str, Any], random_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(speculation={"method": "eagle", "model": str(random_head), **settings}, max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "outrider"):
        for prompt in ("def load(path):\n", "import os\n", "class Config:\n"):
            llm.generate(prompt, params)
        llm.close()
    said = [record.getMessage() for record in caplog.records if "had an accepted token" in record.getMessage()]
    assert len(said) == 1
    assert "drafts by eagle in" in said[0]
    assert "may have been trained for another model" in said[0]


def test_a_head_that_is_accepted_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(speculation="eagle:4:adaptive=false", max_model_len=512)
    with caplog.at_level(logging.WARNING, "outrider"):
        llm.generate("def load(path):\n", SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
        drafts, right = llm.engine.tally.begun["eagle"]
        llm.close()
    assert 0 < right <= drafts
    assert not [record for record in caplog.records if "had an accepted token" in record.getMessage()]
