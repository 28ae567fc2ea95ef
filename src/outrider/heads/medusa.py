"""Medusa: independent heads on the target's last hidden row, each for one later position.

Head k (from 1) reads the last hidden row of position i, after the target's final norm, and predicts
the token at i + 1 + k; the token at i + 1 is the target's choice.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.heads.borrowed import Borrowed
from outrider.model.decoder import finished_logits, normed
from outrider.ops import Ops

__all__ = ["MedusaConfig", "MedusaHeads"]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """How many heads, and what each is made of."""

    hidden: int
    vocab: int
    target_layers: int
    heads: int = 4
    blocks: int = 1  # residual blocks per head
    own_output: bool = False  # an output matrix per head; False: the target's for all
    # Nodes of the static tree as paths of ranks, best first, so that the first n are the best tree of n:
    # (0, 2) is head 2's third choice below head 1's first. Empty: not measured.
    choices: tuple[tuple[int, ...], ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """The stream leaving the target's last layer."""
        return (self.target_layers,)

    def tree(self, nodes: int) -> tuple[tuple[int, ...], ...]:
        """The best `nodes` paths, parents before children; a guess where none were measured."""
        chosen = self.choices[:nodes] or _guessed(self.heads, nodes)
        return tuple(sorted(chosen, key=lambda path: (len(path), path)))


class MedusaHeads(nn.Module):
    """h + SiLU(W h + b), once per block, then an output matrix."""

    output: Tensor
    target_norm: Tensor
    target_norm_bias: Tensor | None

    def __init__(self, config: MedusaConfig, borrowed: Borrowed, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        count, hidden = config.heads * config.blocks, config.hidden
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(hidden, hidden, dtype=dtype)) for _ in range(count))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(hidden, dtype=dtype)) for _ in range(count))
        self.register_buffer("target_norm", borrowed.norm, persistent=False)
        self.register_buffer("target_norm_bias", borrowed.norm_bias, persistent=False)
        self.target = borrowed.spec
        if config.own_output:
            self.output = nn.Parameter(torch.empty(config.heads, config.vocab, hidden))
        else:
            self.register_buffer("output", borrowed.output, persistent=False)

    def fuse(self, taps: Tensor, ops: Ops) -> Tensor:
        """Last hidden rows (N, hidden) of the tap: the target's final norm."""
        return normed(taps, self.target.norm, self.target_norm, self.target_norm_bias, ops)

    def hidden(self, last: Tensor, head: int, ops: Ops) -> Tensor:
        """(N, hidden) of one head (from 0), before the output matrix."""
        x = last
        for i in range(head * self.config.blocks, (head + 1) * self.config.blocks):
            x = x + ops.activate(ops.linear(x, self.weights[i], self.biases[i]), "silu", gated=False)
        return x

    def logits(self, hidden: Tensor, head: int, ops: Ops) -> Tensor:
        """(N, V) float32 of one head."""
        if self.config.own_output:
            return ops.linear(hidden, self.output[head]).float()
        return finished_logits(ops.linear(hidden, self.output).float(), self.target)

    def forward(self, last: Tensor, ops: Ops) -> Tensor:
        """(heads, N, V) float32 from last hidden rows after the final norm."""
        return torch.stack([self.logits(self.hidden(last, k, ops), k, ops) for k in range(self.config.heads)])


def _guessed(heads: int, nodes: int) -> list[tuple[int, ...]]:
    """Paths by a product of guessed probabilities, falling with rank and with depth."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    paths: list[tuple[int, ...]] = []
    while waiting and len(paths) <= nodes:
        value, path = heapq.heappop(waiting)
        paths.append(path)
        if len(path) < heads:
            for rank in range(nodes):
                heapq.heappush(waiting, (value * (0.5 * 0.75 ** len(path) / (rank + 1) ** 1.5), (*path, rank)))
    return paths[1:]  # the first is the root
