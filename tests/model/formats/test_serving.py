"""Whole models in every format: the same parameters as the dequantised model, and the same tokens with speculation on and off."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.errors import ModelError
from outrider.model import Decoder, Feed, LoadOptions, load_decoder, open_decoder
from outrider.model.load import generation_defaults
from outrider.ops import find_core
from tests.support import VOCAB, Oracle, make_engine, make_request, run, write_tokenizer
from tests.support.engines import assert_same_bits, random_params, run_recorded
from tests.support.families import build_reference
from tests.support.gguf_files import K_QUANTS, write_gguf
from tests.support.native import make_runner
from tests.support.packing import FOLDERS, write_quantised

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "head_dim": 16,
}  # fmt: skip
KINDS = [*FOLDERS, "Q8_0", "Q4_0"]


LARGE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def written(directory: Path, kind: str, family: str = "llama", **sizes: Any) -> tuple[Path, Any]:
    """A quantised model's folder or file, and the model that it stands for."""
    reference = build_reference(family, None, **SIZES | sizes)
    if kind in FOLDERS:
        write_quantised(directory / kind, reference, kind)
        return directory / kind, reference
    pytest.importorskip("gguf", reason="the gguf package writes the files")
    write_gguf(directory / "model.gguf", reference, kind)
    return directory / "model.gguf", reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_dequantised_model(
    tmp_path: Path, kind: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = written(tmp_path, kind, "qwen3" if kind != "Q4_0" else "llama")
    reference.save_pretrained(tmp_path / "plain")
    got = load_decoder(path, LoadOptions(dtype))
    assert f"decoded to {dtype}: takes the memory of the unquantised model" in caplog.text
    want = load_decoder(tmp_path / "plain", LoadOptions(dtype))
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_quantised_model_is_served_in_bfloat16_by_default(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "Q8_0")
    assert load_decoder(path).spec.dtype == "bfloat16"


KEPT = ["gptq", "awq", "w4a16", "w8a8", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]


@pytest.mark.parametrize("kind", [*KEPT, "fp8"])
def test_the_native_core_reads_integers_as_they_are_stored(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of the dequantised model up to the rounding of activations to int8. What cannot be kept is decoded."""
    core, reason = find_core()
    if core is None:
        pytest.skip(reason)
    path, reference = written(tmp_path, kind, **LARGE if kind in K_QUANTS else {})
    runner = make_runner(core, open_decoder(path), 64)
    assert ("decoded to" in caplog.text) == (kind not in KEPT)
    as_floats = make_runner(core, open_decoder(path, LoadOptions("bfloat16")), 64).weight_bytes
    assert runner.weight_bytes < 0.85 * as_floats or kind not in KEPT or kind == "w8a8"  # rows so short are mostly padding
    text = [i * 37 % VOCAB for i in range(40)]
    logits = runner.logits(runner.forward([Feed(range(2), 0, text)]).last, range(len(text)))
    with torch.no_grad():
        want = reference(torch.tensor([text])).logits[0]
    assert float((logits - want).norm() / want.norm()) < (0.05 if kind in KEPT else 0.02)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("branches", [0, 5], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", KINDS)
def test_oracle_drafts_change_nothing(tmp_path: Path, both_paths: str, kind: str, branches: int, dtype: str) -> None:
    if dtype in ("int8", "int4") and both_paths == "torch":
        pytest.skip(f"{dtype} is the native core's")
    path, _ = written(tmp_path, kind)
    decoder = open_decoder(path, LoadOptions(dtype))
    rng = random.Random(f"{kind} {branches}")
    requests = [
        make_request([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], random_params(rng, 30), f"r{i}") for i in range(4)
    ]
    plain = run_recorded(make_engine(decoder), requests)
    oracle = Oracle({r.id: w.seq.tokens for r, w in zip(requests, plain[0], strict=True)}, 4, branches)
    assert_same_bits(plain, run_recorded(make_engine(decoder, oracle, 4 + branches), requests))
    assert max(oracle.accepted) == 4


def gguf_options(directory: Path) -> Any:
    """Writes a tokenizer, a chat template and sampling defaults."""
    tokenizer = json.loads((write_tokenizer(directory, vocab=VOCAB + 101) / "tokenizer.json").read_text())

    def more(writer: Any) -> None:
        vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
        special = {token["content"] for token in tokenizer["added_tokens"]}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token in special else 1 for token in vocabulary])
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
        writer.add_eos_token_id(vocabulary.index("<|end|>"))
        writer.add_add_bos_token(False)
        writer.add_chat_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
        writer.add_float32("general.sampling.temp", 0.25)
        writer.add_int32("general.sampling.top_k", 7)

    return more


def text_of(path: Path, **settings: Any) -> tuple[list[int], str]:
    llm = LLM(path, dtype="bfloat16", max_model_len=256, **settings)
    try:
        output = llm.generate("the lazy dog", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))[0]
        return list(output.outputs[0].token_ids), output.outputs[0].text
    finally:
        llm.close()


def test_a_file_a_folder_and_a_split_file_are_served_alike(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")
    reference = build_reference("llama", None, **SIZES | {"vocab_size": VOCAB + 101})
    more = gguf_options(tmp_path / "tokenizer")
    (tmp_path / "folder").mkdir()
    (tmp_path / "split").mkdir()
    write_gguf(tmp_path / "folder" / "model.Q8_0.gguf", reference, "Q8_0", more)
    write_gguf(tmp_path / "split" / "m.gguf", reference, "Q8_0", more, split_max_tensors=7, use_temp_file=False)
    parts = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert parts[0] == f"m-00001-of-{len(parts):05d}.gguf"
    assert len(parts) > 1
    (tmp_path / "folder" / "mmproj-model.gguf").write_bytes(b"another model's")
    reference.save_pretrained(tmp_path / "tokenizer")
    want = text_of(tmp_path / "tokenizer", speculation="none")
    for path in (tmp_path / "folder" / "model.Q8_0.gguf", tmp_path / "folder", tmp_path / "split", tmp_path / "split" / parts[0]):
        assert text_of(path, speculation="none") == want
    assert text_of(tmp_path / "folder", speculation="ngram") == want
    for method in ("draft_model", "auto"):
        assert text_of(tmp_path / "split", speculation={"method": method, "model": str(tmp_path / "folder")}) == want
    spec = load_decoder(tmp_path / "folder").spec
    assert generation_defaults(tmp_path / "folder", spec) == ({"temperature": 0.25, "top_k": 7}, frozenset(spec.eos_ids))
    assert len(spec.eos_ids) == 1
    with pytest.raises(ModelError, match=r"is part 2 of .*; pass the first: m-00001"):
        load_decoder(tmp_path / "split" / parts[1])
    assert gguf.GGUFReader(tmp_path / "folder" / "model.Q8_0.gguf").tensors


@pytest.mark.parametrize(("kind", "name"), [("gptq", "GPTQ"), ("Q4_0", "Q4_0")])
def test_the_models_command_names_the_format(tmp_path: Path, kind: str, name: str) -> None:
    path, _ = written(tmp_path, kind)
    result = CliRunner().invoke(app, ["models", str(path), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["quantised"] == [name]


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.Q4_K_M.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF models; pass one of them: a\.Q4_K_M\.gguf, a\.Q8_0\.gguf"):
        load_decoder(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_the_same_model_from_the_file(tmp_path: Path, family: str) -> None:
    pytest.importorskip("gguf", reason="the gguf package writes the files")
    pytest.importorskip("accelerate", reason="Transformers reads GGUF with accelerate only")
    from transformers import AutoModelForCausalLM

    reference = build_reference(family, None, **SIZES)
    write_gguf(tmp_path / "m.gguf", reference, "Q8_0")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    reference.load_state_dict(oracle.state_dict())
    reference.save_pretrained(tmp_path / "plain")
    want: Decoder = load_decoder(tmp_path / "plain")
    for (name, a), (_, b) in zip(
        load_decoder(tmp_path / "m.gguf", LoadOptions("float32")).named_parameters(), want.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert run(make_engine(want), [make_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))])[0].seq.tokens
