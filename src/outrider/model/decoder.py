"""One decoder for the Llama family. Attention is an argument, so training and serving share it.

Rows are tokens: everything is (N, width). The residual stream and the logits are float32; linears
take and give the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.model.config import ModelConfig, Rope
from outrider.ops import Ops

__all__ = ["Attend", "Decoder", "Hidden", "Layer", "RopeTable"]

# (layer, q (N, H, d), k (N, KV, d), v (N, KV, d)) -> (N, H, d), all float32
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Hidden:
    """The outputs of the layer stack for every row."""

    last: Tensor  # (N, hidden) after the final norm
    taps: list[Tensor]  # residual stream entering each tapped layer, (N, hidden)
    joined: Tensor | None = None  # the taps side by side, (N, taps * hidden), where memory holds them so already
    logits: Tensor | None = None  # logits of the wanted rows, where the same call computes them


class RopeTable(nn.Module):
    """Cosines and sines by position, float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, head_dim: int, positions: int) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float64), torch.tensor(rope.frequencies(head_dim), dtype=torch.float64)
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


class Layer(nn.Module):
    """Attention and gated MLP, each behind a norm, with q/k/v and gate/up fused into one product."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.index = index
        c, q_width, kv_width = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = _matrix(q_width + 2 * kv_width, c.hidden, dtype)
        self.out = _matrix(c.hidden, q_width, dtype)
        self.gate_up = _matrix(2 * c.ffn, c.hidden, dtype)
        self.down = _matrix(c.hidden, c.ffn, dtype)
        self.norm_in = nn.Parameter(torch.ones(c.hidden))
        self.norm_mlp = nn.Parameter(torch.ones(c.hidden))
        self.qkv_bias = _bias(q_width + 2 * kv_width, dtype) if c.attention_bias else None
        self.out_bias = _bias(c.hidden, dtype) if c.output_bias else None
        self.gate_up_bias = _bias(2 * c.ffn, dtype) if c.mlp_bias else None
        self.down_bias = _bias(c.hidden, dtype) if c.mlp_bias else None
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, ops: Ops) -> Tensor:
        x = x + self.attention(ops.rms_norm(x, self.norm_in, self.config.norm_eps), rope, attend, ops)
        return x + self.mlp(ops.rms_norm(x, self.norm_mlp, self.config.norm_eps), ops)

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, ops: Ops) -> Tensor:
        c = self.config
        fused = ops.linear(x, self.qkv, self.qkv_bias).float()
        rows = fused.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = rows.tensor_split((c.heads + c.kv_heads,), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.tensor_split((c.heads,), 1)
            qk = torch.cat((ops.rms_norm(q, self.q_norm, c.norm_eps), ops.rms_norm(k, self.k_norm, c.norm_eps)), 1)
        q, k = ops.rotary(qk, *rope).tensor_split((c.heads,), 1)
        mixed = attend(self.index, q, k, v)
        return ops.linear(mixed.reshape(x.shape[0], -1), self.out, self.out_bias)

    def mlp(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.linear(ops.gated(ops.linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias)


class Decoder(nn.Module):
    """Embedding, layers, final norm and output matrix. `logits` is a separate call, because few rows need it."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, output_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = _matrix(config.vocab, config.hidden, output_dtype)
        self.layers = nn.ModuleList(Layer(config, i, dtype) for i in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.output = None if config.tied else _matrix(config.vocab, config.hidden, output_dtype)
        self.rope = RopeTable(config.rope, config.head_dim, config.context)

    def embed(self, tokens: Tensor) -> Tensor:
        """(N,) ids to (N, hidden) float32."""
        return nn.functional.embedding(tokens, self.embedding).float()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        ops: Ops,
        taps: tuple[int, ...] = (),
        layers: range | None = None,
        x: Tensor | None = None,
    ) -> Hidden:
        """Hidden rows of flat tokens; `taps` are layers whose input rows are wanted too.

        `layers` runs only some of the stack, on the rows `x` that enter it.
        """
        x = self.embed(tokens) if x is None else x
        rope = self.rope(positions)
        layers = range(len(self.layers)) if layers is None else layers
        kept: dict[int, Tensor] = {}
        for i in layers:
            if i in taps:
                kept[i] = x
            x = self.layers[i](x, rope, attend, ops)
        kept[layers.stop] = x
        return Hidden(ops.rms_norm(x, self.norm, self.config.norm_eps), [kept[i] for i in taps])

    def logits(self, last: Tensor, ops: Ops) -> Tensor:
        """(N, hidden) after the final norm to (N, V) float32."""
        return ops.linear(last, self.embedding if self.output is None else self.output).float()


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=dtype))


def _bias(width: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(width, dtype=dtype))
