"""A config.json may hold anything: it gives a typed error that names the field, or a model that decodes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.config import pinned
from outrider.engine.llm import LLM
from outrider.errors import ModelError, OutriderError
from outrider.model import Decoder, LoadOptions, compile_spec, load_decoder
from outrider.model.families import family_of
from outrider.model.families.reading import _NAMES
from outrider.model.listing import Wants
from outrider.sampling import SamplingParams
from tests.support import BASE, FAMILIES, write_family
from tests.support.examples import examples
from tests.support.families import CASES, reference_config

_FIELDS = [
    *("architectures", "attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size"),
    *("intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling"),
    *("rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_sliding_window", "vocab_size"),
]
_ROPE = ["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta"]
_NUMBERS = [0, -1, 1, 2, 3, 5, 7, 16, 10**12, 2**31, 2**63, 10**400, 0.0, 0.5, -1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf]
_OTHERS = [None, True, False, "", "float16", "linear", "llama3", "x" * 5000, [], [1], ["full_attention"] * 2, [[]], {}, {"a": 1}]
_values = st.sampled_from([*_NUMBERS, *_OTHERS])
_rope = st.dictionaries(st.sampled_from(_ROPE), _values, min_size=1, max_size=3)
_changes = st.dictionaries(st.sampled_from(_FIELDS), st.one_of(_values, _rope), min_size=1, max_size=2)


@examples(400)
@given(st.sampled_from(sorted(FAMILIES)), _changes)
@example("llama2", {"num_attention_heads": 1, "num_key_value_heads": 2})
@example("llama2", {"num_key_value_heads": 8})
@example("llama2", {"head_dim": 10**12})
@example("llama2", {"num_hidden_layers": 10**9})
@example("mistral", {"sliding_window": 0})
@example("llama3", {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}})
def test_mutated_configs_load_or_say_why(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    directory = write_family(tmp_path / "model", family, **changes)
    sizes: dict[str, Any] = {"max_model_len": 24, "max_num_seqs": 1, "page_size": 8, "speculation": "none"}
    try:
        llm = LLM(directory, load_format="dummy", **sizes)
    except OutriderError as error:
        assert len(str(error)) < 600  # noqa: PT017 (either outcome is right)
        return
    tokens = llm.generate([[1, 0, 1]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids
    assert all(0 <= token < llm.config.vocab for token in tokens)


_ABSURD = [("vocab_size", 1), ("vocab_size", -5), ("hidden", 0), ("hidden", -60), ("layers", 0), ("layers", -1), ("heads", 0)]
_ABSURD += [
    ("kv_heads", 4),
    ("kv_heads", 0),
    ("head_dim", 0),
    ("head_dim", -8),
    ("ffn", 0),
    ("ffn", -1),
    ("context", 0),
    ("window", 0),
]


@pytest.mark.parametrize("name", CASES)
def test_absurd_sizes_are_refused_for_every_family(name: str) -> None:
    """By a typed error that names the field, and before anything is allocated. kv_heads of 4 do not divide 6 heads."""
    data = reference_config(name)
    family, spec = family_of(data["architectures"][0]), compile_spec(data)
    assert family is not None
    reads = {"kv_heads": name not in _OWN_KV_HEADS, "window": any(spec.windows), "ffn": name != "qwen3.5-moe"}  # all experts
    unread = {size for size, read in reads.items() if not read}
    for size, value in _ABSURD:
        field = dict(family.fields).get(size, _FIELD_NAMES.get(size, size))
        if size not in unread and field in data:
            with pytest.raises(ModelError, match=field):
                compile_spec(data | {field: value})


_OWN_KV_HEADS = [name for name, (kind, _) in CASES.items() if kind in ("GPT2", "GPTJ", "GPTBigCode", "GPTNeoX", "OPT")]
_OWN_KV_HEADS += ["falcon-7b", "falcon-sequential"]
_FIELD_NAMES = {**_NAMES, "window": "sliding_window"}


_SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 16, 30, 33, 64]
_OF_SHAPES = re.compile("head|hidden_size|intermediate|vocab|window|layer|^n_|dim|rot|rope|ffn|multi_query")


def _other(value: Any) -> st.SearchStrategy[Any]:
    """Another value of the same kind, so that most models can be loaded."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from(_SIZES)
    if isinstance(value, float):
        return st.sampled_from([1e-6, 0.25, 0.5, 1.0, 2.0, 1e4, 1e30])
    return st.sampled_from([None, value[::-1], value * 2]) if isinstance(value, list) else st.sampled_from([*_SIZES, None])


