"""The loop: budgets, resuming with the same result, and disks that fill up."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.errors import InvalidParameter, ModelError, OutriderError
from outrider.train import loop as loop_module
from outrider.train.checkpoint import Position, guarded_write, load_checkpoint, save_checkpoint
from outrider.train.corpus import TokenCorpus
from outrider.train.data import TrainingRows
from outrider.train.loop import Budget, LoopOptions, Schedule, TrainingOutcome, train
from outrider.train.optim import OptimOptions, build_optimizers
from outrider.train.progress import Report, plot_panels
from outrider.train.shapes import DecoderShape, new_decoder
from recipes.pyrite.cli import app
from recipes.pyrite.lm import LmTask
from recipes.pyrite.packages import environment as recipe_environment

CPU = torch.device("cpu")


def run(prepared: TokenCorpus, options: LoopOptions, seed: int = 0, lr: float = 0.02) -> tuple[TrainingOutcome, torch.nn.Module]:
    shape = DecoderShape(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=prepared.vocab, context=32)
    decoder = new_decoder(shape.config(0), seed, CPU)
    task = LmTask(decoder, {"heldout": prepared.store("heldout_packages")}, eval_rows=4)
    optimizers = build_optimizers(decoder, OptimOptions(lr=lr, adam_lr=0.01))
    return train(task, TrainingRows(prepared.store("train"), 32, seed), optimizers, options), decoder


def steps(directory: Path, count: int, **fields: object) -> LoopOptions:
    base = LoopOptions(Budget(steps=count), directory, rows=4, checkpoint_steps=5)
    return replace(base, **fields)  # type: ignore[arg-type]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_schedule_rises_holds_and_falls() -> None:
    schedule = Schedule(warmup=0.1, decay=0.5)
    assert schedule.factor(0.05) == pytest.approx(0.5)
    assert schedule.factor(0.3) == 1.0
    assert schedule.factor(0.75) == pytest.approx(0.5)
    assert schedule.factor(1.0) == 0.0
    assert schedule.factor(0.0) > 0.0


def test_a_budget_is_steps_or_seconds() -> None:
    with pytest.raises(InvalidParameter):
        Budget()
    with pytest.raises(InvalidParameter):
        Budget(1, 1.0)
    with pytest.raises(InvalidParameter, match="above 0"):
        Budget(seconds=-1.0)
    assert Budget(seconds=10.0).progress(Position(99, 5.0)) == 0.5


def test_the_first_step_is_reported_at_once(prepared: TokenCorpus, tmp_path: Path) -> None:
    run(prepared, steps(tmp_path, 3, log_every_s=1e6))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 3]


@pytest.mark.parametrize(("speed", "shown"), [(412.6, " 413 tok/s"), (8200.0, " 8,200 tok/s"), (123456.0, " 123k tok/s")])
def test_the_speed_of_a_cpu_is_a_number_too(speed: float, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Report("lm", tmp_path / "metrics.jsonl").train({"step": 1, "loss": 3.0, "tokens_per_s": speed}, 0.1, 9.0)
    assert shown in capsys.readouterr().out


def test_a_step_is_evaluated_once(prepared: TokenCorpus, tmp_path: Path) -> None:
    run(prepared, steps(tmp_path, 3, eval_every_s=1e-9))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "eval"] == [1, 2, 3]


def test_the_plot_has_a_panel_for_each_unit() -> None:
    records = [
        {"kind": "train", "step": 1, "loss": 3.0},
        {"kind": "eval", "step": 1, "eagle_loss": 2.5, "eagle_first": 0.4, "eagle_tokens_per_round": 1.8},
    ]
    assert plot_panels(records) == {
        "nats per token": {"train": [(1, 3.0)], "eagle_loss": [(1, 2.5)]},
        "share of first tokens right": {"eagle_first": [(1, 0.4)]},
        "tokens per round": {"eagle_tokens_per_round": [(1, 1.8)]},
    }


def test_loss_falls_and_metrics_are_written(prepared: TokenCorpus, tmp_path: Path) -> None:
    outcome, _ = run(prepared, steps(tmp_path, 60, log_every_s=0.0))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 60
    assert losses[0] > 5.0
    assert losses[-1] < 3.0
    assert outcome.evaluation["heldout"] < 4.0
    assert outcome.position.tokens == 60 * 4 * 32


def test_micro_batches_give_the_same_update(prepared: TokenCorpus, tmp_path: Path) -> None:
    _, full = run(prepared, steps(tmp_path / "a", 3))
    _, parts = run(prepared, steps(tmp_path / "b", 3, micro_rows=1))
    for one, other in zip(full.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def forwards_take(seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A made-up clock for the training loop, on which every forward takes so long. Returns the losses, as they come."""
    now, losses = [100.0], list[float]()
    # of that module alone: an event loop that idles in another thread would compute its next timer with this clock
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    task_loss = LmTask.loss

    def slow(self: LmTask, tokens: torch.Tensor) -> torch.Tensor:
        now[0] += seconds
        loss = task_loss(self, tokens)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(LmTask, "loss", slow)
    return losses


