"""Calls of the kernels of recurrent layers from torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import recurrence

__all__ = [
    "SCAN_TILES", "ConvolutionWeights", "DeltaShape", "DeltaState", "DeltaWeights", "RowBuffers", "RowPaths", "ScanTile",
    "gate_heads", "gated_delta", "gated_norm", "run_paths", "short_convolution",
]  # fmt: skip

_L2_EPS = 1e-6  # of the norm of queries and keys
_KEPT = 16  # keys side by side
_AHEAD = 5  # stages of the loads of steps: rows come from memory that may be far, and a step takes a third of such a way


class ScanTile(NamedTuple):
    """Values of a head that one program of the recurrence takes, and its warps. The bits are equal for all of them."""

    values: int
    warps: int


# The first is used. On an H200 it takes 3, 5 and 1,069 microseconds for 1, 4 and 2,048 rows, the second 3.4, 6.4 and 1,487.
SCAN_TILES = (ScanTile(8, 1), ScanTile(32, 4), ScanTile(16, 2), ScanTile(64, 8))


class DeltaShape(NamedTuple):
    """The sizes of a recurrent mixer. A short convolution has one head, and no keys."""

    heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    kernel: int  # of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution takes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def width(self) -> int:
        """Columns of the product: channels, gate, b and a; or gate, gate and values."""
        return self.channels + self.inner + 2 * self.heads if self.key_dim else 3 * self.inner

    @property
    def stored(self) -> int:
        """Columns that a replay needs: channels, and b and a where there is a memory."""
        return self.channels + (2 * self.heads if self.key_dim else 0)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Small weights on the device, float32."""

    conv: Tensor  # (kernel, channels)
    conv_bias: Tensor | None  # (channels,)
    decay: Tensor  # (heads,) minus the rate
    step_bias: Tensor  # (heads,)
    norm: Tensor  # (head_dim,)
    norm_eps: float


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's share of the pool of states, and of the inputs of draft nodes, float32."""

    memories: Tensor  # (states, heads, head_dim, key_dim)
    windows: Tensor  # (states, kernel - 1, channels)
    stored: Tensor  # (nodes, stored)


@dataclass(frozen=True, slots=True)
class RowPaths:
    """Which rows are replayed, and along which paths states go; int32, as the kernels read them."""

    replayed: Tensor  # (replays,) rows of the stored inputs; -1 where there is none
    taps: Tensor  # (replays + rows, kernel - 1)
    kept: Tensor  # (replays + rows,) where the row's inputs are stored, or -1
    saved: Tensor  # (replays + rows,) the state that the window after the row goes to, or -1
    pasts: Tensor  # (paths,) the state that a path begins with, or -1
    firsts: Tensor  # (paths + 1,) the first step of each path
    steps: Tensor  # (steps, 2)


class RowBuffers(NamedTuple):
    """What one layer's kernels hand on, float32; layers that run one after the other share them."""

    queries: Tensor  # (replays + rows, key_heads, key_dim)
    keys: Tensor
    values: Tensor  # (replays + rows, heads, head_dim)
    left: Tensor  # (replays + rows, heads)
    rate: Tensor
    out: Tensor  # (rows, heads, head_dim), zeros: rows that are padding stay finite

    @classmethod
    def of(cls, shape: DeltaShape, rows: int, replays: int, device: torch.device) -> RowBuffers:
        s, every = shape, replays + rows
        keys, values = (every, s.key_heads, s.key_dim), (every, s.heads, s.head_dim)
        shapes = (keys, keys, values, (every, s.heads), (every, s.heads), (rows, s.heads, s.head_dim))
        return cls(*(torch.zeros(one, device=device) for one in shapes))


