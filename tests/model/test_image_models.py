"""The text part of models that read images too, built by Transformers: the logits of text, whatever the tensors are called."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

from outrider.errors import ModelError
from outrider.model import Feed, Runner, load_decoder, read_spec
from outrider.model.families.text_part import DEFAULTS
from outrider.ops import Blocked
from tests.support import make_pool

VOCAB = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 64, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 48}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e6}}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e6, "partial_rotary_factor": 0.34},
}  # fmt: skip
# class -> what differs in its text_config, its vision_config, and other fields
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ({"sliding_window": 17, "query_pre_attn_scalar": 12}, VISION, {"mm_tokens_per_image": 4}),
    "Mistral3": ({"model_type": "ministral3"}, VISION | {"model_type": "pixtral", "head_dim": 16}, {}),
    "Llava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model", "projection_dim": 32}, {}),
    "Qwen2_5_VL": (MROPE, QWEN_VISION, {"tie_word_embeddings": True}),
    "Qwen3_5": (DELTA, QWEN_VISION, {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    text, vision, others = CASES[request.param]
    config = getattr(transformers, f"{request.param}Config")(text_config=TEXT | text, vision_config=vision, **others)
    torch.manual_seed(1)
    model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


def renamed(directory: Path, out: Path, rename: Any) -> Path:
    """A copy whose tensors have other names."""
    out.mkdir()
    (out / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(
        {rename(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}, out / "model.safetensors"
    )
    return out


def logits(directory: Path, text: list[int]) -> torch.Tensor:
    decoder = load_decoder(directory)
    runner = Runner(decoder, make_pool(decoder, pages=20), Blocked())
    return runner.logits(runner.forward([Feed(list(range(16)), 0, text)]).last, range(len(text)))


def test_text_is_scored_as_transformers_scores_it(
    case: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, directory = case
    text = [3 + i * 37 % (VOCAB - 20) for i in range(56)]
    with torch.no_grad():
        want = model(input_ids=torch.tensor([text])).logits[0]
    with caplog.at_level(logging.INFO, logger="outrider"):
        torch.testing.assert_close(logits(directory, text), want, atol=1e-4, rtol=0)
    ignored = [line for line in caplog.messages if "are ignored" in line]
    assert ignored
    assert len(ignored) == len(set(ignored)), "each part is named once"
    assert any("visual" in line or "vision_tower" in line for line in ignored)

    def in_one_model(name: str) -> str:
        """The names of newer checkpoints: model.language_model.*, model.vision_tower.*, lm_head.weight."""
        name = name.removeprefix("language_model.").removeprefix("model.")
        inner = name.startswith(("layers.", "embed_tokens.", "norm."))
        return name if name.startswith("lm_head") else f"model.language_model.{name}" if inner else f"model.{name}"

    assert torch.equal(logits(renamed(directory, tmp_path / "new", in_one_model), text), logits(directory, text))


def test_a_tensor_of_no_known_part_is_an_error(case: tuple[Any, Path], tmp_path: Path) -> None:
    odd = renamed(case[1], tmp_path / "odd", lambda name: name.replace("vision_tower", "retina").replace("visual", "retina"))
    with pytest.raises(ModelError, match=r"model\.safetensors holds '(model\.)?retina"):
        load_decoder(odd)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_of_nested_configs_are_those_of_transformers(kind: str) -> None:
    """Transformers leaves them out when it saves a nested config."""
    special = {"qwen2_vl_text": Qwen2VLTextConfig, "qwen2_5_vl_text": Qwen2_5_VLTextConfig}
    config = special[kind]() if kind in special else transformers.CONFIG_MAPPING[kind]()
    rotary = ("rope_theta", "rope_parameters")
    for name, value in DEFAULTS[kind][1].items():
        if name not in rotary:
            assert getattr(config, name) == value, name
    wanted = DEFAULTS[kind][1]
    wanted = wanted.get("rope_parameters", {"rope_theta": wanted["rope_theta"]} if "rope_theta" in wanted else {})
    assert {name: config.rope_parameters[name] for name in wanted} == wanted


def test_qwen_vl_configs_from_before_text_config(tmp_path: Path) -> None:
    flat = TEXT | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat | {"vision_config": {}, "rope_theta": 1e6}))
    spec = read_spec(tmp_path)
    assert (spec.family, spec.depth, spec.attention.bias) == ("qwen2", 3, True)
    assert spec.ropes[0].theta == 1e6
