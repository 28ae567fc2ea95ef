"""Drafters learning from one frozen target, several at once: the target is run once for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outrider.train.acceptance import agreement
from outrider.train.data import Rows, TokenStore
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.loop import LoopOptions, Outcome, train
from outrider.train.optim import OptimOptions, build_optimizers
from outrider.train.students import Student, student_loss

__all__ = ["DistillOptions", "Distillation"]

Result = TypeVar("Result")
LossOf = Callable[[Features], Tensor]


class Students(nn.ModuleDict):
    """The modules being trained, by name."""


@dataclass(slots=True)
class Distillation:
    """Students of one target. Satisfies `loop.Task`; their losses are summed and do not meet."""

    target: FrozenTarget
    students: Mapping[str, Student]
    heldout: Tensor | None = None  # (n, context) rows to evaluate on
    module: Students = field(init=False)
    _features: Callable[[Tensor], Features] = field(init=False)
    _losses: dict[str, LossOf] = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.target.reading({tap for student in self.students.values() for tap in student.taps})
        self.module = Students({name: student.module for name, student in self.students.items()})
        self._features = self.target.features
        self._losses = {name: _loss_of(student) for name, student in self.students.items()}

    def loss(self, tokens: Tensor) -> Tensor:
        """Sum of the students' losses on (B, T + 1) ids."""
        features = self._features(tokens[:, :-1].contiguous())  # the strides it was compiled for
        total = torch.zeros((), device=tokens.device)
        for loss in self._losses.values():
            total = total + loss(features)
        return total

    def evaluate(self) -> dict[str, float]:
        """Each student's held-out loss, first agreement and tokens per round on held-out text."""
        figures: dict[str, float] = {}
        if self.heldout is None:
            return figures
        for name, student in self.students.items():
            found = agreement(student, self.target, self.heldout)
            figures |= {f"{name}_loss": found.loss, f"{name}_first": found.by_position[0]}
            figures[f"{name}_tokens_per_round"] = found.tokens_per_round
        return figures

    def warm_up(self, rows: int, context: int) -> None:
        """Compile the target and each student, apart, so that one that fails costs only itself."""
        torch._dynamo.config.recompile_limit = 64  # students share code, and each is a version of it
        device = self.target.decoder.norm.device
        tokens = torch.zeros(rows, context, dtype=torch.int64, device=device)
        target = self.target
        self._features = _attempt("target", target.features, lambda fast: _run(fast, tokens)) or target.features
        features = self._features(tokens)
        for name, loss in list(self._losses.items()):
            module = self.students[name].module
            fast = _attempt(name, loss, lambda fast: torch.autograd.backward(fast(features)))
            self._losses[name] = fast or _loss_of(self.students[name], lean=True)
            module.zero_grad(set_to_none=True)

    def train(self, store: TokenStore, options: DistillOptions, loop: LoopOptions) -> Outcome:
        """Spend the loop's budget on a store."""
        rows = Rows(store, options.context, options.seed)
        return train(self, rows, build_optimizers(self.module, options.optim), loop)


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """How students learn, apart from the budget."""

    context: int
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=0.01, adam_lr=2e-3))
    seed: int = 0


def _loss_of(student: Student, lean: bool = False) -> LossOf:
    def loss(features: Features) -> Tensor:
        return student_loss(student, features, lean)

    return loss


def _run(features: Callable[[Tensor], Any], tokens: Tensor) -> None:
    features(tokens)


def _attempt(
    name: str, function: Callable[..., Result], prove: Callable[[Callable[..., Result]], None]
) -> Callable[..., Result] | None:
    """The function through torch.compile, proved by one call; None where that fails."""
    begin = time.monotonic()
    try:
        fast: Callable[..., Result] = torch.compile(function, dynamic=False)
        prove(fast)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # the compiler fails in many ways; none of them may cost the run
        print(f"compile: {name} failed ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})", flush=True)
        return None
    print(f"compile: {name} in {time.monotonic() - begin:.0f} s", flush=True)
    return fast
