"""The comparison with other engines: the same weights for all, one process each, and what is missing is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.baselines.__main__ import left_out
from benchmarks.baselines.figures import Measured, PromptRun, Reference, ratios, record
from benchmarks.baselines.run import BaselineSetting, Worker, _loads, compare_baselines
from benchmarks.baselines.to_gguf import interleave, write_gguf
from benchmarks.baselines.weights import export_model
from outrider.bench.environment import environment
from outrider.errors import InvalidParameter
from outrider.model.bundled import bundled_model
from outrider.model.files import read_tensors
from tests.support import random_decoder, write_family

PROMPTS = ["import os\n\n\ndef read(path):\n    ", "class Stack:\n", "def add(a, b):\n"]


FULL = {"prompts": 4, "steady": None, "tok_s_steady": None}
PLAIN = [("outrider", "none"), ("llama.cpp", "plain")]


def test_interleaved_rotation_of_interleaved_rows_is_the_rotation_of_halves() -> None:
    """ggml turns neighbouring pairs of a head where the weights mean its two halves."""
    heads, width = 3, 8
    weight, x = torch.randn(heads * width, 5), torch.randn(5)
    angle = torch.arange(width // 2) * 0.7 + 0.3
    halves = (weight @ x).reshape(heads, 2, width // 2)
    a, b = halves[:, 0], halves[:, 1]
    expected = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    pairs = (interleave(weight, heads) @ x).reshape(heads, width // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    result = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_a_gguf_file_reads_back(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    folder = export_model(str(bundled_model() / "draft"), tmp_path / "draft")
    write_gguf(folder, tmp_path / "draft.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    fields = {
        name: reader.fields[f"llama.{name}"].contents() for name in ("embedding_length", "attention.head_count", "block_count")
    }
    assert fields == {"embedding_length": 256, "attention.head_count": 4, "block_count": 2}
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 8192
    stored = {each.name: torch.tensor(gguf.quants.dequantize(each.data, each.tensor_type)) for each in reader.tensors}
    ours = {name: tensor.float() for name, tensor, _ in read_tensors(folder)}
    assert len(stored) == len(ours)
    pairs = {
        "token_embd.weight": ours["model.embed_tokens.weight"],
        "output_norm.weight": ours["model.norm.weight"],
        "blk.1.attn_q.weight": interleave(ours["model.layers.1.self_attn.q_proj.weight"], 4),
        "blk.1.attn_v.weight": ours["model.layers.1.self_attn.v_proj.weight"],
        "blk.0.ffn_down.weight": ours["model.layers.0.mlp.down_proj.weight"],
    }
    for name, tensor in pairs.items():
        if kind == "BF16":
            assert torch.equal(stored[name], tensor), name
        else:
            assert (stored[name] - tensor).abs().max() <= tensor.abs().max() / 127, name


def test_stretched_frequencies_are_written_as_factors(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from outrider.model.load import save_decoder

    folder = write_family(tmp_path / "llama3", "llama3", hidden_size=64)
    decoder = random_decoder(folder)
    save_decoder(decoder, folder)
    write_gguf(folder, tmp_path / "llama3.gguf", "BF16")
    factors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "llama3.gguf").tensors}["rope_freqs.weight"]
    rope, width = decoder.spec.attention.rope, decoder.spec.head_dim
    plain = [rope.theta ** (-2.0 * i / width) for i in range(width // 2)]
    assert [p / f for p, f in zip(plain, factors, strict=True)] == pytest.approx(rope.variants(width)[0].frequencies)


def test_transformers_reads_the_same_model_and_the_absent_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError(\"No module named 'llama_cpp'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    setting = BaselineSetting(
        ["outrider", "transformers", "llama.cpp"], ["none"], PROMPTS, tokens=8, prefill=16, repeats=1, threads=1, plain_only=True
    )
    result = compare_baselines("pyrite", setting, lambda _: None)
    rows = {(row["peer"], row["kind"]): row for row in result["rows"]}
    assert set(rows) == {("outrider", "bf16"), ("outrider", "int8"), ("transformers", "bf16")}
    assert all(row["failure"] is None and row["tok_s"] > 0 and row["prefill_s"] > 0 for row in rows.values())
    assert rows["transformers", "bf16"]["agrees"] >= 0.5
    assert (rows["transformers", "bf16"]["parts_at"] or 0) < 0.5  # nats: rounding turns near ties alone
    assert rows["outrider", "int8"]["parts_at"] is None
    assert all(row["prompts"] == row["steady"] == len(row["decode_s"]) == 3 for row in rows.values())  # 8 tokens cannot loop
    assert "pip install 'outrider[baselines]'" in result["missing"]["llama.cpp"]
    assert result["ratios"]["pyrite"]["best bf16 over Transformers' best mode"] > 0
    assert result["ratios"]["pyrite"]["plain bf16 over llama.cpp BF16"] is None
    assert {"outrider", "transformers", "torch"} <= set(result["versions"])


def test_on_a_gpu_outrider_and_transformers_are_compared(tmp_path: Path) -> None:
    """What the processes have to load, and the ratios that only a GPU's modes have."""
    missing: dict[str, str] = {}
    setting = BaselineSetting(methods=["none", "auto"], device="cuda")
    loads = list(_loads(export_model(str(bundled_model() / "draft"), tmp_path / "m"), setting, missing))
    assert [(each["peer"], each["kind"], each["device"]) for each in loads] == [
        ("outrider", "bf16", "cuda"), ("transformers", "bf16", "cuda")
    ]  # fmt: skip
    assert loads[0]["modes"] == ["none", "auto"]
    assert loads[1]["modes"] == ["plain", "compiled", "lookup:10"]  # this model brings no draft
    assert set(missing) == {"llama.cpp", "openvino"}
    speeds = {"plain": 50.0, "compiled": 100.0, "draft": 80.0}
    rows = [
        {"peer": "transformers", "kind": "bf16", "mode": mode, "tok_s": each, "prefill_s": 0.1} | FULL
        for mode, each in speeds.items()
    ]
    rows.append({"peer": "outrider", "kind": "bf16", "mode": "none", "tok_s": 250.0, "prefill_s": 0.1} | FULL)
    result = ratios(rows)
    assert result["plain bf16 over Transformers eager"] == 5.0
    assert result["plain bf16 over Transformers compiled"] == 2.5