def test_a_time_budget_ends_in_time(prepared: TokenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are as many as the time allows; the loss on held-out text is computed after them."""
    forwards_take(0.125, monkeypatch)
    outcome, _ = run(prepared, LoopOptions(Budget(seconds=1.0), tmp_path, rows=4))
    assert 1.0 <= outcome.position.seconds <= 1.125
    assert 1 <= outcome.position.step <= 8


def test_a_step_ends_when_the_time_is_up(prepared: TokenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step longer than the whole budget: it ends after the forward in which the time runs out, with the mean of what it saw."""
    losses = forwards_take(1.0, monkeypatch)

    def descent(module: torch.nn.Module, options: OptimOptions) -> list[torch.optim.Optimizer]:
        """Steps as long as the gradients are, which those of Muon and Adam are not."""
        return [torch.optim.SGD([{"params": list(module.parameters()), "peak": 100.0}], lr=100.0)]

    monkeypatch.setattr(sys.modules[__name__], "build_optimizers", descent)
    options = LoopOptions(Budget(seconds=2.5), tmp_path, rows=16, micro_rows=2, clip=0.0)
    outcome, partly = run(prepared, options)
    assert (outcome.position.step, outcome.position.tokens) == (1, 3 * 2 * 32)
    assert outcome.loss == pytest.approx(sum(losses) / 3)
    _, whole = run(prepared, steps(tmp_path / "whole", 1, rows=6, micro_rows=2, clip=0.0))
    for one, other in zip(partly.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_an_interrupted_run_resumes_to_the_same_weights(
    prepared: TokenCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, straight = run(prepared, steps(tmp_path / "straight", 17))
    batch = TrainingRows.batch

    def fail_at_12(self: TrainingRows, step: int, rows: int) -> object:
        if step == 12:
            raise MemoryError("gone")
        return batch(self, step, rows)

    monkeypatch.setattr(TrainingRows, "batch", fail_at_12)
    with pytest.raises(MemoryError):
        run(prepared, steps(tmp_path / "broken", 17))
    monkeypatch.undo()
    outcome, resumed = run(prepared, steps(tmp_path / "broken", 17), seed=0)
    assert outcome.position.step == 17
    assert same(straight, resumed)
    _, other = run(prepared, steps(tmp_path / "other", 17), seed=1)
    assert not same(straight, other)


def test_a_killed_process_resumes_to_the_same_weights(prepared: TokenCorpus, tmp_path: Path) -> None:
    """SIGKILL at a random moment after the first checkpoint, then the same command again."""

    def arguments(name: str) -> list[str]:
        size = "--layers 1 --hidden 32 --heads 2 --kv-heads 1 --ffn 48 --context 32 --rows 4 --steps 200 --checkpoint-steps 7"
        where = ["--data", str(prepared.directory), "--out", str(tmp_path / name), "--work", str(tmp_path / f"{name}.work")]
        return ["lm", *where, *size.split(), "--no-compile", "--device", "cpu"]

    environment = recipe_environment() | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "recipes.pyrite", *arguments("killed")]
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    checkpoint = tmp_path / "killed.work" / "checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and victim.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert step_of(checkpoint) < 200
    for name in ("killed", "straight"):
        assert CliRunner().invoke(app, arguments(name)).exit_code == 0
    paths = [tmp_path / f"{name}.work" / "checkpoint.safetensors" for name in ("killed", "straight")]
    assert [step_of(path) for path in paths] == [200, 200]
    ends = [load_file(path) for path in paths]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    exported = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "straight")]
    assert exported[0] == exported[1]


def step_of(checkpoint: Path) -> int:
    with safe_open(checkpoint, framework="pt") as file:
        return json.loads(file.metadata()["rest"])["position"][0]


@contextmanager
def small_disk(max_bytes: int) -> Iterator[None]:
    """Writes beyond `max_bytes` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_checkpoint_intact(prepared: TokenCorpus, tmp_path: Path) -> None:
    run(prepared, steps(tmp_path, 5))
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with small_disk(20_000), pytest.raises(OutriderError, match=r"checkpoint\.safetensors.*last good one is intact"):
        run(prepared, steps(tmp_path, 10))
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))
    outcome, _ = run(prepared, steps(tmp_path, 10))
    assert outcome.position.step == 10


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with small_disk(1000), pytest.raises(OutriderError, match="nothing was left behind"), guarded_write(path) as file:
        file.write(b"x" * 5000)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    assert load_checkpoint(tmp_path, small, []) is None
    save_checkpoint(tmp_path, Position(3, 1.0, 9), small, [])
    assert load_checkpoint(tmp_path, small, []) == Position(3, 1.0, 9)
    with pytest.raises(ModelError, match="does not fit this run"):
        load_checkpoint(tmp_path, large, [])


def test_a_loss_that_explodes_is_an_error(prepared: TokenCorpus, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="not finite"):
        run(prepared, steps(tmp_path, 30, log_every_s=0.0, clip=0.0), lr=float("inf"))
