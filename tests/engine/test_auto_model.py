"""Programs as Transformers' documentation has them: nothing is changed but the import and the models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import AutoModelForCausalLM
from outrider.engine.auto_model import GeneratingModel
from tests.support.transformers_models import pyrite_in_transformers, tiny_model

pytestmark = pytest.mark.slow
SNIPPET = """
from transformers import AutoModelForCausalLM, AutoTokenizer

prompt = "def read(path):"
checkpoint = "EleutherAI/pythia-1.4b-deduped"
assistant_checkpoint = "EleutherAI/pythia-160m-deduped"

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
inputs = tokenizer(prompt, return_tensors="pt")

model = AutoModelForCausalLM.from_pretrained(checkpoint)
ASSISTANT
outputs = model.generate(**inputs, SPECULATION, do_sample=False, max_new_tokens=30)
texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
"""
DRAFT_MODEL = "assistant_model = AutoModelForCausalLM.from_pretrained(assistant_checkpoint)"


@pytest.fixture(scope="module")
def pyrite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pyrite")
    pyrite_in_transformers(folder)
    return folder


@pytest.mark.parametrize(
    ("assistant", "speculation"), [(DRAFT_MODEL, "assistant_model=assistant_model"), ("", "prompt_lookup_num_tokens=3")]
)
def test_a_program_changes_its_import_alone(assistant: str, speculation: str, pyrite: Path) -> None:
    program = SNIPPET.replace("ASSISTANT", assistant).replace("SPECULATION", speculation)
    program = program.replace("EleutherAI/pythia-1.4b-deduped", str(pyrite))
    program = program.replace("EleutherAI/pythia-160m-deduped", str(pyrite / "draft"))
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    exec(program, theirs)
    exec(program.replace("from transformers import", "from outrider import"), ours)
    assert ours["texts"] == theirs["texts"]
    with ours["model"] as model:
        ((_, fast),) = model._fast._beside.values()
        assert f"speculation='{'draft_model' if assistant else 'ngram'}'" in repr(fast)  # whether it pays is the machine's
        if assistant:
            assert fast.engine.tally.accepted > 4


def test_weights_that_accelerate_has_placed_on_one_device_are_fine(pyrite: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs it")
    ids = torch.tensor([[25, 26, 27, 25, 26, 27]])
    with AutoModelForCausalLM.from_pretrained(pyrite / "draft", speculation="ngram", device_map="auto") as model:
        wanted = model.transformers_model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), wanted)


@pytest.fixture
def model() -> Iterator[GeneratingModel]:
    with GeneratingModel(tiny_model("mixtral"), "ngram") as model:
        yield model


def test_everything_else_is_the_models_own(model: GeneratingModel) -> None:
    own, ids = model.transformers_model, torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    assert model.config is own.config
    assert model.device == own.device
    assert torch.equal(model(ids).logits, own(ids).logits)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model.nothing
    assert AutoModelForCausalLM.from_config(own.config).config.model_type == "mixtral"


def test_a_model_that_is_converted_generates_with_its_new_weights(model: GeneratingModel) -> None:
    own, ids = model.transformers_model, torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), own.generate(ids, **settings))
    assert model.eval() is model
    with torch.no_grad():
        own.lm_head.weight.copy_(own.lm_head.weight.flip(0))
    assert model.to(torch.float32) is model
    assert torch.equal(model.generate(ids, **settings), own.generate(ids, **settings))