def test_an_engine_that_dies_fails_alone(tmp_path: Path) -> None:
    load = {"peer": "llama.cpp", "kind": "bf16", "threads": 1}
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho illegal instruction >&2\nexit 132\n")
    script.chmod(0o755)
    with Worker(load, str(script), tmp_path) as worker:
        assert worker.answer == {"error": "the process ended: illegal instruction"}


def test_a_fault_inside_an_engine_is_its_answer(tmp_path: Path) -> None:
    with Worker({"peer": "nobody", "kind": "bf16", "threads": 1}, sys.executable, tmp_path) as worker:
        assert worker.answer == {"error": "KeyError: 'nobody'"}


def test_the_ratios_are_of_what_they_say() -> None:
    def row(peer: str, kind: str, mode: str, tok_s: float | None, prefill_s: float | None = None) -> dict[str, object]:
        return {"peer": peer, "kind": kind, "mode": mode, "tok_s": tok_s, "prefill_s": prefill_s} | FULL

    rows = [
        row("outrider", "bf16", "none", 300, 0.1),
        row("outrider", "bf16", "auto", 900),
        row("outrider", "int8", "none", 400, 0.05),
        row("llama.cpp", "bf16", "plain", 200, 0.2),
        row("llama.cpp", "bf16", "lookup:10", 250),
        row("llama.cpp", "int8", "plain", 350, 0.1),
        row("openvino", "bf16", "lookup:10", 300),
        row("transformers", "bf16", "draft", 60),
        row("transformers", "bf16", "plain", None),
    ]
    expected = {
        "plain bf16 over llama.cpp BF16": 1.5,
        "best bf16 over the fastest peer's best mode in bf16": 3.0,
        "best bf16 over Transformers' best mode": 15.0,
        "plain int8 over llama.cpp Q8_0": round(400 / 350, 3),
        "best int8 over the fastest peer's best mode in int8": round(400 / 350, 3),
        "best int8 over Transformers' best mode": round(400 / 60, 3),
        "prefill bf16 over llama.cpp BF16": 2.0,
        "prefill int8 over llama.cpp Q8_0": 2.0,
    }
    assert ratios(rows) == expected
    judged = ratios([each | {"steady": 4, "tok_s_steady": each["tok_s"] and each["tok_s"] / len(each["peer"])} for each in rows])
    assert {name: each for name, each in judged.items() if not name.endswith(", no loops")} == expected
    assert judged["plain bf16 over llama.cpp BF16, no loops"] == round(1.5 * 9 / 8, 3)
    assert judged["best bf16 over the fastest peer's best mode in bf16, no loops"] == round(900 / 8 / (300 / 8), 3)
    assert len(judged) == 2 * len(expected) - 2  # a prompt is read the same whatever follows it
    few = ratios([each | {"prompts": 2} for each in rows])
    assert few["prefill bf16 over llama.cpp BF16"] == 2.0
    assert [each for name, each in few.items() if not name.startswith("prefill")] == [None] * 6


