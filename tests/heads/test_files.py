"""Heads survive every layout, files of others load, and what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import ModelError, OutriderError
from outrider.heads import EAGLE1, EagleHead, SaveOptions, load_eagle, load_medusa, save_eagle, save_medusa
from outrider.model import Decoder, LoadOptions
from outrider.ops import Plain
from outrider.train.shapes import EagleShape
from tests.support.heads import CONTEXT, VOCAB, toy_eagle, toy_head, toy_medusa, toy_target

FULL = LoadOptions(dtype="float32")
H = 32


def rows(head: EagleHead) -> Tensor:
    """A head's outputs for fixed inputs; attention returns its values."""
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(16, len(head.config.taps) * H, generator=generator)
    tokens, positions = torch.arange(16), torch.arange(16)

    def attend(_layer: int, q: Tensor, _k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1) + q

    with torch.no_grad():
        return head.logits(head(tokens, head.fuse(taps, Plain()), positions, attend, Plain()), Plain())


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def edit(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    data = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def retensor(directory: Path, **changes: Tensor | None) -> None:
    tensors: dict[str, Tensor | None] = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors")


SHAPES = {
    "plain": EagleShape(fc_norm=False, norm_output=False),
    "3.1": EagleShape(taps=(1, 4), norm_before_residual=True),
    "own output": EagleShape(own_output=True),
    "reduced": EagleShape(draft_vocab=20),
}


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("name", SHAPES)
def test_eagle3_survives_its_layouts(name: str, layout: str, tmp_path: Path) -> None:
    target = toy_target()
    head = toy_eagle(target, SHAPES[name])
    if head.vocab_ids is not None:
        head.vocab_ids.copy_(torch.arange(20) * 3 + 1)
    save_eagle(head, tmp_path, SaveOptions(layout))
    loaded = load_eagle(tmp_path, target, FULL)
    assert loaded.config == replace(head.config, shape=loaded.config.shape)
    assert same(head, loaded)
    torch.testing.assert_close(rows(head), rows(loaded), atol=0, rtol=0)


def test_eagle1_survives(tmp_path: Path) -> None:
    target = toy_target(tied=False)
    head = toy_eagle(target, EagleShape(form=EAGLE1))
    save_eagle(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is True
    loaded = load_eagle(tmp_path, target, FULL)
    assert loaded.config.form == EAGLE1
    assert loaded.config.fc_bias
    assert same(head, loaded)
    torch.testing.assert_close(rows(head), rows(loaded), atol=0, rtol=0)


def published_eagle3(directory: Path, prefix: str, draft_vocab: int = 24) -> dict[str, Tensor]:
    """A checkpoint in another writer's format: float16, with its embedding and output matrix, offsets, keys by hand."""
    generator = torch.Generator().manual_seed(9)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.float16)

    ids = torch.arange(draft_vocab) * 2
    tensors = {
        "embed_tokens.weight": random(VOCAB, H),
        "fc.weight": random(H, 3 * H),
        "norm.weight": random(H),
        "lm_head.weight": random(draft_vocab, H),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
        f"{prefix}.hidden_norm.weight": random(H),
        f"{prefix}.input_layernorm.weight": random(H),
        f"{prefix}.post_attention_layernorm.weight": random(H),
        f"{prefix}.self_attn.q_proj.weight": random(H, 2 * H),
        f"{prefix}.self_attn.k_proj.weight": random(H // 2, 2 * H),
        f"{prefix}.self_attn.v_proj.weight": random(H // 2, 2 * H),
        f"{prefix}.self_attn.o_proj.weight": random(H, H),
        f"{prefix}.mlp.gate_proj.weight": random(48, H),
        f"{prefix}.mlp.up_proj.weight": random(48, H),
        f"{prefix}.mlp.down_proj.weight": random(H, 48),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB, "draft_vocab_size": draft_vocab,
        "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float16",
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_a_published_eagle3_loads(prefix: str, tmp_path: Path) -> None:
    tensors = published_eagle3(tmp_path, prefix)
    head = load_eagle(tmp_path, toy_target(), FULL)
    assert head.config.taps == (2, 2, 1)
    assert (head.config.own_embedding, head.config.own_output, head.config.fc_norm) == (True, True, False)
    assert head.vocab_ids is not None
    assert head.vocab_ids.tolist() == list(range(0, 48, 2))
    assert torch.equal(head.layer.qkv[H : H + H // 2], tensors[f"{prefix}.self_attn.k_proj.weight"].float())
    assert torch.equal(head.output, tensors["lm_head.weight"].float())
    assert rows(head).shape == (16, 24)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    target = toy_target()

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            load_eagle(tmp_path, target)

    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_eagle(tmp_path, target)
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, **{"midlayer.self_attn.q_norm.weight": torch.ones(8)})
    refused(r"model\.safetensors in .* holds 'midlayer\.self_attn\.q_norm\.weight'")
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, **{"norm.weight": None})
    refused(r"lacks 1 tensors, first 'norm\.weight'")
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, **{"fc.weight": torch.zeros(H, 2 * H)})
    refused(r"'fc\.weight' has shape \(32, 64\), expected \(32, 96\)")
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, d2t=None, t2d=None)
    refused("has no 'd2t'")
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, d2t=torch.full((24,), 60))
    refused("outside the vocabulary of 64")
    published_eagle3(tmp_path, "midlayer")
    retensor(tmp_path, t2d=torch.ones(VOCAB, dtype=torch.bool))
    refused("'t2d' marks other tokens")
    published_eagle3(tmp_path, "midlayer")
    edit(tmp_path, num_hidden_layers=4)
    refused("4 layers")


def test_pickles_are_refused(tmp_path: Path) -> None:
    published_eagle3(tmp_path, "midlayer")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load_eagle(tmp_path, toy_target())
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "medusa_lm_head.pt")
    edit(tmp_path, medusa_num_heads=2)
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt is a pickle"):
        load_medusa(tmp_path, toy_target())


