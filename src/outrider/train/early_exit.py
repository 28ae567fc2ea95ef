"""Exit adapters being trained: one for each of some exits, off one forward of the target. The exit that pays most is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outrider.draft.early_exit import LayerCosts, best_length
from outrider.errors import InvalidParameter
from outrider.heads import Borrowed, ExitAdapter, ExitConfig, SaveOptions, load_exit, save_exit
from outrider.model import Decoder
from outrider.ops import Plain
from outrider.train.frozen import Features, FrozenTarget
from outrider.train.losses import Divergence, divergence
from outrider.train.networks import TrainableDrafter
from outrider.train.shapes import initialise
from outrider.train.sizing import autocast

__all__ = ["TrainableExits", "new_exits"]

_OPS = Plain()
_LONGEST = 16  # drafted tokens, where exits are compared
_SHARES = (4, 3, 2, 1.5)  # of the layers, for exits that are not named


@dataclass(slots=True)
class TrainableExits(TrainableDrafter):
    """Adapters by the name of their exit. `chosen` is the one that drafts, is measured and is written."""

    module: nn.ModuleDict
    chosen: str = ""

    def __post_init__(self) -> None:
        self.chosen = self.chosen or next(iter(self.module))

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(int(exit_layer) for exit_layer in self.module)

    @property
    def adapter(self) -> ExitAdapter:
        """The adapter of the chosen exit."""
        adapter = self.module[self.chosen]
        assert isinstance(adapter, ExitAdapter)
        return adapter

    def chain(self, features: Features, depths: int) -> list[Tensor]:
        rows = self.adapter(features.taps[int(self.chosen)], _OPS)
        return [features.cut(rows, depth + 1, features.span(depths)) for depth in range(depths)]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:  # noqa: ARG002 (one adapter for all depths)
        return self.adapter.logits(hidden, _OPS)

    def loss(self, features: Features, lean: bool = False) -> Tensor:
        """Sum of the divergences of all exits. `lean` keeps the logits of one exit at a time."""
        span, total = features.span(1), torch.zeros((), device=features.tokens.device)
        target = features.cut(features.logits, 1, span)[:: self.every]
        with autocast(total.device):
            for name, adapter in self.module.items():
                rows = features.cut(features.taps[int(name)], 1, span)[:: self.every]
                part = partial(_divergence, adapter, self.kind, target)
                total = total + (checkpoint(part, rows, use_reentrant=False) if lean else part(rows))
        return total

    def settle(self, agreement: Callable[[Self], float]) -> None:
        """Keep the exit of the highest expected speed, where the time of a product is that of reading its weights."""
        speeds = {}
        for one in self.module:
            network = replace(self, chosen=one)
            adapter, rate = network.adapter, agreement(network)
            adapter.config = replace(adapter.config, agreement=rate)
            speeds[one] = best_length(_costs(adapter), (int(one), 0, adapter.target.depth), rate, _LONGEST).speed
        self.chosen = max(speeds, key=lambda one: speeds[one])

    def save(self, folder: Path, tokenizer: Path) -> None:  # noqa: ARG002 (it is the target's)
        save_exit(self.adapter, folder, SaveOptions("early_exit", int8=True))

    def load(self, folder: Path, target: Decoder) -> nn.ModuleDict:
        adapter = load_exit(folder, target)
        return nn.ModuleDict({str(adapter.config.layer): adapter})


def new_exits(target: FrozenTarget, exits: tuple[int, ...], ffn: int, kind: Divergence, seed: int) -> TrainableExits:
    """Fresh adapters, which change nothing yet."""
    depth = target.config.depth
    exits = exits or tuple(dict.fromkeys(max(int(depth / share), 1) for share in _SHARES))
    if wrong := [one for one in exits if not 1 <= one < depth]:
        raise InvalidParameter("exits", f"{wrong[0]} is not between 1 and {depth - 1}, of the target's {depth} layers")
    ffn, borrowed, made = ffn or target.config.ffn, Borrowed.of(target.decoder), {}
    for one in sorted(set(exits)):
        made[str(one)] = ExitAdapter(ExitConfig(one, target.config.hidden, ffn), borrowed)
        initialise(made[str(one)], seed)
    return TrainableExits(nn.ModuleDict(made).to(target.decoder.norm.device), kind)


def _divergence(adapter: nn.Module, kind: Divergence, target: Tensor, rows: Tensor) -> Tensor:
    assert isinstance(adapter, ExitAdapter)
    return divergence(kind, target, adapter.logits(adapter(rows, _OPS), _OPS))


def _costs(adapter: ExitAdapter) -> LayerCosts:
    """Parameters of a layer, and of the output matrix with the adapter."""
    spec, config = adapter.target, adapter.config
    head = spec.vocab * spec.hidden
    layer = (spec.parameters - head * (1 if spec.tied else 2)) / spec.depth
    return LayerCosts(layer, head + 3 * config.ffn * config.hidden)
