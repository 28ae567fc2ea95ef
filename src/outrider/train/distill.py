"""Distillation of drafters from one frozen target. Several train at once: the target runs once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outrider.train.acceptance import agreement
from outrider.train.data import TrainingRows
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.loop import LoopOptions, TrainingOutcome, compile_checked, train
from outrider.train.networks import TrainableDrafter
from outrider.train.optim import OptimOptions, build_optimizers

__all__ = ["Distillation"]

LossOf = Callable[[Features], Tensor]


@dataclass(slots=True)
class Distillation:
    """Networks that draft for one target. Satisfies `loop.Task`: their losses are summed, and none shares a parameter."""

    target: FrozenTarget
    networks: Mapping[str, TrainableDrafter]
    heldout: Tensor | None = None  # (n, context) rows to evaluate on
    module: nn.ModuleDict = field(init=False)
    _features: Callable[[Tensor], Features] = field(init=False)
    _losses: dict[str, LossOf] = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.target.reading({tap for network in self.networks.values() for tap in network.taps})
        self.module = nn.ModuleDict({name: network.module for name, network in self.networks.items()})
        self._features = self.target.features
        self._losses = {name: _loss_of(network) for name, network in self.networks.items()}

    @property
    def name(self) -> str:
        return "+".join(self.networks)

    def loss(self, tokens: Tensor) -> Tensor:
        """Sum of the networks' losses on (B, T + 1) ids."""
        features = self._features(tokens[:, :-1].contiguous())  # the strides it was compiled for
        total = torch.zeros((), device=tokens.device)
        for loss in self._losses.values():
            total = total + loss(features)
        return total

    def evaluate(self) -> dict[str, float]:
        """Each network's held-out loss, first agreement and tokens per round on held-out text."""
        figures: dict[str, float] = {}
        if self.heldout is None:
            return figures
        for name, network in self.networks.items():
            result = agreement(network, self.target, self.heldout)
            figures |= {f"{name}_loss": result.loss, f"{name}_first": result.by_position[0]}
            figures[f"{name}_tokens_per_round"] = result.tokens_per_round
        return figures

    def warm_up(self, rows: int, context: int) -> None:
        """Compile the target and each network separately, so that one failure leaves the others compiled."""
        torch._dynamo.config.recompile_limit = 64  # networks share code, and each is compiled as a version of it
        device = self.target.decoder.norm.device
        tokens = torch.zeros(rows, context, dtype=torch.int64, device=device)
        target = self.target
        self._features = compile_checked("target", target.features, lambda fast: fast(tokens)) or target.features
        features = self._features(tokens)
        for name, loss in list(self._losses.items()):
            module = self.networks[name].module
            fast = compile_checked(name, loss, lambda fast: torch.autograd.backward(fast(features)))
            self._losses[name] = fast or _loss_of(self.networks[name], lean=True)
            module.zero_grad(set_to_none=True)

    def train(self, rows: TrainingRows, optim: OptimOptions, loop: LoopOptions) -> TrainingOutcome:
        """Spend the loop's budget on rows of text."""
        return train(self, rows, build_optimizers(self.module, optim), loop)


def _loss_of(network: TrainableDrafter, lean: bool = False) -> LossOf:
    def loss(features: Features) -> Tensor:
        return network.loss(features, lean)

    return loss
