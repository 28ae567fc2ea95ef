"""The `train` commands from folder to written drafter, and their figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.heads import EagleHead, load_block, load_eagle, load_medusa, load_mtp
from outrider.model import load_decoder, read_spec
from outrider.train import run as run_module
from outrider.train.acceptance import agreement, heldout_rows
from outrider.train.cli import app
from outrider.train.corpus import TokenCorpus, document_end, load_tokenizer, require_same_tokenizer
from outrider.train.data import TrainingRows
from outrider.train.distill import Distillation
from outrider.train.frozen import FrozenTarget
from outrider.train.generate import Writing, document_starts, merged, write_text, write_until
from outrider.train.loop import Budget, LoopOptions
from outrider.train.losses import divergence
from outrider.train.networks import TrainableDraftModel, network_loss
from outrider.train.optim import OptimOptions
from outrider.train.shapes import DecoderShape, EagleShape, MedusaShape, new_draft, new_eagle, new_medusa, set_vocabulary
from outrider.train.task import TrainingTask
from recipes.pyrite.cli import app as recipe
from recipes.pyrite.lm import greedy
from recipes.pyrite.packages import environment as recipe_environment
from tests.support.corpus import module_text

CPU = torch.device("cpu")
COMMON = ("--rows=4", "--no-compile", "--device=cpu", "--adam-lr=0.01", "--lr=0.02")


def learn(kind: str, target: Path, prepared: TokenCorpus, out: Path, *options: str) -> dict[str, float]:
    """Run a command; its figures."""
    command = [kind, "--data", str(prepared.directory), "--target", str(target), "--out", str(out), *COMMON, *options]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures = json.loads((out.with_name(out.name + ".work") / "result.json").read_text())
    assert "tokens per round" in result.output
    assert [row["temperature"] for row in figures["served"]] == [0.0, 0.8]
    assert all((row["tokens_per_round_all"] or 1.0) >= 1.0 for row in figures["served"])
    return figures


@pytest.fixture
def foreign(target: Path, tmp_path: Path) -> Path:
    """The target with an end-of-sequence token of another name, and no chat template."""
    directory = tmp_path / "foreign"
    shutil.copytree(target, directory)
    (directory / "chat_template.jinja").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = directory / name
        path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    return directory


@pytest.mark.parametrize("named_by", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_documents_end_with_the_model_s_end_of_sequence(foreign: Path, named_by: str) -> None:
    """The id is 0 here, whichever file names it first."""
    for name in ("config.json", "generation_config.json"):
        if name != named_by:
            data = json.loads((foreign / name).read_text())
            data.pop("eos_token_id", None)
            (foreign / name).write_text(json.dumps(data))
    assert document_end(foreign) == 0
    if named_by != "config.json":
        assert FrozenTarget.load(foreign, CPU).config.eos_ids == (0,)


def test_heads_are_trained_for_a_tokenizer_of_another_make(foreign: Path, packages: Path, tmp_path: Path) -> None:
    command = ["medusa", str(packages), "--target", str(foreign), "--out", str(tmp_path / "heads"), "--steps=2", "--context=32"]
    result = CliRunner().invoke(app, [*command, *COMMON], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert load_tokenizer(tmp_path / "heads.work" / "corpus").token_to_id("</s>") == 0


def test_a_model_that_names_no_end_of_sequence_is_refused(foreign: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        data = json.loads((foreign / name).read_text())
        data.pop("eos_token_id", None)
        (foreign / name).write_text(json.dumps(data))
    path = foreign / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("eos_token", "pad_token")}))
    with pytest.raises(ModelError, match="eos_token_id"):
        document_end(foreign)


def test_train_draft(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    size = "--layers=1 --hidden=16 --heads=2 --kv-heads=1 --ffn=24"
    short = learn("draft", target, prepared, tmp_path / "short", *size.split(), "--steps=5")
    figures = learn("draft", target, prepared, tmp_path / "draft", *size.split(), "--steps=120", "--write-tokens=1000")
    assert figures["heldout"]["loss"] < 0.7 * short["heldout"]["loss"]
    assert figures["heldout"]["by_position"][0] > 0.4
    config = read_spec(tmp_path / "draft")
    assert (config.depth, config.hidden, config.vocab) == (1, 16, prepared.vocab)
    assert load_decoder(tmp_path / "draft").spec.context == 32
    assert (tmp_path / "draft" / "tokenizer.json").exists()
    assert (tmp_path / "draft.work" / "written.bin").exists()


@pytest.mark.parametrize("form", ["eagle3", "eagle1"])
def test_train_eagle(form: str, target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    options = (f"--form={form}", "--depths=4", "--taps=1,2,4")
    short = learn("eagle", target, prepared, tmp_path / "short", *options, "--steps=5")
    figures = learn("eagle", target, prepared, tmp_path / "eagle", *options, "--steps=120")
    assert figures["heldout"]["loss"] < 0.7 * short["heldout"]["loss"]
    assert figures["heldout"]["by_position"][0] > 0.4
    assert figures["served"][0]["tokens_per_round_all"] > 1.3
    head = load_eagle(tmp_path / "eagle", load_decoder(target))
    assert head.config.form == form
    assert head.config.taps == ((1, 2, 4) if form == "eagle3" else (4,))
    assert sorted(path.name for path in (tmp_path / "eagle").iterdir()) == ["config.json", "model.safetensors"]


def test_train_mtp(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    short = learn("mtp", target, prepared, tmp_path / "short", "--steps=5")
    figures = learn("mtp", target, prepared, tmp_path / "mtp", "--steps=120")
    assert figures["heldout"]["loss"] < 0.7 * short["heldout"]["loss"]
    assert figures["heldout"]["by_position"][0] > 0.4
    assert figures["served"][0]["tokens_per_round_all"] > 1.3
    head = load_mtp(tmp_path / "mtp", load_decoder(target))
    assert head.config.taps == (4,)
    assert sorted(path.name for path in (tmp_path / "mtp").iterdir()) == ["config.json", "model.safetensors"]


def test_a_target_on_the_hub_is_fetched(
    target: Path, prepared: TokenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, **_: object) -> str:
        asked.append(name)
        return str(target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    learn("medusa", Path("owner/name"), prepared, tmp_path / "medusa", "--heads=1", "--steps=1")
    assert asked
    assert set(asked) == {"owner/name"}


def test_train_medusa(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    short = learn("medusa", target, prepared, tmp_path / "short", "--heads=2", "--steps=5")
    figures = learn("medusa", target, prepared, tmp_path / "medusa", "--heads=2", "--steps=120")
    assert figures["heldout"]["loss"] < 0.8 * short["heldout"]["loss"]
    heads = load_medusa(tmp_path / "medusa", load_decoder(target))
    assert (heads.config.heads, heads.config.own_output) == (2, False)
    assert len(heads.config.choices) == 64


@pytest.mark.parametrize("kind", ["", "--no-causal --no-from-anchor --markov=0", "--confidence --markov=8 --draft-vocab=200"])
def test_train_dflash(kind: str, target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    options = ("--block=4", "--blocks=8", "--taps=1,2,4", "--mask=9", *kind.split())
    short = learn("dflash", target, prepared, tmp_path / "short", *options, "--steps=5")
    figures = learn("dflash", target, prepared, tmp_path / "dflash", *options, "--steps=120")
    assert figures["heldout"]["loss"] < 0.8 * short["heldout"]["loss"]
    assert figures["heldout"]["by_position"][0] > 0.3
    head = load_block(tmp_path / "dflash", load_decoder(target))
    assert (head.config.block, head.config.taps, head.config.mask) == (4, (1, 2, 4), 9)
    assert (head.config.causal, head.config.confidence) == ("--no-causal" not in kind, "--confidence" in kind)
    assert (head.pairs is None) == ("--markov=0" in kind)
    assert head.config.draft_vocab == (200 if "vocab" in kind else None)


def test_nothing_is_written_to_measure_with_before_the_first_step(
    target: Path, prepared: TokenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that takes minutes: first the steps are shown, and what they made is there if the user waits no longer."""
    seen = list[tuple[str, bool]]()

    def impatient(*_: object) -> None:
        metrics = (tmp_path / "eagle.work" / "metrics.jsonl").read_text().splitlines()
        seen.append((json.loads(metrics[0])["kind"], (tmp_path / "eagle" / "config.json").exists()))
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "agreement", impatient)
    command = ["eagle", "--data", str(prepared.directory), "--target", str(target), "--out", str(tmp_path / "eagle"), *COMMON]
    assert CliRunner().invoke(app, [*command, "--depths=4", "--steps=2"]).exit_code == 130
    assert seen == [("train", True)]


