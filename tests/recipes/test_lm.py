"""`recipes.pyrite lm` from folder to served model, and the figures it reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.errors import InvalidParameter
from outrider.model import load_decoder, read_spec
from outrider.train.corpus import TokenCorpus, load_tokenizer
from outrider.train.data import TokenStore
from outrider.train.export import export_model
from outrider.train.loop import compile_checked
from outrider.train.shapes import DecoderShape, new_decoder
from outrider.train.sizing import pick_device
from recipes.pyrite.cli import app, main
from recipes.pyrite.lm import greedy, heldout_loss

CPU = torch.device("cpu")
SMALL = (
    "--layers=1", "--hidden=32", "--heads=2", "--kv-heads=1", "--ffn=48", "--context=32", "--rows=4",
    "--no-compile", "--device=cpu",
)  # fmt: skip


def test_lm_end_to_end(packages: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = ["lm", str(packages), "--out", str(out), *SMALL, "--steps", "80", "--vocab", "300", "--heldout", "package2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "model.work" / "result.json").read_text())["heldout_packages"]
    assert figures["loss"] < 4.0 < 5.7
    assert abs(figures["loss"] - figures["trained"]) < 0.05
    assert set(figures["by_group"]) == {"package2"}
    config = read_spec(out)
    assert (config.vocab, config.dtype, config.eos_ids, config.tied) == (300, "bfloat16", (0,), True)
    decoder, tokenizer = load_decoder(out), load_tokenizer(out)
    text = tokenizer.decode(greedy(decoder, tokenizer.encode("def load_").ids, 12))
    assert len(text) > 4
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0]


def test_errors_reach_the_user_as_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "a.py").write_text("def function_name(argument):\n    return argument + 1\n" * 4)
    command = ["lm", str(tmp_path / "tiny"), "--out", str(tmp_path / "m"), *SMALL, "--rows=64", "--steps=5", "--vocab=270"]
    monkeypatch.setattr(sys, "argv", ["recipes.pyrite", *command])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: corpus: ")
    assert "one batch needs 2049" in line


def test_heldout_loss_of_an_untrained_model_is_the_uniform_one(prepared: TokenCorpus) -> None:
    shape = DecoderShape(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=prepared.vocab, context=32)
    decoder = new_decoder(shape.config(0), 0, CPU)
    torch.nn.init.zeros_(decoder.embedding)
    store = prepared.store("heldout_packages")
    heldout = heldout_loss(decoder, store)
    assert heldout.loss == pytest.approx(np.log(prepared.vocab), abs=1e-4)
    assert heldout.by_group == {"package3": pytest.approx(heldout.loss)}
    assert heldout_loss(decoder, store, max_rows=3).tokens == 96


def test_heldout_loss_is_counted_by_group(prepared: TokenCorpus) -> None:
    shape = DecoderShape(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=prepared.vocab, context=4)
    decoder = new_decoder(shape.config(0), 0, CPU)
    store = TokenStore(np.arange(1, 10), np.array([0, 5, 9]), ["a", "b"])
    heldout = heldout_loss(decoder, store, batch=1)
    assert heldout.tokens == 8
    assert heldout.loss == pytest.approx((heldout.by_group["a"] + heldout.by_group["b"]) / 2)


def test_export_replaces_the_whole_directory(prepared: TokenCorpus, tmp_path: Path) -> None:
    shape = DecoderShape(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=prepared.vocab, context=32, tied=False)
    decoder = new_decoder(shape.config(0), 0, CPU)
    out = tmp_path / "model"
    out.mkdir()
    (out / "stale.safetensors").write_bytes(b"old")
    export_model(decoder, prepared.directory, out)
    assert not (out / "stale.safetensors").exists()
    loaded = load_decoder(out)
    error = (loaded.layers[0].qkv.float() - decoder.layers[0].qkv).abs().max()
    assert error < 0.01 * decoder.layers[0].qkv.abs().max()


def test_a_failed_compilation_is_reported_and_left_out() -> None:
    def broken(_tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler here")

    assert compile_checked("lm", broken, lambda fast: torch.autograd.backward(fast(torch.zeros(1, 2)))) is None


def test_shapes_and_devices_are_checked() -> None:
    with pytest.raises(InvalidParameter, match="heads"):
        DecoderShape(hidden=100, heads=8).config(0)
    with pytest.raises(InvalidParameter, match="known: auto, cpu, cuda"):
        pick_device("tpu")
    assert DecoderShape().config(0).parameters == 39_583_744
