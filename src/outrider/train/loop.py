"""The training loop of every run: it trains a Task on packed rows.

With a budget of steps a run is a pure function of seed and settings, and a run that was killed and
resumed ends with the same weights. With a budget of time the learning rate follows the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameter, OutriderError
from outrider.train.checkpoint import Position, load_checkpoint, save_checkpoint
from outrider.train.data import TrainingRows
from outrider.train.optim import scale_rates
from outrider.train.progress import Report

__all__ = ["Budget", "LoopOptions", "Loss", "Schedule", "Task", "TrainingOutcome", "compile_checked", "train"]

Loss = Callable[[Tensor], Tensor]
Optimizers = list[torch.optim.Optimizer]
Result = TypeVar("Result")


class Task(Protocol):
    """Something that can be trained."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    @property
    def module(self) -> nn.Module:
        """The parameters to optimise (where they require gradients) and to checkpoint."""

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean loss of (B, context + 1) ids; pure torch, so that it can be compiled."""

    def evaluate(self) -> dict[str, float]:
        """Held-out figures."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to train: steps or seconds, exactly one."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InvalidParameter("budget", "pass --steps or --minutes, one of them")
        if (self.steps or self.seconds or 0) <= 0:
            raise InvalidParameter("budget", "--steps or --minutes must be above 0")

    def progress(self, position: Position) -> float:
        """Share of the budget that is spent."""
        if self.steps is not None:
            return position.step / self.steps
        assert self.seconds is not None
        return position.seconds / self.seconds


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over the budget: linear warm-up, constant, linear decay to zero."""

    warmup: float = 0.02
    decay: float = 0.7

    def factor(self, progress: float) -> float:
        """Share of the peak learning rate."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.01)
        return max(min((1.0 - progress) / self.decay, 1.0), 0.0)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How to run the loop. Intervals of 0 mean never."""

    budget: Budget
    directory: Path  # checkpoint and metrics
    rows: int = 64  # of a batch
    micro_rows: int = 0  # rows of one forward pass; 0: the whole batch
    schedule: Schedule = Schedule()
    clip: float = 1.0
    log_every_s: float = 10.0
    eval_every_s: float = 60.0
    checkpoint_steps: int = 0
    checkpoint_every_s: float = 120.0


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How a run ended."""

    position: Position
    loss: float  # mean of the last logging interval
    evaluation: dict[str, float]


def train(
    task: Task, rows: TrainingRows, optimizers: Optimizers, options: LoopOptions, loss: Loss | None = None
) -> TrainingOutcome:
    """Train until the budget is spent, resuming where a checkpoint lies in the directory.

    `loss` replaces task.loss, for a version of it that is already compiled.
    """
    rows.require(options.rows)
    position = load_checkpoint(options.directory, task.module, optimizers)
    report = Report(task.name, options.directory / "metrics.jsonl", position is not None)
    if position is not None:
        report.log(f"resuming after step {position.step}")
    run = _Training(task, rows, optimizers, options, report, loss or task.loss, position or Position())
    try:
        return run.until_done()
    except KeyboardInterrupt:
        run.save()
        report.log(f"interrupted; step {run.position.step} is saved, the same command resumes")
        raise
    finally:
        report.close()


def compile_checked(
    name: str, function: Callable[..., Result], check: Callable[[Callable[..., Result]], object]
) -> Callable[..., Result] | None:
    """The function through torch.compile, checked by one call; None where that fails."""
    begin = time.monotonic()
    try:
        fast: Callable[..., Result] = torch.compile(function, dynamic=False)
        check(fast)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # the compiler fails in many ways; none of them may end the run
        print(f"compile: {name} failed ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})", flush=True)
        return None
    print(f"compile: {name} in {time.monotonic() - begin:.0f} s", flush=True)
    return fast


