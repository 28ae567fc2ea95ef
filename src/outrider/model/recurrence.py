"""The arithmetic of recurrent mixers, and the rows of a forward as paths along which their states go.

One function of rows serves prompts, decoding, verification and replay; which rows those are is in model/recurrent_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.cache import LayerState
from outrider.model.recurrent import Recurrent
from outrider.ops import Ops
from outrider.ops.scan import Paths, ScanRows, convolved, softplus

__all__ = ["Mixed", "Mixer", "Recur"]

Recur = Callable[["Mixer", Tensor], Tensor]  # (mixer, its columns (N, width) of all rows) -> (N, inner)
_L2_EPS = 1e-6  # of the norm of queries and keys under the delta rule


class Mixed(NamedTuple):
    """Results (N, inner) of rows, and the states after some of them."""

    rows: Tensor
    states: Mapping[int, LayerState]


class Mixer(nn.Module):
    """A `Recurrent` with weights."""

    def __init__(self, spec: Recurrent, hidden: int, number: int, dtype: torch.dtype) -> None:
        """`number` counts the recurrent layers before it."""
        super().__init__()
        self.spec = spec
        self.number = number
        self.read = nn.Parameter(torch.empty(spec.width, hidden, dtype=dtype))
        self.read_bias = _vector(spec.width, dtype) if spec.bias else None
        self.write = nn.Parameter(torch.empty(hidden, spec.inner, dtype=dtype))
        self.write_bias = _vector(hidden, dtype) if spec.out_bias else None
        self.conv = nn.Parameter(torch.empty(spec.channels, 1, spec.kernel, dtype=dtype))
        self.conv_bias = _vector(spec.channels, dtype) if spec.conv_bias else None
        self.decay = _vector(spec.heads) if spec.key_dim else None  # the logarithm of a rate
        self.step_bias = _vector(spec.heads) if spec.key_dim else None
        self.skip = _vector(spec.heads) if spec.kind == "Mamba-2" else None
        self.norm = nn.Parameter(torch.ones(spec.norm_width)) if spec.norm_eps is not None else None

    def forward(self, x: Tensor, recur: Recur, ops: Ops) -> Tensor:
        """Rows (N, hidden) through the mixer."""
        mixed = recur(self, ops.linear(x, self.read, self.read_bias).float())
        out = ops.linear(mixed, self.write, self.write_bias)
        return out if self.spec.out_scale == 1.0 else out.float() * self.spec.out_scale

    def start(self) -> LayerState:
        """The state before the first row."""
        s = self.spec
        memory = torch.zeros(s.heads, s.key_dim, s.head_dim) if s.key_dim else None
        return LayerState(torch.zeros(s.kernel - 1, s.channels), memory)

    def along(self, x: Tensor, past: Sequence[LayerState], paths: Paths, kept: frozenset[int], ops: Ops) -> Mixed:
        """Columns of rows through the mixer, along paths that begin with the past of their lanes."""
        parts = _scaled(x, self.spec).split_with_sizes(self.spec.parts, 1)
        channels = _channels(parts, self.spec)
        source = torch.cat([*(state.window for state in past), channels])
        seen = convolved(source, paths.taps, self.conv, self.conv_bias)
        windows = {row: source[paths.window(row)] for row in kept}
        memories = [state.memory for state in past if state.memory is not None]
        if not memories:
            return Mixed(parts[1] * seen, {row: LayerState(window) for row, window in windows.items()})
        seen = ops.activate(seen, "silu", False)
        if self.spec.kind == "gated delta rule":
            out, saved = ops.scan(self._delta(seen, parts[4], parts[5], ops), memories, paths, kept)
            rows = self._normed(out, ops) * ops.activate(parts[3], "silu", False)
        else:
            read = self._mamba(seen, parts[4])
            out, saved = ops.scan(read, memories, paths, kept)
            rows = self._mamba_result(out, seen, parts[0], ops)
        return Mixed(rows, {row: LayerState(window, saved[row]) for row, window in windows.items()})

    def _delta(self, seen: Tensor, b: Tensor, a: Tensor, ops: Ops) -> ScanRows:
        """The gated delta rule (arXiv 2412.06464): queries and keys have length one, queries are divided by sqrt(key_dim)."""
        s = self.spec
        queries, keys, values = seen.split_with_sizes((s.keys, s.keys, s.inner), 1)
        one = torch.ones(s.key_dim)
        queries, keys = (ops.rms_norm(_by_head(x, s.key_heads), one, _L2_EPS / s.key_dim) for x in (queries, keys))
        queries, keys = _shared(queries * (1.0 / s.key_dim), s), _shared(keys * s.key_dim**-0.5, s)
        return ScanRows(queries, keys, _by_head(values, s.heads), self._decayed(self._step(a)), ops.sigmoid(b))

    def _mamba(self, seen: Tensor, step: Tensor) -> ScanRows:
        """Mamba-2 (arXiv 2405.21060): values are multiplied by the step."""
        s = self.spec
        values, keys, queries = seen.split_with_sizes((s.inner, s.keys, s.keys), 1)
        step = self._step(step).clamp(*s.step_limit)
        queries, keys = (_shared(_by_head(x, s.key_heads), s) for x in (queries, keys))
        return ScanRows(queries, keys, _by_head(values, s.heads) * step[..., None], self._decayed(step))

    def _mamba_result(self, out: Tensor, seen: Tensor, gate: Tensor, ops: Ops) -> Tensor:
        """What the memory gives and what passes by it, gated and normed."""
        s = self.spec
        assert self.skip is not None
        out = (out + _by_head(seen[:, : s.inner], s.heads) * self.skip[:, None]).flatten(1)
        gate = ops.activate(gate, "silu", False)
        if self.norm is None:
            return out * gate
        return self._normed(out, ops) * gate if s.norm_first else self._normed(out * gate, ops)

    def _normed(self, x: Tensor, ops: Ops) -> Tensor:
        """The norm over each group of values, (N, inner). Its weight is one head's, or all heads'."""
        s = self.spec
        assert s.norm_eps is not None
        assert self.norm is not None
        groups = x.reshape(len(x), s.norm_groups, -1)
        normed = ops.rms_norm(groups, torch.ones(groups.shape[-1]), s.norm_eps)
        return (normed.view(len(x), -1, s.norm_width) * self.norm).flatten(1)

    def _step(self, x: Tensor) -> Tensor:
        assert self.step_bias is not None
        return softplus(x + self.step_bias)

    def _decayed(self, step: Tensor) -> Tensor:
        """What is left of the memory after steps (N, heads)."""
        assert self.decay is not None
        return torch.exp(step * -torch.exp(self.decay))


def _vector(width: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(width, dtype=dtype))


def _scaled(x: Tensor, s: Recurrent) -> Tensor:
    """Columns times the multiplier of their part."""
    if s.scales is None:
        return x
    return torch.cat([part * scale for part, scale in zip(x.split_with_sizes(s.parts, 1), s.scales, strict=True)], 1)


def _channels(parts: Sequence[Tensor], s: Recurrent) -> Tensor:
    """What the convolution reads."""
    if s.kind == "short convolution":
        return parts[0] * parts[2]
    return torch.cat(tuple(parts[:3] if s.kind == "gated delta rule" else parts[1:4]), 1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, -1)


def _shared(x: Tensor, s: Recurrent) -> Tensor:
    """Heads of keys, each repeated for the heads of values that it serves."""
    return x.repeat_interleave(s.heads // s.key_heads, 1)