def gated_delta(
    parts: Tensor, paths: RowPaths, state: DeltaState, weights: DeltaWeights, shape: DeltaShape, buffers: RowBuffers
) -> None:
    """The recurrent part of a mixer whose product is `parts` (parts, N, width): results in `buffers.out`."""
    s, (count, rows, width) = shape, parts.shape
    assert width == s.width
    every, padded = len(paths.kept), int(triton.next_power_of_2(max(s.head_dim, s.key_dim)))
    bias = weights.conv if weights.conv_bias is None else weights.conv_bias
    recurrence.prepare[(every, 2 * s.key_heads + s.heads)](
        parts, state.stored, state.windows, weights.conv, bias, weights.decay, weights.step_bias, *buffers[:5],
        paths.replayed, paths.taps, paths.kept, paths.saved, rows, every - rows, _L2_EPS,
        count, s.kernel, s.heads, s.head_dim, s.key_heads, s.key_dim, padded, weights.conv_bias is not None, num_warps=1,
    )  # fmt: skip
    run_paths(paths, state.memories, shape, buffers)


def run_paths(
    paths: RowPaths, memories: Tensor, shape: DeltaShape, buffers: RowBuffers, tile: ScanTile = SCAN_TILES[0]
) -> None:  # fmt: skip
    """The recurrence over rows that are prepared."""
    s = shape
    values = min(tile.values, int(triton.next_power_of_2(s.head_dim)))
    split = triton.cdiv(int(triton.next_power_of_2(s.key_dim)), _KEPT)
    recurrence.scan[(s.heads * triton.cdiv(s.head_dim, values), len(paths.pasts))](
        *buffers[:5], memories, paths.pasts, paths.firsts, paths.steps, buffers.out, len(paths.kept) - len(buffers.out),
        s.heads, s.head_dim, s.key_heads, s.key_dim, split, _KEPT, values, _AHEAD, num_warps=tile.warps,
    )  # fmt: skip


def gated_norm(parts: Tensor, weights: DeltaWeights, shape: DeltaShape, buffers: RowBuffers, out: Tensor) -> None:
    """The mixer's result (N, inner): the norm of every head, times silu of the gate."""
    s, (count, rows, width) = shape, parts.shape
    recurrence.gated_norm[(rows, s.heads)](
        buffers.out, parts, weights.norm, out, rows, weights.norm_eps, count, width, s.channels, s.heads, s.head_dim,
        int(triton.next_power_of_2(s.head_dim)), num_warps=1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Small weights of a short convolution on the device."""

    conv: Tensor  # (kernel, inner) float32
    conv_bias: Tensor | None  # (inner,) float32
    bias: Tensor | None  # (3 * inner,) of the product


def short_convolution(
    parts: Tensor, paths: RowPaths, state: DeltaState, weights: ConvolutionWeights, shape: DeltaShape, out: Tensor
) -> None:  # fmt: skip
    """A mixer's result (N, inner), from its product (parts, N, 3 * inner)."""
    s, w, (count, rows, width) = shape, weights, parts.shape
    assert width == s.width
    block, every = min(256, int(triton.next_power_of_2(s.inner))), len(paths.kept)
    recurrence.short_convolution[(every, triton.cdiv(s.inner, block))](
        parts, parts if w.bias is None else w.bias, state.stored, state.windows, w.conv,
        w.conv if w.conv_bias is None else w.conv_bias, out, paths.replayed, paths.taps, paths.kept, paths.saved, rows,
        every - rows, count, s.kernel, s.inner, w.bias is not None, w.conv_bias is not None, block, num_warps=4,
    )  # fmt: skip


def gate_heads(mixed: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    """Multiply what attention gives (N, width), in place, by the sigmoid of the last columns of a product (parts, N, columns)."""
    (count, rows, columns), width = parts.shape, mixed.shape[1]
    block = min(1024, int(triton.next_power_of_2(width)))
    recurrence.gate_heads[(rows, triton.cdiv(width, block))](
        mixed, parts, parts if bias is None else bias, rows, width, columns - width, columns, count, bias is not None, block,
        num_warps=4,
    )  # fmt: skip
