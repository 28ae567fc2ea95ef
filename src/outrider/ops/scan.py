"""Linear recurrences and short convolutions along paths of rows: the definition in torch, and the recurrence by the native core.

Every value is one chain of additions and multiplications of float32 that the number of rows and threads does not choose: sums
over keys are taken by halving, as elementwise additions. Rows of several sequences, and of several branches of a draft tree, go
one step forward together; a row goes on from the memory of the row before it in its path. The native core (ops/cpu/scan.h) has
the same bits, but that it takes denormal values for zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.ops.native import Core, Threads

__all__ = ["Paths", "ScanRows", "convolved", "native_scan", "scan", "softplus"]


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that are equally far from the beginning of their paths."""

    rows: list[int]
    before: list[int]  # of each: its predecessor's place in the wave before; in the first one the number of its lane


class Paths:
    """Which row goes on from which: rows in order, after the rows before them. Lane l begins with what was there before."""

    def __init__(self, before: Sequence[int], lanes: int, kernel: int) -> None:
        """`before[row]` is the row before, or -1 - lane."""
        self.before = before
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

    def steps(self, kept: Sequence[int]) -> tuple[array[int], int]:
        """ScanStep of ops/cpu/scan.h for every row, and the number of slots that memories need: a row takes over the slot of the
        row before it, unless another row goes on from there too.
        """
        after = [0] * len(self.before)
        for previous in self.before:
            if previous >= 0:
                after[previous] += 1
        place = {row: i for i, row in enumerate(kept)}
        slot: list[int] = []
        free: list[int] = []
        slots, steps = 0, array("q")
        for row, previous in enumerate(self.before):
            if previous >= 0:
                after[previous] -= 1
            if previous >= 0 and not after[previous]:
                slot.append(slot[previous])
            elif free:
                slot.append(free.pop())
            else:
                slot.append(slots)
                slots += 1
            steps.extend((slot[previous] if previous >= 0 else previous, slot[row], place.get(row, -1)))
            if not after[row]:
                free.append(slot[row])
        return steps, slots

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


def native_scan(
    core: Core, threads: Threads, x: ScanRows, memories: Sequence[Tensor], paths: Paths, kept: frozenset[int]
) -> tuple[Tensor, Mapping[int, Tensor]]:
    """What `scan` gives, by the native core."""
    order = sorted(kept)
    steps, slots = paths.steps(order)
    rows, heads, key_dim = x.keys.shape
    head_dim = x.values.shape[2]
    parts = [None if part is None else part.contiguous() for part in x]
    firsts = [memory.contiguous() for memory in memories]
    lanes = array("q", [memory.data_ptr() for memory in firsts])
    out, saved = torch.empty(rows, heads, head_dim), [torch.empty_like(firsts[0]) for _ in order]  # each may be dropped alone
    results = array("q", [memory.data_ptr() for memory in saved])
    addresses = [0 if part is None else part.data_ptr() for part in parts]
    places = (steps.buffer_info()[0], lanes.buffer_info()[0], out.data_ptr(), results.buffer_info()[0])
    spec = array("q", (rows, heads, key_dim, head_dim, slots, *addresses, *places))

    def run(count: int) -> int:
        if core.scan(spec.buffer_info()[0], count):
            raise MemoryError("the native core has too little memory for a recurrence")
        return 1

    threads.run(rows, run)
    return out, dict(zip(order, saved, strict=True))


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
