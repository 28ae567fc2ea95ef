"""The one training loop: whatever is trained is a Task, whatever it reads are packed rows.

With a budget of steps a run is a pure function of seed and settings, and a run that was killed and
resumed ends with the same weights. With a budget of time the learning rate follows the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.errors import InvalidParameter, OutriderError
from outrider.train.checkpoint import Position, load_checkpoint, save_checkpoint
from outrider.train.data import Rows
from outrider.train.optim import scale_rates
from outrider.train.progress import Report

__all__ = ["Budget", "LoopOptions", "Loss", "Outcome", "Schedule", "Task", "compiled", "train"]

Loss = Callable[[Tensor], Tensor]
Optimizers = list[torch.optim.Optimizer]


class Task(Protocol):
    """Something that can be trained."""

    @property
    def module(self) -> nn.Module:
        """What is optimised (where it requires gradients) and checkpointed."""

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
    """Learning rate over the budget: linear warm-up, constant, linear decay to `floor`."""

    warmup: float = 0.02
    decay: float = 0.7
    floor: float = 0.0

    def factor(self, progress: float) -> float:
        """Share of the peak learning rate."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.01)
        left = (1.0 - progress) / self.decay
        return max(min(left, 1.0) * (1.0 - self.floor) + self.floor, 0.0)


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
class Outcome:
    """How a run ended."""

    position: Position
    loss: float  # mean of the last logging interval
    evaluation: dict[str, float]


def train(task: Task, rows: Rows, optimizers: Optimizers, options: LoopOptions, loss: Loss | None = None) -> Outcome:
    """Train until the budget is spent, resuming where a checkpoint lies in the directory.

    `loss` replaces task.loss, for a version of it that is already compiled.
    """
    rows.require(options.rows)
    position = load_checkpoint(options.directory, task.module, optimizers)
    report = Report(task.module.__class__.__name__.lower(), options.directory / "metrics.jsonl", position is not None)
    if position is not None:
        report.say(f"resuming after step {position.step}")
    run = _Run(task, rows, optimizers, options, report, loss or task.loss, position or Position())
    try:
        return run.until_done()
    except KeyboardInterrupt:
        run.save()
        report.say(f"interrupted; step {run.position.step} is saved, the same command resumes")
        raise
    finally:
        report.close()


def compiled(loss: Loss, example: Tensor, module: nn.Module) -> Loss | None:
    """`loss` through torch.compile, proved by one forward and backward; None where that fails."""
    begin = time.monotonic()
    try:
        fast: Loss = torch.compile(loss, dynamic=False)
        torch.autograd.backward(fast(example))
        if example.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # the compiler fails in many ways; none of them may cost the run
        first = (str(error).splitlines() or [""])[0]
        print(f"compile: failed ({type(error).__name__}: {first})", flush=True)
        torch._dynamo.reset()
        return None
    finally:
        module.zero_grad(set_to_none=True)
    print(f"compile: done in {time.monotonic() - begin:.0f} s", flush=True)
    return fast


@dataclass(slots=True)
class _Run:
    """A run in progress."""

    task: Task
    rows: Rows
    optimizers: Optimizers
    options: LoopOptions
    report: Report
    loss: Loss
    position: Position
    last_loss: float = math.nan
    summed: int = 0  # steps whose losses are in `total`
    device: torch.device = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [param for param in self.task.module.parameters() if param.requires_grad]
        self.device = self.parameters[0].device
        self.total = torch.zeros((), device=self.device)

    def until_done(self) -> Outcome:
        options, position = self.options, self.position
        origin = time.monotonic() - position.seconds
        logged, logged_tokens = time.monotonic(), position.tokens
        evaluated = saved = logged
        previous: torch.cuda.Event | None = None
        while options.budget.progress(position) < 1.0:
            self.step()
            previous = self._wait_for_last(previous)
            position.seconds = time.monotonic() - origin
            now = time.monotonic()
            if now - logged >= options.log_every_s:
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
        return Outcome(position, self.last_loss, self.evaluate())

    def step(self) -> None:
        """One update from one batch."""
        options, position = self.options, self.position
        scale_rates(self.optimizers, options.schedule.factor(options.budget.progress(position)))
        batch = torch.from_numpy(self.rows.batch(position.step, options.rows))
        if self.device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self.device, non_blocking=True)
        micros = torch.split(batch, options.micro_rows or options.rows)
        for micro in micros:
            loss = self.loss(micro) * (micro.shape[0] / options.rows)
            torch.autograd.backward(loss)
            self.total += loss.detach()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.summed += 1
        position.step += 1
        position.tokens += batch.shape[0] * (batch.shape[1] - 1)

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
        return figures

    def save(self) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.options.directory, self.position, self.task.module, self.optimizers)

    def _checkpoint_due(self, since_s: float) -> bool:
        steps, seconds = self.options.checkpoint_steps, self.options.checkpoint_every_s
        return bool(steps and self.position.step % steps == 0) or bool(seconds and since_s >= seconds)

    def _wait_for_last(self, previous: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Keep the host at most one step ahead, so that the clock tells the truth."""
        if self.device.type != "cuda":
            return None
        if previous is not None:
            previous.synchronize()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