def test_a_resumed_run_gives_the_same_head(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    options = ("--depths=2", "--taps=1,2,4", "--checkpoint-steps=5")
    learn("eagle", target, prepared, tmp_path / "straight", *options, "--steps=12")
    frozen = FrozenTarget.load(target, CPU)
    network = new_eagle(frozen, EagleShape(taps=(1, 2, 4)), "mix", 0, 2)
    loop = LoopOptions(Budget(steps=12), tmp_path / "broken.work", rows=4, checkpoint_steps=5)
    run = Distillation(frozen, {"eagle": network})
    calls = []

    def fail_at_eight(features: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError("gone")
        return network_loss(network, features)  # type: ignore[arg-type]

    run._losses["eagle"] = fail_at_eight
    with pytest.raises(MemoryError):
        run.train(TrainingRows(prepared.store("train"), 32, 0), OptimOptions(lr=0.02, adam_lr=0.01), loop)
    learn("eagle", target, prepared, tmp_path / "broken", *options, "--steps=12")
    straight, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "broken"))
    assert straight == resumed


def test_another_tokenizer_is_refused(target: Path, packages: Path, tmp_path: Path) -> None:
    corpus = ["corpus", str(packages), "--out", str(tmp_path / "other"), "--vocab=300", "--workers=1"]
    assert CliRunner().invoke(recipe, corpus).exit_code == 0
    environment = recipe_environment() | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outrider.train", "eagle", "--data", str(tmp_path / "other"), "--target", str(target)]
    done = subprocess.run([*command, "--out", str(tmp_path / "e"), "--steps=1"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("error: tokenizer: ")
    assert f"another tokenizer than that of {target} (300 and 320 tokens); pass the text itself" in done.stderr
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_the_commands_share_the_flags_of_the_task(kind: str) -> None:
    (command,) = [command for name, command in typer.main.get_command(app).commands.items() if name == kind]
    names = {parameter.name for parameter in command.params}
    assert {field.name for field in fields(TrainingTask)} <= names


def test_drafters_are_trained_from_jsonl_and_from_a_text_file(target: Path, tmp_path: Path) -> None:
    lines = [{"text": module_text(i)} for i in range(6)]
    lines += [{"prompt": "def f():\n", "completion": module_text(i)} for i in range(6, 9)]
    lines += [{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": module_text(9)}]}]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "book.txt").write_text("".join(module_text(i) for i in range(8)))
    for source, kind in (("lines.jsonl", "medusa"), ("book.txt", "eagle")):
        command = [kind, str(tmp_path / source), "--target", str(target), "--out", str(tmp_path / kind), "--steps=2", *COMMON]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert "served at temperature 0:" in result.output
        assert (tmp_path / kind / "config.json").exists()
        assert (tmp_path / f"{kind}.work" / "metrics.html").exists()


def test_only_a_drafter_s_folder_is_replaced(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    for out in (tmp_path / "notes", target, target.parent):
        command = ["medusa", "--data", str(prepared.directory), "--target", str(target), "--out", str(out), "--steps=1", *COMMON]
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, InvalidParameter)
        assert "is no drafter's folder" in str(result.exception)
    assert (tmp_path / "notes" / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["lm", "corpus", "medusa-tree"])
def test_commands_that_moved_say_where(name: str) -> None:
    result = CliRunner().invoke(app, [name, "folder", "--steps=5", "--help"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"python -m recipes.pyrite {name}" in result.stderr


def test_settings_that_cannot_be(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    def refused(kind: str, *options: str) -> str:
        command = [kind, "--data", str(prepared.directory), "--target", str(target), "--out", str(tmp_path / "x"), *COMMON]
        result = CliRunner().invoke(app, [*command, "--steps=1", *options])
        assert isinstance(result.exception, OutriderError)
        return str(result.exception)

    assert "9 is not between 0 and the target's 4 layers" in refused("eagle", "--taps=1,2,9")
    assert "not a list of numbers" in refused("eagle", "--taps=a,b")
    assert "known: eagle1, eagle3" in refused("eagle", "--form=eagle9")
    assert "known: greedy, kl, lk, mix" in refused("draft", "--loss=other", "--hidden=16", "--heads=2", "--kv-heads=1")
    assert "not between 1 and the target's 32" in refused("medusa", "--context=64")
    assert "one batch needs" in refused("medusa", "--rows=100000")


def test_networks_trained_together_end_as_they_do_alone(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    def make() -> tuple[FrozenTarget, TrainableDraftModel]:
        frozen = FrozenTarget.load(target, CPU)
        return frozen, new_draft(frozen, DecoderShape(1, 16, 2, 1, 24, context=32), "mix", 0)

    def options(name: str) -> LoopOptions:
        return LoopOptions(Budget(steps=6), tmp_path / name, rows=2, clip=0.0)

    rows, rates = TrainingRows(prepared.store("train"), 32, 0), OptimOptions(lr=0.01, adam_lr=0.01)
    frozen, alone = make()
    Distillation(frozen, {"draft": alone}).train(rows, rates, options("alone"))
    frozen, beside = make()
    medusa = new_medusa(frozen, MedusaShape(2, 1), "kl")
    Distillation(frozen, {"draft": beside, "medusa": medusa}).train(rows, rates, options("beside"))
    for one, other in zip(alone.module.parameters(), beside.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_reduced_vocabulary_is_the_frequent_part(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    network = new_eagle(frozen, EagleShape(draft_vocab=50, taps=(1, 2, 4)), "mix", 0, 2)
    counts = torch.bincount(torch.from_numpy(prepared.store("train").ids.astype(np.int64)), minlength=prepared.vocab)
    set_vocabulary(network, frozen, counts)
    ids = network.vocab_ids
    assert ids is not None
    assert int(counts[ids].min()) >= int(counts.topk(51).values[-1])
    assert torch.equal(network.module.output, frozen.decoder.embedding[ids])
    rows = heldout_rows(prepared.store("heldout_packages"), 32, 4)
    loss = network_loss(network, frozen.reading(network.taps).features(rows))
    torch.autograd.backward(loss)
    assert network.module.output.grad is not None
    result = agreement(network, frozen.reading(network.taps), rows)
    assert 0.0 <= result.by_position[0] <= 1.0


def test_divergences() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, 9, generator=generator) for _ in range(2))
    distributions = torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    kl = torch.distributions.kl_divergence(*distributions)
    variation = 0.5 * (distributions[0].probs - distributions[1].probs).abs().sum(-1)
    torch.testing.assert_close(divergence("kl", p, q), kl.mean())
    torch.testing.assert_close(divergence("lk", p, q), -(1 - variation).log().mean())
    weight = torch.exp(-3 * (1 - variation).mean())
    torch.testing.assert_close(divergence("mix", p, q), weight * kl.mean() + (1 - weight) * variation.mean())
    best = p.argmax(-1, keepdim=True)
    torch.testing.assert_close(divergence("greedy", p, q), -torch.log_softmax(q, -1).gather(-1, best).mean())
    counted = torch.tensor([1.0, 0, 0, 1, 0, 0])
    torch.testing.assert_close(divergence("kl", p, q, counted), (kl[0] + kl[3]) / 2)
    assert float(divergence("mix", p, p)) == pytest.approx(0.0, abs=1e-6)
    parts = [divergence("mix", p[depth::2], q[depth::2]) for depth in range(2)]
    torch.testing.assert_close(divergence("mix", p, q, depths=2), sum(parts) / 2)


@torch.no_grad()
def test_the_loss_may_be_of_some_rows_alone(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    network = new_medusa(frozen, MedusaShape(heads=2), "kl")
    features = frozen.reading(network.taps).features(heldout_rows(prepared.store("heldout_packages"), 32, 2))
    span = features.span(2)
    parts = [
        divergence("kl", features.cut(features.logits, depth + 1, span)[::4], network.logits(hidden[::4], depth))
        for depth, hidden in enumerate(network.chain(features, 2))
    ]
    loss = network_loss(replace(network, every=4), features)
    assert float(loss) == pytest.approx(float((parts[0] + 0.8 * parts[1]) / 1.8), rel=0.02)  # its products may be bf16


def test_lean_losses_are_the_same(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    network = new_eagle(frozen, EagleShape(taps=(1, 2, 4)), "mix", 0, 3)
    features = frozen.reading(network.taps).features(heldout_rows(prepared.store("heldout_packages"), 32, 2))
    gradients = []
    for lean in (False, True):
        network.module.zero_grad()
        torch.autograd.backward(network_loss(network, features, lean))
        gradients.append([param.grad.clone() for param in network.module.parameters() if param.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_text_is_written_as_the_target_decodes(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    prompts = torch.from_numpy(document_starts(prepared.store("train"), 2, 8, seed=1))
    wide = frozen.decoder.float()
    written = write_text(wide, prompts, 12, torch.zeros(2), seed=0)
    for row, prompt in zip(written.tokens.tolist(), prompts.tolist(), strict=True):
        expected = greedy(wide, prompt, 12)
        assert row[8 : 8 + len(expected)] == expected
    heated = [write_text(wide, prompts, 12, torch.ones(2), seed=s).tokens for s in (1, 1, 2)]
    assert torch.equal(heated[0], heated[1])
    assert not torch.equal(heated[0], heated[2])


def test_written_text_becomes_documents(target: Path, prepared: TokenCorpus) -> None:
    frozen = FrozenTarget.load(target, CPU)
    store = prepared.store("train")
    written_text = write_until(frozen.decoder, store, Writing(tokens=300, rows=8, length=24, prompts=(8,)))
    assert written_text.tokens >= 300
    assert all(written_text.ids[end - 1] == 0 for end in written_text.starts[1:])
    mixed = merged(store, written_text, 0.5)
    assert mixed.tokens == int(mixed.starts[-1]) == len(mixed.ids)
    written = sum(length for length, group in zip(np.diff(mixed.starts), mixed.groups, strict=True) if group == "written")
    assert 0.4 < written / mixed.tokens < 0.6


def test_the_exported_weights_are_what_is_evaluated(target: Path, prepared: TokenCorpus, tmp_path: Path) -> None:
    frozen = FrozenTarget.load(target, CPU)
    network = new_eagle(frozen, EagleShape(taps=(1, 2, 4)), "mix", 0, 2)
    network.export(target, tmp_path / "head")
    again = network.loaded(tmp_path / "head", frozen)
    assert isinstance(again.module, EagleHead)
    assert again.module.fc.dtype == torch.bfloat16
    torch.testing.assert_close(again.module.fc.float(), network.module.fc, atol=2e-3, rtol=0.02)


def test_the_tokenizer_check_accepts_the_target_s_tokenizer(target: Path, prepared: TokenCorpus) -> None:
    require_same_tokenizer(target, prepared)
    with pytest.raises(InvalidParameter, match="taps"):
        FrozenTarget.load(target, CPU).reading((5,))
