"""MTP modules: arithmetic beside Transformers', from a folder and from a model's own checkpoint, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.cache import KVPool
from outrider.config import SpeculationConfig
from outrider.draft.auto import resolve_auto
from outrider.errors import ModelError, OutriderError
from outrider.heads import EagleHead, EagleRunner, SaveOptions, holds_mtp, load_mtp, save_mtp
from outrider.model import Decoder, Feed, LoadOptions, Rope, load_decoder
from outrider.ops import Plain, serving_ops
from outrider.train.attention import causal_attend
from outrider.train.shapes import MtpShape
from tests.support.families import build_reference
from tests.support.heads import VOCAB, toy_head, toy_target

FULL = LoadOptions(dtype="float32")
TOKENS = [i * 37 % VOCAB for i in range(20)]


def toy_mtp(target: Decoder) -> EagleHead:
    return toy_head(target, MtpShape().config(target.spec))


def drafted(head: EagleHead, features: Tensor, tokens: list[int] = TOKENS) -> Tensor:
    """Hidden rows of a text, by dense attention."""
    count = len(tokens)
    with torch.no_grad():
        return head(torch.tensor(tokens), features, torch.arange(count), causal_attend(1, count), Plain())  # type: ignore[no-any-return]


def test_the_plain_formula() -> None:
    """One row alone: attention over itself gives its own value."""
    head = toy_mtp(toy_target())
    feature = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))

    def rms(x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    embedded = head.embedding[7][None]
    x = torch.cat((rms(embedded, head.norm_embedding), rms(feature, head.norm_feature)), -1) @ head.fc.T
    value = (rms(x, head.layer.norm_in) @ head.layer.qkv.T)[:, -16:].view(2, 8).repeat_interleave(2, 0).flatten()
    x = x + value @ head.layer.out.T
    gate, up = (rms(x, head.layer.norm_mlp) @ head.layer.gate_up.T).chunk(2, -1)
    x = x + (torch.nn.functional.silu(gate) * up) @ head.layer.down.T
    torch.testing.assert_close(drafted(head, feature, [7]), rms(x, head.norm), atol=1e-5, rtol=1e-5)


def checkpoint(directory: Path, layout: str) -> tuple[Any, Any]:
    """A GLM with a module behind its layers, or a Qwen with one under `mtp.`, by Transformers: the model and the module."""
    from transformers.modeling_layers import MtpModel

    kinds = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]} if layout == "of a hybrid" else {}
    name = {"appended": "glm4-moe", "under mtp": "qwen3-moe", "of a hybrid": "qwen3.5"}[layout]
    model = build_reference(name, directory, **kinds)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"] if kinds else None
    module = MtpModel(model, 1)
    layer = module.layers[0].eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
            if "norm" in name:
                parameter += 1.0
    path = next(directory.glob("*.safetensors"))
    save_file(load_file(path) | stored(layer.state_dict(), layout, model), path)
    return model, module


def stored(tensors: dict[str, Tensor], layout: str, model: Any) -> dict[str, Tensor]:
    """The module's tensors under the names that published checkpoints give them, its copies of the model's matrices too."""
    block = f"model.layers.{model.config.num_hidden_layers}." if layout == "appended" else "mtp.layers.0."
    outside = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    named = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if part in outside and layout == "appended":
            name = block + ("shared_head.norm" if part == "post_norm" else part) + ".weight"
        elif part in outside:
            name = f"mtp.{outside[part]}.weight"
        else:
            name = block + name.removeprefix("mtp_block.")
        named[name] = tensor.clone()
    copies = {"embed_tokens": model.get_input_embeddings().weight, "shared_head.head": model.lm_head.weight}
    return named | ({f"{block}{name}.weight": x.detach().clone() for name, x in copies.items()} if layout == "appended" else {})


@pytest.mark.parametrize("layout", ["appended", "under mtp", "of a hybrid"])
def test_a_module_in_the_targets_own_checkpoint(layout: str, tmp_path: Path) -> None:
    """By Transformers: the module reads the last hidden row after the final norm, and feeds its own output back."""
    reference, module = checkpoint(tmp_path, layout)
    assert holds_mtp(tmp_path)
    for on_gpu in (False, True):
        members = resolve_auto(SpeculationConfig("auto"), tmp_path, on_gpu).nested()
        assert "mtp" in [member.method for member in members]
    target = load_decoder(tmp_path, FULL)
    head = load_mtp(tmp_path, target, FULL)
    assert head.config.shape.layers[0] == target.spec.layers[-1]
    assert head.output.data_ptr() == (target.embedding if target.output is None else target.output).data_ptr()
    text = torch.tensor([TOKENS])
    places = torch.arange(1, len(TOKENS))[None]
    with torch.no_grad():
        features = reference.model(text).last_hidden_state[:, :-1]
        for _ in range(2):
            own = drafted(head, features[0], TOKENS[1:])
            features = module.forward_layer(0, features, places, None, input_ids=text[:, 1:])
            torch.testing.assert_close(own, features[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(head.logits(own, Plain()), module._project_to_logits(features)[0], atol=1e-4, rtol=1e-4)


def test_the_native_core_runs_a_mixture(tmp_path: Path) -> None:
    checkpoint(tmp_path, "appended")
    head = load_mtp(tmp_path, load_decoder(tmp_path, FULL), FULL)
    spec = head.config.shape
    rows = torch.randn(len(TOKENS), spec.hidden, generator=torch.Generator().manual_seed(2))
    made = []
    for ops in (serving_ops(), Plain()):
        runner = EagleRunner(head, KVPool(1, 3, spec.kv_heads, 16, spec.head_dim), ops)
        hidden = runner.forward([Feed([2, 0, 1], 1, TOKENS)], rows)
        made.append((hidden, runner.logits(hidden)))
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("int8", [False, True])
def test_a_module_survives_its_folder(int8: bool, tmp_path: Path) -> None:
    target = toy_target()
    head = toy_mtp(target)
    save_mtp(head, tmp_path, SaveOptions("speculators", int8=int8, target="toy"))
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["speculators_model_type"] == "mtp"
    assert data["speculators_config"]["verifier"]["name_or_path"] == "toy"
    loaded = load_mtp(tmp_path, target, FULL)
    assert loaded.config == replace(head.config, shape=loaded.config.shape)
    features = torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(3))
    close = {"atol": 0.1, "rtol": 0.1} if int8 else {"atol": 0.0, "rtol": 0.0}
    torch.testing.assert_close(drafted(head, features), drafted(loaded, features), **close)


def edited(directory: Path, **layer: Any) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text())
    data["transformer_layer_config"] |= layer
    path.write_text(json.dumps(data))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = toy_target()

    def refused(match: str, **layer: Any) -> None:
        save_mtp(toy_mtp(target), tmp_path)
        edited(tmp_path, **layer)
        with pytest.raises(ModelError, match=match):
            load_mtp(tmp_path, target)

    refused(r"hidden_size must be the target's, got 64 and 32", hidden_size=64)
    refused(r"vocab_size must be the target's, got 65 and 64", vocab_size=65)
    refused("sliding window", architectures=["MistralForCausalLM"], sliding_window=8)
    refused(r"'mtp_layers\.0\..*' has shape", intermediate_size=40)
    refused("architecture 'Strange' is not supported", architectures=["Strange"])
    save_mtp(toy_mtp(target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "input_proj" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first 'mtp_layers\.0\.input_proj\.weight'"):
        load_mtp(tmp_path, target)
    data = json.loads((tmp_path / "config.json").read_text()) | {"speculators_model_type": "eagle3"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(OutriderError, match="eagle3"):
        load_mtp(tmp_path, target)


def test_a_model_without_a_module_says_so(tmp_path: Path) -> None:
    build_reference("qwen3-moe", tmp_path)
    assert not holds_mtp(tmp_path)
    with pytest.raises(ModelError, match="holds no MTP module"):
        load_mtp(tmp_path, load_decoder(tmp_path, FULL), FULL)
    assert not holds_mtp(tmp_path / "nothing")


def test_a_rotary_table_of_its_own_is_the_modules() -> None:
    target = toy_target()
    config = MtpShape().config(replace(target.spec.with_layers(rope=Rope(500.0))))
    assert config.shape.attention.rope == Rope(500.0)