@dataclass(slots=True)
class _Training:
    """A run in progress."""

    task: Task
    rows: TrainingRows
    optimizers: Optimizers
    options: LoopOptions
    report: Report
    loss: Loss
    position: Position
    deadline: float = math.inf  # of the clock; a step ends early there
    last_loss: float = math.nan
    summed: int = 0  # steps whose losses are in `total`
    evaluation: dict[str, float] = field(default_factory=dict)  # of the present step, where it was evaluated
    device: torch.device = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [param for param in self.task.module.parameters() if param.requires_grad]
        self.device = self.parameters[0].device
        self.total = torch.zeros((), device=self.device)

    def until_done(self) -> TrainingOutcome:
        options, position = self.options, self.position
        origin = time.monotonic() - position.seconds
        self.deadline = math.inf if options.budget.seconds is None else origin + options.budget.seconds
        logged, logged_tokens = time.monotonic(), position.tokens
        evaluated = saved = logged
        previous: torch.cuda.Event | None = None
        first = position.step + 1
        while options.budget.progress(position) < 1.0:
            self.step()
            self.evaluation = {}
            previous = self._wait_for_previous(previous)
            position.seconds = time.monotonic() - origin
            now = time.monotonic()
            if position.step == first or now - logged >= options.log_every_s:  # the first step is shown at once
                self.log((position.tokens - logged_tokens) / (now - logged))
                logged, logged_tokens = now, position.tokens
            if options.eval_every_s and now - evaluated >= options.eval_every_s:
                self.evaluate()
                evaluated = time.monotonic()
            if self._checkpoint_due(now - saved):
                self.save()
                saved = time.monotonic()
        self.log((position.tokens - logged_tokens) / max(time.monotonic() - logged, 1e-9))
        if options.checkpoint_steps or options.checkpoint_every_s:
            self.save()
        return TrainingOutcome(position, self.last_loss, self.evaluation or self.evaluate())

    def step(self) -> None:
        """One update from one batch."""
        options, position = self.options, self.position
        scale_rates(self.optimizers, options.schedule.factor(options.budget.progress(position)))
        batch = torch.from_numpy(self.rows.batch(position.step, options.rows))
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self.device, non_blocking=True)
        micros = torch.split(batch, options.micro_rows or options.rows)
        total, rows = torch.zeros_like(self.total), 0
        for micro in micros:
            loss = self.loss(micro) * (micro.shape[0] / options.rows)
            torch.autograd.backward(loss)
            total += loss.detach()
            rows += micro.shape[0]
            if time.monotonic() >= self.deadline:
                break
        self.total += self._as_whole(total, rows)
        if options.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.summed += 1
        position.step += 1
        position.tokens += rows * (batch.shape[1] - 1)

    def _as_whole(self, loss: Tensor, rows: int) -> Tensor:
        """The mean loss of a step that ended after `rows` of its rows, because time was up; its gradients become means too."""
        share = rows / self.options.rows
        if share < 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad /= share
        return loss / share

    def log(self, tokens_per_s: float) -> None:
        """Read the loss back (the loop's only synchronisation) and report it."""
        if not self.summed:
            return
        self.last_loss = float(self.total) / self.summed
        self.total.zero_()
        self.summed = 0
        position, progress = self.position, min(self.options.budget.progress(self.position), 1.0)
        if not math.isfinite(self.last_loss):
            raise OutriderError(f"the loss is not finite at step {position.step}; lower --lr (the last checkpoint is intact)")
        record = {
            "step": position.step,
            "seconds": round(position.seconds, 1),
            "tokens": position.tokens,
            "loss": self.last_loss,
            "tokens_per_s": tokens_per_s,
            "lr_factor": self.options.schedule.factor(progress),
        }
        self.report.train(record, progress, position.seconds * (1 / max(progress, 1e-9) - 1))

    def evaluate(self) -> dict[str, float]:
        """Held-out figures; the clock of the budget runs on."""
        figures = self.task.evaluate()
        self.report.evaluation({"step": self.position.step, **figures})
        self.evaluation = figures
        return figures

    def save(self) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.options.directory, self.position, self.task.module, self.optimizers)

    def _checkpoint_due(self, since_s: float) -> bool:
        steps, seconds = self.options.checkpoint_steps, self.options.checkpoint_every_s
        return bool(steps and self.position.step % steps == 0) or bool(seconds and since_s >= seconds)

    def _wait_for_previous(self, previous: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Keep the host at most one step before the device, so that the clock measures finished steps."""
        if self.device.type != "cuda":
            return None
        if previous is not None:
            previous.synchronize()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
