"""Linear recurrences and short convolutions along paths of rows, in torch: the definition, and what serves.

Every value is one chain of additions and multiplications of float32 that the number of rows and threads does not choose: sums
over keys are taken by halving, as elementwise additions. Rows of several sequences, and of several branches of a draft tree, go
one step forward together; a row goes on from the memory of the row before it in its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Paths", "ScanRows", "convolved", "scan", "softplus"]


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that are equally far from the beginning of their paths."""

    rows: list[int]
    before: list[int]  # of each: its predecessor's place in the wave before; in the first one the number of its lane


class Paths:
    """Which row goes on from which: rows in order, after the rows before them. Lane l begins with what was there before."""

    def __init__(self, before: Sequence[int], lanes: int, kernel: int) -> None:
        """`before[row]` is the row before, or -1 - lane."""
        held = kernel - 1
        first = lanes * held
        self._history: list[list[int]] = []
        depth: list[int] = []
        place: list[int] = []
        self.waves: list[Wave] = []
        for row, previous in enumerate(before):
            seen = self._history[previous] if previous >= 0 else [0, *range(held * (-1 - previous), held * -previous)]
            self._history.append([*seen[1:], first + row])
            depth.append(0 if previous < 0 else depth[previous] + 1)
            if depth[row] == len(self.waves):
                self.waves.append(Wave([], []))
            wave = self.waves[depth[row]]
            place.append(len(wave.rows))
            wave.rows.append(row)
            wave.before.append(-1 - previous if previous < 0 else place[previous])
        self.taps = torch.tensor(self._history, dtype=torch.int64).view(len(before), kernel)  # into windows, then rows

    def window(self, row: int) -> list[int]:
        """The rows that the convolution of the next row sees, by their places among windows and rows."""
        return self._history[row][1:]


class ScanRows(NamedTuple):
    """What a recurrence reads of each row, float32."""

    queries: Tensor  # (N, heads, key_dim)
    keys: Tensor  # (N, heads, key_dim)
    values: Tensor  # (N, heads, head_dim)
    decay: Tensor  # (N, heads) what the memory is multiplied by
    rate: Tensor | None = None  # (N, heads) of the delta rule: how much of what the memory lacks is added to it


def convolved(x: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of each channel: weight (channels, 1, kernel) over the rows of x that `taps` (N, kernel) names."""
    weight = weight.float()[:, 0]
    out = x[taps[:, 0]] * weight[:, 0]
    for tap in range(1, taps.shape[1]):
        out = out + x[taps[:, tap]] * weight[:, tap]
    return out if bias is None else out + bias.float()


def scan(x: ScanRows, memories: Sequence[Tensor], paths: Paths, kept: frozenset[int]) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Results (N, heads, head_dim) of all rows, and the memories (heads, key_dim, head_dim) after the rows in `kept`."""
    out = torch.empty_like(x.values)
    saved: dict[int, Tensor] = {}
    memory = torch.stack(list(memories))
    for wave in paths.waves:
        if wave.before != list(range(len(memory))):
            memory = memory[wave.before]
        rows = wave.rows
        memory = memory * x.decay[rows, :, None, None]
        keys, values = x.keys[rows, :, :, None], x.values[rows]
        if x.rate is not None:
            values = (values - _halved(memory * keys)) * x.rate[rows, :, None]
        memory = memory + keys * values[:, :, None]
        out[rows] = _halved(memory * x.queries[rows, :, :, None])
        for i, row in enumerate(rows):
            if row in kept:
                saved[row] = memory[i].clone() if len(rows) > 1 else memory[i]
    return out, saved


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), where exp cannot overflow."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def _halved(x: Tensor) -> Tensor:
    """The sum over the second dimension from the end: its second half is added to the first until one is left."""
    while (size := x.shape[-2]) > 1:
        half = size // 2
        top = x[..., :half, :] + x[..., half : 2 * half, :]
        x = torch.cat((top, x[..., 2 * half :, :]), -2) if size % 2 else top
    return x[..., 0, :]