@examples(200)
@given(st.data())
def test_mutated_models_of_every_family_decode_or_say_why(tmp_path: Path, data: st.DataObject) -> None:
    """With drafts deeper than windows, and pages of any size: the tokens of plain decoding."""
    config = reference_config(data.draw(st.sampled_from(sorted(CASES))))
    fields = sorted(filter(_OF_SHAPES.search, config))
    for field in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        config[field] = data.draw(_other(config[field]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes: dict[str, Any] = {"max_model_len": 40, "max_num_seqs": 1, "page_size": data.draw(st.sampled_from([1, 8]))}
    outputs = []
    try:
        for method in ("none", "lookahead:40"):
            with LLM(tmp_path, load_format="dummy", speculation=pinned(method), **sizes) as llm:
                params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
                outputs.append(llm.generate([[0, 1, 0, 1, 0, 1, 1]], params)[0].outputs[0].token_ids)
    except OutriderError as error:
        assert len(str(error)) < 600  # noqa: PT017 (either outcome is right)
        return
    assert outputs[0] == outputs[1]


@examples(300)
@given(st.data())
def test_mutated_configs_of_every_family_compile_or_say_why(data: st.DataObject) -> None:
    """Any field may hold anything; a spec that comes out describes a decoder."""
    config = reference_config(data.draw(st.sampled_from(sorted(CASES))))
    fields = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2))
    changes = {field: data.draw(st.one_of(_values, _rope)) for field in fields}
    try:
        spec = compile_spec(config | changes)
    except ModelError as error:
        assert len(str(error)) < 600  # noqa: PT017 (either outcome is right)
        return
    assert spec.vocab > 1
    assert min(spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.context) >= 1
    assert spec.heads % spec.kv_heads == 0
    assert all(window is None or window >= 1 for window in spec.windows)
    with torch.device("meta"):
        Decoder(replace(spec, layers=spec.layers[:1], context=min(spec.context, 64)))
    assert Wants(spec).verdict


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 1, "num_key_value_heads": 2}, r"num_key_value_heads must be in \[1, 1\], got 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, "num_key_value_heads must divide"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads must be in \[1, 4\], got 0"),
        ({"head_dim": 10**12}, r"head_dim must be in \[2, 1024\], got 1000000000000"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be in \[1, 1024\]"),
        ({"hidden_size": -48}, "hidden_size must be in"),
        ({"hidden_size": "48"}, "hidden_size must be an integer in .*got '48'"),
        ({"vocab_size": 1}, r"vocab_size must be in \[2, "),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"sliding_window": 0}, r"sliding_window must be in \[1, "),
        ({"rope_theta": math.nan}, "rope_theta must be in .*got nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "rope_scaling: factor must be in .*got inf"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 8.0}}, "low_freq_factor must be below high_freq_factor"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"]}, "layer_types must name full_attention or sliding_attention for each of the 2"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be True or False"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported; known: float32, bfloat16, float16"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ],
)
def test_each_field_says_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^somewhere/config\.json: .*{message}"):
        compile_spec(BASE | FAMILIES["llama2"] | changes, "somewhere/config.json")


