"""Loading is strict, safe, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import InvalidParameter, ModelError
from outrider.model import LoadOptions, compile_spec, load_decoder, locate, save_decoder, write_config
from outrider.model.load import generation_defaults
from tests.support import family_config, random_decoder, write_family


def edit(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_round_trip(saved: Path, tmp_path: Path) -> None:
    reloaded = load_decoder(saved)
    original = random_decoder(write_family(tmp_path / "config", "llama2"))
    for (name, a), (_, b) in zip(original.named_parameters(), reloaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shards_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.model.load._SHARD_BYTES", 20_000)
    decoder = load_decoder(write_family(tmp_path / "config", "qwen2", dtype="bfloat16"), LoadOptions(load_format="dummy"))
    save_decoder(decoder, tmp_path / "out")
    write_config(decoder.spec, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    reloaded = load_decoder(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), reloaded.parameters(), strict=True))


def test_int8_is_close_and_stable(saved: Path, tmp_path: Path) -> None:
    decoder = load_decoder(saved)
    save_decoder(decoder, tmp_path / "int8", int8=True)
    write_config(decoder.spec, tmp_path / "int8")
    once = load_decoder(tmp_path / "int8")
    for a, b in zip(decoder.parameters(), once.parameters(), strict=True):
        if a.dim() == 2:
            assert (a - b).abs().max() <= a.abs().max() / 127
    save_decoder(once, tmp_path / "again", int8=True)
    write_config(decoder.spec, tmp_path / "again")
    twice = load_decoder(tmp_path / "again")
    for a, b in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_dummy_needs_the_config_alone_and_repeats(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "qwen3", dtype="bfloat16")
    first, second = (load_decoder(directory, LoadOptions(load_format="dummy", seed=4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.layers[0].qkv.dtype == torch.bfloat16


def test_widened_weights_hold_the_same_values(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama2", dtype="bfloat16")
    narrow = load_decoder(directory, LoadOptions(load_format="dummy"))
    wide = load_decoder(directory, LoadOptions(load_format="dummy", widen=True))
    assert wide.layers[0].qkv.dtype == torch.float32
    assert all(torch.equal(a.float(), b) for a, b in zip(narrow.parameters(), wide.parameters(), strict=True))


def test_missing_extra_and_misshapen_tensors_are_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    edit(file, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first 'model\.norm\.weight'"):
        load_decoder(saved)
    edit(file, lambda t: t.update({"model.norm.weight": torch.ones(48), "surprise": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"model\.safetensors holds 'surprise'"):
        load_decoder(saved)
    edit(file, lambda t: (t.pop("surprise"), t.update({"model.norm.weight": torch.ones(47)})))
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has shape \(47,\).*\(48,\)"):
        load_decoder(saved)


def test_truncated_file_is_named(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_decoder(saved)
    file.write_bytes(b"garbage")
    with pytest.raises(ModelError, match="cannot be read"):
        load_decoder(saved)


def test_index_that_names_a_missing_shard(saved: Path) -> None:
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing"):
        load_decoder(saved)


def test_pickles_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors.*pytorch_model\.bin is a pickle"):
        load_decoder(saved)


@pytest.mark.parametrize("key", ["auto_map", "_attn_implementation_internal", "trust_remote_code"])
def test_configs_that_would_run_code_are_refused(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        compile_spec({"architectures": ["LlamaForCausalLM"], key: {"AutoModel": "evil.Model"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM2"]}, "LlamaForCausalLM2.*nearest known one is LlamaForCausalLM .*Transformers"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'.*known: silu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'.*llama3"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_configs_say_what_is_known(change: dict, message: str) -> None:  # type: ignore[type-arg]
    data = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "num_attention_heads": 2, "hidden_size": 8}
    data |= {"num_hidden_layers": 1, "intermediate_size": 8} | change
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        compile_spec(data)


def test_wrong_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_decoder(tmp_path)
    with pytest.raises(ModelError, match="not a model directory"):
        locate(str(tmp_path / "nowhere"))
    with pytest.raises(InvalidParameter, match="dtype: unknown 'int3'"):
        load_decoder(write_family(tmp_path / "m", "llama2"), LoadOptions(dtype="int3"))
    with pytest.raises(InvalidParameter, match="load_format"):
        load_decoder(write_family(tmp_path / "m", "llama2"), LoadOptions(load_format="gguf"))


def test_generation_defaults(tmp_path: Path) -> None:
    config = family_config("llama2", eos_token_id=[5, 6])
    assert generation_defaults(tmp_path, config) == ({}, frozenset({5, 6}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "temperature": 0.6, "top_p": 0.95}))
    assert generation_defaults(tmp_path, config) == ({"temperature": 0.6, "top_p": 0.95}, frozenset({5, 6, 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert generation_defaults(tmp_path, config)[0] == {"temperature": 0.0}


def with_config(directory: Path, **changes: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def test_a_stored_output_matrix_beside_a_config_that_ties(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same matrix is the embedding; another one is used, as Transformers does."""
    separate = load_decoder(saved)
    assert separate.output is not None
    with_config(saved, tie_word_embeddings=True)
    kept = load_decoder(saved)
    assert not kept.spec.tied
    assert torch.equal(kept.output, separate.output)  # type: ignore[arg-type]
    assert "stores another one, which is used" in caplog.text
    caplog.clear()
    edit(saved / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    tied = load_decoder(saved)
    assert tied.spec.tied
    assert tied.output is None
    assert not caplog.text
    edit(saved / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.ones(3, 48)}))
    load_decoder(saved)  # of another shape it is no output matrix


def test_a_missing_output_matrix_is_the_embedding(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(saved / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    decoder = load_decoder(saved)
    assert decoder.spec.tied
    assert "holds no output matrix; the embedding is used" in caplog.text


def test_names_without_their_prefix(saved: Path) -> None:
    """As AutoModel saves them: layers.0.*, embed_tokens.weight, norm.weight."""
    before = load_decoder(saved)
    tensors = load_file(saved / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, saved / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), load_decoder(saved).parameters(), strict=True))
