"""Mixtures of experts: which experts rows choose, layouts of checkpoints, and files and settings that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.bench.feature_specs import FEATURE_SPECS, random_decoder
from outrider.cache import KVPool
from outrider.core import Batch, Drafts, Sequence
from outrider.errors import ModelError
from outrider.model import Feed, Runner, compile_spec, load_decoder
from outrider.model.experts import routes_of
from outrider.model.lora import read_lora
from outrider.model.spec import Router
from outrider.ops import Blocked, Native, find_core
from outrider.sampling import SamplingParams
from tests.support import make_pool, make_request
from tests.support.families import PAGES, build_reference, logits, reference_config
from tests.support.models import family_config
from tests.support.mxfp4 import quantise_experts

EXPERTS = "experts, a shared one behind a gate, a dense layer"
TEXT = [i * 37 % 90 for i in range(40)]


def test_ties_go_to_the_lower_expert_and_weights_are_in_order() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.5, 3.0]])
    for kind in ("softmax", "sigmoid"):
        routes = routes_of(scores, Router(5, 2, kind), None, None, Blocked())
        assert routes.experts.tolist() == [[1, 2]]
        assert routes.weights.tolist() == [[0.5, 0.5]]


def test_a_correction_chooses_but_does_not_weigh() -> None:
    correction = torch.tensor([0.0, 0.0, 5.0])
    routes = routes_of(torch.tensor([[2.0, 1.0, 0.0]]), Router(3, 2, "sigmoid", correction=True), None, correction, Blocked())
    assert routes.experts.tolist() == [[0, 2]]
    torch.testing.assert_close(routes.weights, torch.tensor([[2.0, 0.0]]).sigmoid() / torch.tensor([2.0, 0.0]).sigmoid().sum())


def test_experts_outside_the_best_groups_are_not_chosen() -> None:
    """Expert 0 scores best, but its group of two does not."""
    scores = torch.tensor([[4.0, -9.0, 2.0, 1.9, 1.0, 1.0, 0.0, 0.0]])
    routes = routes_of(scores, Router(8, 2, "sigmoid", groups=4, chosen_groups=1), None, None, Blocked())
    assert routes.experts.tolist() == [[2, 3]]


def test_scores_count_the_experts_that_were_read() -> None:
    """The mean over layers with experts; both backends count the same."""
    spec, counts = FEATURE_SPECS[EXPERTS], []
    core = find_core()[0]
    for ops in (Blocked(), *([] if core is None else [Native(core)])):
        runner = Runner(random_decoder(spec), KVPool(spec.depth, 9, spec.kv_heads, 16, spec.head_dim), ops)
        for tokens in ([5], TEXT):
            seq = Sequence(make_request(tokens, SamplingParams(max_tokens=4)))
            seq.pages = list(range(4))
            counts.append(runner.score(Batch([seq], [len(tokens)]), Drafts.empty(1)).experts)
    assert counts[:2] == counts[2:] or core is None
    assert counts[:2] == [2.0, 7.0]


def test_prompts_longer_than_what_shares_the_experts_have_the_same_bits() -> None:
    """The core reads experts once for 256 rows; other cuts give the same bits."""
    core = find_core()[0]
    if core is None:
        pytest.skip("the native core is not built")
    decoder = random_decoder(family_config("qwen3-moe"))
    text = [i * 7 % 190 for i in range(300)]
    runner = Runner(decoder, make_pool(decoder, pages=40), Native(core))
    whole = logits(runner, Feed(PAGES, 0, text))
    assert torch.equal(torch.cat([logits(runner, Feed(PAGES, at, text[at : at + 60])) for at in range(0, 300, 60)]), whole)


def fused(directory: Path, prefix: str = "mlp.experts.") -> None:
    """Rewrite a checkpoint with stacked experts, as Transformers holds them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    by_layer: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdecimal() else 0 for part in name.split(".")]):
        before, found, after = name.partition(prefix)
        if found:
            by_layer.setdefault(before, {}).setdefault(after.split(".")[1], []).append(tensors.pop(name))
    for before, parts in by_layer.items():
        gate, up, down = (torch.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        tensors |= {f"{before}{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{before}{prefix}down_proj": down}
    save_file(tensors, path)


def prompt_logits(directory: Path) -> torch.Tensor:
    decoder = load_decoder(directory)
    return logits(Runner(decoder, make_pool(decoder, pages=40)), Feed(PAGES, 0, TEXT))


def test_stacked_and_single_experts_are_the_same_model(tmp_path: Path) -> None:
    build_reference("qwen3-moe", tmp_path)
    single = prompt_logits(tmp_path)
    assert any("experts.5.up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    fused(tmp_path)
    assert not any("experts.5.up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(prompt_logits(tmp_path), single)


def test_mxfp4_experts_are_decoded(tmp_path: Path) -> None:
    build_reference("gpt-oss", tmp_path, hidden_size=64, intermediate_size=32)
    quantise_experts(tmp_path)
    assert torch.equal(prompt_logits(tmp_path), prompt_logits(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok must be in \\[1, 6\\]"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be"),
        ("glm4-moe", {"n_group": 3}, "n_group must cut the 8 experts into equal groups"),
        ("glm4-moe", {"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok must be in \\[1, 2\\]"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok must be 2, as sparsemixer"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_settings_that_do_not_fit_are_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        compile_spec(reference_config(name) | changes)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.6.up_proj.weight"] = tensors["model.layers.0.mlp.experts.5.up_proj.weight"].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "lacks 1 tensors, first 'model.layers.1.mlp.experts.4.up_proj.weight'"),
        (_cut, "experts.3.down_proj.weight' has shape \\(60, 27\\), config.json asks for \\(60, 28\\)"),
        (_add, "experts.6.up_proj.weight', which Qwen3MoeForCausalLM does not have"),
    ],
)
def test_files_that_do_not_fit_are_named_before_weights_are_read(tmp_path: Path, change: Any, message: str) -> None:
    build_reference("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_decoder(tmp_path)


def test_layers_of_further_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM-4.5 stores the layer that predicts one more token after the others."""
    build_reference("glm4-moe", tmp_path)
    want = prompt_logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert torch.equal(prompt_logits(tmp_path), want)


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    build_reference("qwen3-moe", tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 2}))
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_"
    save_file({f"{name}A.weight": torch.ones(2, 60), f"{name}B.weight": torch.ones(28, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="is an adapter of experts or their router, which is not served"):
        read_lora(adapter, load_decoder(tmp_path), torch.float32, 16)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rounded_experts_stay_close(kind: str, tmp_path: Path) -> None:
    from outrider.model import LoadOptions

    if find_core()[0] is None:
        pytest.skip("the native core is not built")
    build_reference("mixtral", tmp_path)
    want = prompt_logits(tmp_path)
    decoder = load_decoder(tmp_path, LoadOptions(dtype=kind))
    made = logits(Runner(decoder, make_pool(decoder, pages=40)), Feed(PAGES, 0, TEXT))
    assert float((made - want).norm() / want.norm()) < {"bfloat16": 0.1, "int8": 0.3}[kind]