def test_a_model_larger_than_the_machine_is_refused_before_it_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.model.load.memory_bytes", lambda: 16 * 2**30)
    directory = write_family(tmp_path, "llama2", hidden_size=2**17, num_hidden_layers=1024, head_dim=64, intermediate_size=2**20)
    with pytest.raises(ModelError, match=r"needs [\d,.]+ GiB for its weights .* this machine has"):
        load_decoder(directory, LoadOptions(load_format="dummy"))
    directory = write_family(tmp_path, "llama2", max_position_embeddings=2**24, head_dim=256)
    with pytest.raises(ModelError, match="rotary tables of 16,777,216 positions"):
        load_decoder(directory, LoadOptions(load_format="dummy"))


def test_shapes_are_compared_before_the_decoder_takes_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"vocab_size": 2**22, "hidden_size": 512}))
    monkeypatch.setattr("outrider.model.decoder.Decoder.materialise", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(ModelError, match=r"model\.safetensors: '.*' has shape \(.*\), config\.json asks for \(.*\)"):
        load_decoder(saved)


@pytest.mark.parametrize(("stored", "served"), [("float16", "bfloat16"), ("float64", "float32")])
def test_another_precision_than_the_stored_one_is_said(
    saved: Path, caplog: pytest.LogCaptureFixture, stored: str, served: str
) -> None:
    file = saved / "model.safetensors"
    save_file({name: tensor.to(getattr(torch, stored)) for name, tensor in load_file(file).items()}, file)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    assert load_decoder(saved).spec.dtype == served
    assert f"stored as {stored}, served as {served}" in caplog.text
    assert ("dtype=float32 keeps more of it" in caplog.text) == (served != "float32")
    caplog.clear()
    load_decoder(saved, LoadOptions(dtype="float32"))
    assert not caplog.text


def test_a_config_that_names_less_precision_than_is_stored_is_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = saved / "model.safetensors"
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load_decoder(saved).spec.dtype == "bfloat16"
    assert "stored as float32, served as bfloat16" in caplog.text
    caplog.clear()
    norms_apart = {name: part if part.dim() == 1 else part.bfloat16() for name, part in load_file(file).items()}
    save_file(norms_apart, file)
    load_decoder(saved)
    assert not caplog.text, "norms are often stored apart in float32"


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(saved: Path, dtype: torch.dtype) -> None:
    file = saved / "model.safetensors"
    save_file({name: tensor.to(dtype) if tensor.dim() == 2 else tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ModelError, match=r"model\.safetensors: '.*' is stored as .*quantised"):
        load_decoder(saved)


@pytest.mark.parametrize(
    ("key", "settings_of_it", "message"),
    [
        ("quantization_config", {"quant_method": "hqq"}, r"quantised with 'hqq' .*known: gptq, awq"),
        ("quantization_config", {}, r"quantised with '\?'"),
        ("quantization_config", "awq", "must be an object"),
        ("quantization_config", {"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
        ("quantization_config", {"quant_method": "gptq"}, "lacks the field 'bits'"),
        ("quantization_config", {"quant_method": "awq", "version": "gemv"}, "layout 'gemv'"),
        ("quantization_config", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ("quantization_config", {"config_groups": {}}, "config_groups names no weights"),
        ("compression_config", {"format": "marlin-24"}, "'marlin-24' of compressed-tensors"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, r"are quantised \(AWQ\), and none of them is"),
        ("quantization_config", {"load_in_4bit": True}, r"are quantised \(BitsAndBytes\), and none of them is"),
    ],
)
def test_quantisation_that_is_not_read_is_refused_by_name(saved: Path, key: str, settings_of_it: Any, message: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {key: settings_of_it}))
    with pytest.raises(ModelError, match=message):
        load_decoder(saved)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_settings_in_a_file_beside_the_config_count(saved: Path, name: str) -> None:
    (saved / name).write_text('{"bits": 5}' if name != "hf_quant_config.json" else '{"quantization": {"quant_algo": "W4A8"}}')
    with pytest.raises(ModelError, match=rf"{name}: .*(5 bits|W4A8)"):
        load_decoder(saved)