LOOP, CALM = [1, 2, 3, 4] * 8, list(range(32))


def test_prompts_whose_plain_output_loops_are_counted_apart() -> None:
    """For everyone the same prompts, whatever an engine itself wrote there."""
    texts = [CALM, LOOP, CALM, CALM]
    seconds = [[1.0, 0.1, 2.0, 3.0], [2.0, 0.1, 2.0, 5.0]]
    runs = [[PromptRun(s, s + 1, LOOP if i == 3 else CALM) for i, s in enumerate(each)] for each in seconds]
    row = record("m", Measured("llama.cpp", "bf16", "plain", runs, [0.3, 0.1, 0.2]), Reference(texts))
    assert row["tok_s"] == round((124 / 6.1 + 124 / 9.1) / 2, 2)
    assert row["tok_s_steady"] == round((93 / 6 + 93 / 9) / 2, 2)
    assert row["spread_steady"] == [round(93 / 9, 2), round(93 / 6, 2)]
    assert row["wall_tok_s"] == round((128 / 10.1 + 128 / 13.1) / 2, 2)
    assert (row["prompts"], row["steady"], row["looping"]) == (4, 3, [3])
    assert row["decode_s"] == [1.5, 0.1, 2.0, 4.0]
    assert row["prefill_s"] == 0.2
    assert left_out([row]) == ["m, bf16: 4 prompts, 1 of which loop; no loops: the other 3"]


def test_fewer_than_three_prompts_that_do_not_loop_give_no_ratio() -> None:
    runs = [[PromptRun(1.0, 2.0, CALM)] * 4]
    reference = Reference([CALM, LOOP, CALM, LOOP])
    rows = [record("m", Measured(engine, "bf16", mode, runs), reference) for engine, mode in PLAIN]
    assert [row["tok_s_steady"] for row in rows] == [None, None]
    result = ratios(rows)
    assert result["plain bf16 over llama.cpp BF16"] == 1.0
    assert result["plain bf16 over llama.cpp BF16, no loops"] is None
    assert "no ratio from fewer than 3" in left_out(rows)[0]


def test_loops_of_random_weights_are_not_counted() -> None:
    runs = [[PromptRun(1.0, 2.0, LOOP)] * 3]
    rows = [
        record("40m", Measured(engine, "bf16", mode, runs), Reference([LOOP] * 3, finds_loops=False)) for engine, mode in PLAIN
    ]
    assert ratios(rows)["plain bf16 over llama.cpp BF16"] == 1.0
    assert not [name for name in ratios(rows) if "no loops" in name]
    assert left_out(rows) == ["40m, bf16: 3 prompts"]


def test_where_texts_part_the_lead_of_our_choice_is_told() -> None:
    """A near tie is rounding; a choice the model holds unlikely is a fault."""
    ours = [[5, 6, 7], [5, 6, 7]]
    top = [[{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.72}, {7: -0.1, 1: -4.0}]] * 2

    def parts(*texts: list[int]) -> tuple[float | None, float | None]:
        row = record(
            "m", Measured("openvino", "int8", "plain", [[PromptRun(1.0, 2.0, ids) for ids in texts]]), Reference(ours, top)
        )
        return row["agrees"], row["parts_at"]

    assert parts([5, 6, 7], [5, 6, 7]) == (1.0, None)
    assert parts([5, 8, 7], [5, 6, 7]) == (round((1 / 3 + 1) / 2, 3), 0.02)
    assert parts([5, 8, 7], [2, 6, 7]) == (round((1 / 3 + 0) / 2, 3), 2.9)  # not among the likeliest: as the last of them


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="40m, 150m, 1.1b"):
        compare_baselines("nobody", BaselineSetting(), lambda _: None)
    with pytest.raises(InvalidParameter, match="llama.cpp, openvino"):
        compare_baselines("40m", BaselineSetting(["vllm"]), lambda _: None)


def test_results_name_files_without_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "/usr/bin/outrider",
        "peers",
        "--prompts",
        "/data/some where/code.jsonl",
        "--python",
        "openvino=/opt/venv/bin/python",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--models", "1.1b"])
    assert environment()["command"] == "outrider peers --prompts code.jsonl --python openvino=python --models 1.1b"