def test_the_speculators_layout_must_say_where_the_residual_is(tmp_path: Path) -> None:
    target = toy_target()
    save_eagle(toy_eagle(target), tmp_path, SaveOptions("speculators", target="toy"))
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["speculators_config"]["verifier"]["name_or_path"] == "toy"
    assert data["transformer_layer_config"]["num_hidden_layers"] == 1
    edit(tmp_path, norm_before_residual=None)
    with pytest.raises(ModelError, match="norm_before_residual"):
        load_eagle(tmp_path, target)
    edit(tmp_path, norm_before_residual=True, speculators_model_type="dflash")
    with pytest.raises(OutriderError, match="dflash"):
        load_eagle(tmp_path, target)


def test_a_standalone_head_needs_nothing_of_the_target(tmp_path: Path) -> None:
    target = toy_target()
    head = toy_eagle(target)
    save_eagle(head, tmp_path, SaveOptions(standalone=True))
    edit(tmp_path, trained_for=None)  # another target is refused by its name alone
    loaded = load_eagle(tmp_path, toy_target(seed=8), FULL)
    assert loaded.config.own_embedding
    assert loaded.config.own_output
    torch.testing.assert_close(rows(head), rows(loaded), atol=0.5, rtol=0.02)
    assert loaded.vocab_ids is not None
    assert loaded.vocab_ids.tolist() == list(range(VOCAB))


def test_int8_is_close_and_small(tmp_path: Path) -> None:
    target = toy_target()
    head = toy_eagle(target)
    save_eagle(head, tmp_path / "int8", SaveOptions(int8=True))
    save_eagle(head, tmp_path / "full")
    loaded = load_eagle(tmp_path / "int8", target)
    assert loaded.layer.qkv.dtype == torch.bfloat16
    assert loaded.layer.norm_hidden is not None
    torch.testing.assert_close(loaded.layer.norm_hidden, head.layer.norm_hidden, atol=0, rtol=0)
    torch.testing.assert_close(loaded.fc.float(), head.fc, atol=0.01, rtol=0)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "full")]
    assert sizes[0] < 0.4 * sizes[1]
    wide = load_eagle(tmp_path / "int8", target, LoadOptions(widen=True))
    assert torch.equal(wide.fc, loaded.fc.float())


@pytest.mark.parametrize("layout", ["medusa", "vllm-medusa"])
@pytest.mark.parametrize("own_output", [False, True])
def test_medusa_survives_its_layouts(layout: str, own_output: bool, tmp_path: Path) -> None:
    target = toy_target()
    heads = toy_medusa(target, own_output)
    save_medusa(heads, tmp_path, SaveOptions(layout))
    loaded = load_medusa(tmp_path, target, FULL)
    assert loaded.config == heads.config
    assert same(heads, loaded)
    last = torch.randn(5, H, generator=torch.Generator().manual_seed(1))
    assert torch.equal(heads(last, Plain()), loaded(last, Plain()))


def medusa_by_hand(target: Decoder, directory: Path, prefix: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for h in range(2):
        tensors[f"{prefix}{h}.0.linear.weight"] = torch.randn(H, H, generator=generator)
        tensors[f"{prefix}{h}.0.linear.bias"] = torch.randn(H, generator=generator)
        tensors[f"{prefix}{h}.1.weight"] = torch.randn(target.spec.vocab, H, generator=generator)
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "toy"}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_a_published_medusa_loads(prefix: str, tmp_path: Path) -> None:
    target = toy_target()
    tensors = medusa_by_hand(target, tmp_path, prefix)
    heads = load_medusa(tmp_path, target, FULL)
    last = torch.randn(3, H, generator=torch.Generator().manual_seed(1))
    weight, bias = tensors[f"{prefix}1.0.linear.weight"], tensors[f"{prefix}1.0.linear.bias"]
    block = last + torch.nn.functional.silu(last @ weight.T + bias)
    torch.testing.assert_close(heads(last, Plain())[1], block @ tensors[f"{prefix}1.1.weight"].T, atol=1e-3, rtol=1e-4)
    retensor_medusa = {name: tensor for name, tensor in tensors.items() if name != f"{prefix}1.0.linear.bias"}
    save_file(retensor_medusa, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=r"first '1\.0\.linear\.bias'"):
        load_medusa(tmp_path, target)


def test_heads_that_the_configuration_forgot_are_read(tmp_path: Path) -> None:
    target = toy_target()
    medusa_by_hand(target, tmp_path, "")
    edit(tmp_path, medusa_num_heads=1)
    assert load_medusa(tmp_path, target, FULL).config.heads == 2
    edit(tmp_path, medusa_num_heads=3)
    with pytest.raises(ModelError, match=r"lacks 3 tensors, first '2\.0\.linear\.bias'"):
        load_medusa(tmp_path, target)


def test_layouts_are_named_when_wrong(tmp_path: Path) -> None:
    target = toy_target()
    with pytest.raises(OutriderError, match="known: eagle, speculators"):
        save_eagle(toy_eagle(target), tmp_path, SaveOptions("medusa"))
    with pytest.raises(OutriderError, match="known: medusa, vllm-medusa"):
        save_medusa(toy_medusa(target), tmp_path, SaveOptions("eagle"))
    with pytest.raises(OutriderError, match="EAGLE-3"):
        save_eagle(toy_eagle(target, EagleShape(form=EAGLE1)), tmp_path, SaveOptions("speculators"))
    config = toy_eagle(target).config
    with pytest.raises(AssertionError, match="embedding"):
        toy_head(target, replace(config, shape=replace(config.shape, vocab=99)))
