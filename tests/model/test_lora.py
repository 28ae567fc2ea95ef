"""LoRA adapters: PEFT is the oracle, on families that name, fuse, transpose and reorder their linears differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.lora import write_adapter
from outrider.errors import ModelError
from outrider.model import Feed, Runner, load_decoder, locate
from outrider.model.lora import LoraParts, read_lora
from outrider.model.memory import kv_pool
from tests.support.families import PAGES, VOCAB, build_reference, expected, logits
from tests.support.models import random_decoder, write_family

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'outrider[dev]'")
TEXT = [i * 37 % VOCAB for i in range(40)]
CASES: dict[str, dict[str, Any]] = {
    "llama-biased": {"r": 8, "lora_alpha": 16},
    "qwen2": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "qwen3": {
        "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 9, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"down_proj": 3, r"layers.0.self_attn.v_proj": 1.5},
    },
    "mistral": {"r": 6, "target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "gemma2": {"r": 5, "layers_to_transform": [0, 2], "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj"]},
    "phi3": {"r": 7, "lora_alpha": 4},
    "gpt2": {"r": 4, "fan_in_fan_out": True},
    "pythia": {"r": 4},
    "cohere-normed": {"r": 16},
    "falcon-40b": {"r": 2, "lora_alpha": 6},
    "qwen3.5": {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]},
}  # fmt: skip


def peft_model(name: str, directory: Path, **config: Any) -> Any:
    """A Transformers model with a random adapter; both are saved, in folders `base` and `adapter`."""
    model = build_reference(name, directory / "base")
    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in (p for n, p in adapted.named_parameters() if "lora_" in n):
            parameter.copy_(torch.randn_like(parameter) * 0.5 * parameter.shape[-1] ** -0.5)
    adapted.save_pretrained(directory / "adapter")
    return adapted


def runner_of(directory: Path) -> Runner:
    decoder = load_decoder(directory)
    return Runner(decoder, kv_pool(decoder.spec, 40, 16))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, as PEFT calls it
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    reference = peft_model(name, tmp_path, **CASES[name])
    runner = runner_of(tmp_path / "base")
    parts = read_lora(tmp_path / "adapter", runner.decoder, runner.adapters.dtype, 64)
    adapter = runner.adapters.add(parts)
    got = logits(runner, Feed(PAGES, 0, TEXT, adapter=adapter))
    torch.testing.assert_close(got, expected(reference, TEXT), atol=1e-4, rtol=0)
    beside = [Feed(PAGES[8:], 0, TEXT[:9]), Feed(PAGES, 0, TEXT, adapter=adapter)]
    mixed = runner.logits(runner.forward(beside).last, range(49))
    assert torch.equal(mixed[9:], got)
    with reference.disable_adapter():
        torch.testing.assert_close(mixed[:9], expected(reference, TEXT[:9]), atol=1e-4, rtol=0)


@pytest.fixture
def decoder(tmp_path: Path) -> Any:
    return random_decoder(write_family(tmp_path / "base", "llama3"))


def read(directory: Path, decoder: Any, max_rank: int = 64, dtype: torch.dtype = torch.float32) -> LoraParts:
    return read_lora(directory, decoder, dtype, max_rank)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_adapters_of_every_dtype_are_read(stored: torch.dtype, decoder: Any, tmp_path: Path) -> None:
    """In the dtype that is served; narrower ones lose nothing."""
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4, dtype=stored)
    tensors = load_file(folder / "adapter_model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        parts = read(folder, decoder, dtype=dtype)
        want = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
        assert torch.equal(parts[1, "down"][0].down, want.to(dtype))
        assert len(parts[0, "qkv"]) == 3
        assert parts[0, "gate_up"][0].scale == 2.0


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    change(stored)
    save_file(stored, path)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "'LOHA'"),
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"alpha_pattern": {"(a+)+q": 3}}, "too elaborate"),
    ({"alpha_pattern": {"(": 3}}, "no pattern"),
    ({"alpha_pattern": {"q_proj": "much"}}, "must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED_SETTINGS, ids=lambda value: str(value)[:30])
def test_other_kinds_of_adapters_are_refused_by_name(changes: dict[str, Any], words: str, decoder: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4)
    settings(folder, **changes)
    with pytest.raises(ModelError, match=r"adapter_config\.json") as error:
        read(folder, decoder)
    assert words in str(error.value)


REFUSED_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], tuple[str, ...]]] = {
    "embedding": (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}), ("low-rank",)),
    "output": (
        lambda t: t.update({f"base_model.model.lm_head.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"}),
        ("embedding or output",),
    ),
    "magnitude": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.zeros(9)}), ("lora_magnitude_vector", "merge")),
    "no such module": (
        lambda t: t.update({f"{Q}x.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"}), ("q_projx", "another base model")
    ),
    "shape of A": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 50)}), (f"{Q}.lora_A", "(4, 50)", "(4, 48)")),
    "shape of B": (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(47, 4)}), (f"{Q}.lora_B", "(47, 4)", "(48, 4)")),
    "rank": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(65, 48)}), ("rank 65", "64")),
    "no rank": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(0, 48)}), ("rank 0",)),
    "no B": (lambda t: t.pop(f"{Q}.lora_B.weight"), ("lacks", "lora_B")),
    "integers": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int8)}), ("I8",)),
    "not a number": (lambda t: t[f"{Q}.lora_B.weight"][3].fill_(float("nan")), (f"{Q}.lora_B", "not finite")),
    "infinite": (lambda t: t[f"{Q}.lora_A.weight"][0].fill_(float("inf")), (f"{Q}.lora_A", "not finite")),
    "nothing": (lambda t: t.clear(), ("no adapter",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_refused(case: str, decoder: Any, tmp_path: Path) -> None:
    change, words = REFUSED_TENSORS[case]
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4)
    tensors(folder, change)
    with pytest.raises(ModelError, match="adapter_model") as error:
        read(folder, decoder)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_absurd_rank_is_refused_before_it_is_read(decoder: Any, tmp_path: Path) -> None:
    """The file's header promises a matrix of 2 TB; nothing of it exists."""
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4)
    header = json.dumps({f"{Q}.lora_{x}.weight": {"dtype": "F32", "shape": [2**40, 1], "data_offsets": [0, 2**42]} for x in "AB"})
    path = folder / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ModelError, match="adapter_model"):
        read(folder, decoder)
    folder = write_adapter(tmp_path / "wide", decoder.spec, 300)
    with pytest.raises(ModelError, match="rank 300; ranks from 1 to 256"):
        read(folder, decoder, 256)


def test_pickles_and_empty_folders_are_refused(decoder: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle, which can run code; `outrider convert .* OUT` writes"):
        read(folder, decoder)
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing"):
        read(tmp_path / "base", decoder)


def test_another_base_model_by_name_is_a_warning(decoder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4, base_model_name_or_path="meta-llama/Other-8B")
    read_lora(folder, decoder, torch.float32, 64, str(tmp_path / "base"))
    assert "Other-8B" in caplog.text
    caplog.clear()
    settings(folder, base_model_name_or_path="someone/Base")
    read_lora(folder, decoder, torch.float32, 64, str(tmp_path / "base"))
    assert not caplog.records


def test_an_adapter_passed_as_a_model_points_to_lora(decoder: Any, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", decoder.spec, 4)
    with pytest.raises(ModelError, match="--lora adapter="):
        locate(str(folder))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, as PEFT calls it
def test_an_adapter_of_a_recurrent_layer_is_refused(tmp_path: Path) -> None:
    peft_model("qwen3.5", tmp_path, r=2, target_modules=["q_proj", "in_proj_qkv"])
    with pytest.raises(ModelError, match="recurrent layer, which is not served"):
        read_lora(tmp_path / "adapter", load_decoder(tmp_path / "base"), torch.float32, 64)
