"""The decoder that a `ModelSpec` describes, in torch: the readable definition, and what training differentiates.

Rows are tokens: everything is (N, width). The residual stream and the logits are float32; linears take and give the
weights' dtype. Attention is an argument, so training and serving share the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from outrider.model.experts import activated, mixed_experts
from outrider.model.recurrence import Mixer, Recur
from outrider.model.rotary import Rope, RotaryVariant
from outrider.model.spec import LayerSpec, ModelSpec, Norm
from outrider.ops import Grouped, Ops, ScaledFloats, StoredBlocks

__all__ = [
    "Attend",
    "Decoder",
    "Deltas",
    "Hidden",
    "Layer",
    "RopeTable",
    "Turn",
    "WeightSource",
    "finished_logits",
    "norm_weights",
    "normed",
]

# (layer, q (N, H, d), k (N, KV, d), v (N, KV, d)) -> (N, H, d), all float32. It scales scores by
# d ** -0.5, and applies the window and the soft cap of the layer's spec.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (layer, product, its input x, its result y) -> y with what adapters add to it. Products are qkv, out, gate_up and down.
Deltas = Callable[[int, str, Tensor, Tensor], Tensor]
Product = tuple[Tensor, Tensor | None]  # a matrix and its bias


@dataclass(slots=True)
class Hidden:
    """The outputs of the layer stack for every row."""

    last: Tensor  # (N, hidden) after the final norm
    taps: list[Tensor]  # residual stream entering each tapped layer, (N, hidden)
    joined: Tensor | None = None  # the taps side by side, (N, taps * hidden), where memory holds them so already
    logits: Tensor | None = None  # logits of the wanted rows, where the same call computes them


class Turn(NamedTuple):
    """Rotary cosines and sines (N, 1, head_dim) of rows as `Ops.rotary` takes them; the factor (N,) of their queries, if any."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None


class WeightSource(Protocol):
    """Where a decoder reads parameters that it does not hold in memory."""

    def read(self, name: str) -> Tensor:
        """A parameter, which may lie in a mapped file and be narrower than the decoder holds it."""

    def grouped(self, name: str) -> Grouped | StoredBlocks | None:
        """A matrix as groups of integers; None where it is to be read in floating point."""

    def packed(self, name: str) -> Grouped | ScaledFloats | None:
        """A matrix as it is stored, integers or FP8, for devices; None where it is to be read in floating point."""

    def fill(self, name: str, target: Tensor) -> None:
        """Write a parameter's values."""

    def close(self) -> None:
        """Close files; reading opens them again."""


class RopeTable(nn.Module):
    """Cosines and sines by position, float32. Variants lie one after the other; `starts` are their first rows."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None

    def __init__(self, rope: Rope, head_dim: int, positions: int) -> None:
        super().__init__()
        variants = rope.variants(head_dim)
        rows = [min(variant.limit, positions) for variant in variants[:-1]] + [positions]
        self.starts = [sum(rows[:i]) for i in range(len(rows))]
        self.limits = [variant.limit for variant in variants]
        parts = [_turns(variant, count, head_dim // 2) for variant, count in zip(variants, rows, strict=True)]
        self.register_buffer("cos", torch.cat([cos for cos, _ in parts]), persistent=False)
        self.register_buffer("sin", torch.cat([sin for _, sin in parts]), persistent=False)
        growth = None if rope.query_growth is None else torch.cat([_growth(*rope.query_growth, count) for count in rows])
        self.register_buffer("growth", growth, persistent=False)

    def start(self, length: int) -> int:
        """The first row of the variant for a request of at most `length` tokens."""
        fitting = (start for start, limit in zip(self.starts, self.limits, strict=True) if length <= limit)
        return next(fitting, self.starts[-1])

    def forward(self, positions: Tensor) -> Turn:
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        growth = None if self.growth is None else self.growth[positions]
        return Turn(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), growth)


def _turns(variant: RotaryVariant, positions: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (positions, pairs). Pairs that do not turn have cosine 1 and sine 0."""
    where, frequencies = torch.arange(positions, dtype=torch.float64), torch.tensor(variant.frequencies, dtype=torch.float64)
    angles, still = torch.outer(where, frequencies), (0, pairs - len(variant.frequencies))
    cos, sin = (angles.cos() * variant.scale).float(), (angles.sin() * variant.scale).float()
    return nn.functional.pad(cos, still, value=1.0), nn.functional.pad(sin, still)


def _growth(beta: float, original: int, positions: int) -> Tensor:
    where = torch.arange(positions, dtype=torch.float64)
    return (1 + beta * torch.log1p(torch.floor(where / original))).float()


class Layer(nn.Module):
    """A `LayerSpec` with weights: q/k/v and gate/up are fused into one product each."""

    def __init__(self, spec: LayerSpec, hidden: int, index: int, dtype: torch.dtype, recurrent_index: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        self.recurrent = None if spec.recurrent is None else Mixer(spec.recurrent, hidden, recurrent_index, dtype)
        a, m = spec.attention, spec.mlp
        self.qkv = _matrix(a.qkv_width, hidden, dtype)
        self.out = _matrix(hidden, a.q_width, dtype)
        self.gate_up = _matrix(m.experts * m.up_width, hidden, dtype)  # experts one below the other
        self.down = _matrix(m.experts * hidden, m.width, dtype)
        self.qkv_bias = _bias(a.qkv_width, dtype) if a.bias else None
        self.out_bias = _bias(hidden, dtype) if a.out_bias else None
        self.gate_up_bias = _bias(m.experts * m.up_width, dtype) if m.bias else None
        self.down_bias = _bias(m.experts * hidden, dtype) if m.bias else None
        self._add_router(hidden, dtype)
        self.sinks = nn.Parameter(torch.zeros(a.heads)) if a.sinks else None
        self.norm_in, self.norm_in_bias = norm_weights(spec.norm_in, hidden)
        self.norm_mlp, self.norm_mlp_bias = norm_weights(spec.norm_mlp, hidden)
        self.norm_attn_out, self.norm_attn_out_bias = norm_weights(spec.norm_attn_out, hidden)
        self.norm_mlp_out, self.norm_mlp_out_bias = norm_weights(spec.norm_mlp_out, hidden)
        qk = a.qk_norm
        q_width, k_width = (a.head_dim, a.head_dim) if qk is not None and qk.one_head else (a.q_width, a.kv_width)
        qk_norm = None if qk is None else qk.norm
        self.q_norm, self.q_norm_bias = norm_weights(qk_norm, q_width)
        self.k_norm, self.k_norm_bias = norm_weights(qk_norm, k_width)
        self.grouped: dict[str, Grouped | StoredBlocks] = {}  # matrices that are integers, while they are read
        self.packed: dict[str, Grouped | ScaledFloats] = {}  # the same for devices
        self._query_scale = a.scale * math.sqrt(a.head_dim)

    def _add_router(self, hidden: int, dtype: torch.dtype) -> None:
        """The router, whose matrix is float32 because it chooses, and the shared expert."""
        m = self.spec.mlp
        self.touched = 0  # experts whose weights were read so far
        self._split_from = 0
        self._products: list[tuple[Product, Product]] = []
        self.router = None if m.router is None else _matrix(m.router_width, hidden, torch.float32)
        self.router_bias = _bias(m.experts, torch.float32) if m.router is not None and m.router.bias else None
        self.correction = _bias(m.experts, torch.float32) if m.router is not None and m.router.correction else None
        self.shared_gate_up = _matrix(m.shared_up_width, hidden, dtype) if m.shared else None
        self.shared_down = _matrix(hidden, m.shared, dtype) if m.shared else None

    def forward(
        self, x: Tensor, turn: Turn | None, attend: Attend, ops: Ops, deltas: Deltas | None = None, recur: Recur | None = None
    ) -> Tensor:
        s = self.spec
        if s.parallel:
            read = normed(x, s.norm_in, self.norm_in, self.norm_in_bias, ops)
            mixed = self.attention(read, turn, attend, ops, deltas)
            if s.norm_mlp is not None:
                read = normed(x, s.norm_mlp, self.norm_mlp, self.norm_mlp_bias, ops)
            return self._add(self._add(x, mixed), self.mlp(read, ops, deltas))
        if s.mixes:
            read = normed(x, s.norm_in, self.norm_in, self.norm_in_bias, ops)
            mixed = self.mixed(read, turn, attend, ops, deltas, recur)
            x = self._add(x, normed(mixed, s.norm_attn_out, self.norm_attn_out, self.norm_attn_out_bias, ops))
        if not s.mlp.width:
            return x
        read = normed(x, s.norm_mlp, self.norm_mlp, self.norm_mlp_bias, ops)
        made = self.mlp(read, ops, deltas)
        return self._add(x, normed(made, s.norm_mlp_out, self.norm_mlp_out, self.norm_mlp_out_bias, ops))

    def mixed(self, x: Tensor, turn: Turn | None, attend: Attend, ops: Ops, deltas: Deltas | None, recur: Recur | None) -> Tensor:
        """What attention gives, or the recurrent mixer, or both added."""
        if self.recurrent is None:
            return self.attention(x, turn, attend, ops, deltas)
        assert recur is not None, "recurrent layers are run by a runner"
        states: Tensor = self.recurrent(x, recur, ops)
        if not self.spec.attention.heads:
            return states
        return self.attention(x, turn, attend, ops, deltas).float() + states.float()

    def attention(self, x: Tensor, turn: Turn | None, attend: Attend, ops: Ops, deltas: Deltas | None = None) -> Tensor:
        a = self.spec.attention
        rows, gate = self._product("qkv", x, ops, deltas).float(), None
        if a.gate:
            queries, gate, others = rows.split_with_sizes((a.q_width, a.q_width, 2 * a.kv_width), 1)
            rows = torch.cat((queries, others), 1)
        out = attend(self.index, *self.queries_keys_values(rows, turn, ops)).reshape(x.shape[0], -1)
        out = self._product("out", out if gate is None else out * ops.sigmoid(gate), ops, deltas)
        return out if a.out_scale == 1.0 else out.float() * a.out_scale

    def queries_keys_values(self, rows: Tensor, turn: Turn | None, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """What attention reads, (N, heads, head_dim) each, of the qkv product. Queries and keys are normed and rotated."""
        a = self.spec.attention
        qk, v = rows.view(-1, a.heads + 2 * a.kv_heads, a.head_dim).tensor_split((a.heads + a.kv_heads,), 1)
        if a.qk_norm is not None:
            qk = self._qk_normed(qk, ops)
        q, k = (qk if turn is None else ops.rotary(qk, turn.cos, turn.sin)).tensor_split((a.heads,), 1)
        if self._query_scale != 1.0:
            q = q * self._query_scale
        if turn is not None and turn.growth is not None:
            q = q * turn.growth[:, None, None]
        return q, k, v

    def mlp(self, x: Tensor, ops: Ops, deltas: Deltas | None = None) -> Tensor:
        m = self.spec.mlp
        if m.router is not None:
            return mixed_experts(self, x, ops)
        out = self._product("down", activated(self._product("gate_up", x, ops, deltas), m, ops), ops, deltas)
        return out if m.out_scale == 1.0 else out.float() * m.out_scale

    def stored(self, name: str) -> Tensor | Grouped | ScaledFloats:
        """A matrix as a device takes it: as it is stored, or in floating point."""
        return self.packed.get(name) or getattr(self, name)

    def is_product(self, name: str) -> bool:
        """Whether a parameter is the matrix of one product. Those of experts lie one below the other in one parameter."""
        return name in ("qkv", "out") or (name in ("gate_up", "down") and self.spec.mlp.router is None)

    def expert_products(self, expert: int) -> tuple[Product, Product]:
        """Matrix and bias of both products of an expert. Views of fixed matrices are kept: ops prepare each at its first use."""
        if torch.is_grad_enabled() and self.gate_up.requires_grad:
            return self._split("gate_up")[expert], self._split("down")[expert]
        if self._split_from != id(self.gate_up):  # which the views keep alive
            self._split_from, self._products = (
                id(self.gate_up),
                list(zip(self._split("gate_up"), self._split("down"), strict=True)),
            )
        return self._products[expert]

    def _split(self, name: str) -> list[Product]:
        """Every expert's part of the matrix and of the bias in which all lie one below the other."""
        matrix, bias, count = getattr(self, name), getattr(self, f"{name}_bias"), self.spec.mlp.experts
        return list(zip(matrix.chunk(count), [None] * count if bias is None else bias.chunk(count), strict=True))

    def _product(self, name: str, x: Tensor, ops: Ops, deltas: Deltas | None) -> Tensor:
        y = ops.linear(x, getattr(self, name), getattr(self, f"{name}_bias"))
        return y if deltas is None else deltas(self.index, name, x, y)

    def _add(self, x: Tensor, part: Tensor) -> Tensor:
        scale = self.spec.residual_scale
        return x + part if scale == 1.0 else x + part.float() * scale

    def _qk_normed(self, qk: Tensor, ops: Ops) -> Tensor:
        """Queries and keys (N, heads + KV heads, d) after their norms."""
        a = self.spec.attention
        assert a.qk_norm is not None
        assert self.q_norm is not None
        assert self.k_norm is not None
        made = []
        weights = ((self.q_norm, self.q_norm_bias), (self.k_norm, self.k_norm_bias))
        for part, (weight, bias) in zip(qk.tensor_split((a.heads,), 1), weights, strict=True):
            x, shape = (part.flatten(1), (-1,)) if a.qk_norm.over == "width" else (part, (-1, a.head_dim))
            by_head = (weight.view(shape).squeeze(0), None if bias is None else bias.view(shape).squeeze(0))
            made.append(normed(x, a.qk_norm.norm, *by_head, ops).view(part.shape))
        return torch.cat(made, 1)


class Decoder(nn.Module):
    """Embedding, layers, final norm and output matrix. `logits` is a separate call, because few rows need it."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32, output_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = _matrix(spec.vocab, spec.hidden, output_dtype)
        self.positions = None if spec.positions is None else _matrix(spec.positions.rows, spec.hidden, output_dtype)
        before = list(accumulate((layer.recurrent is not None for layer in spec.layers), initial=0))
        self.layers = nn.ModuleList(Layer(layer, spec.hidden, i, dtype, before[i]) for i, layer in enumerate(spec.layers))
        self.norm = nn.Parameter(torch.ones(spec.hidden))
        self.norm_bias = nn.Parameter(torch.zeros(spec.hidden)) if spec.norm.bias else None
        self.output = None if spec.tied else _matrix(spec.vocab, spec.hidden, output_dtype)
        self.output_bias = _bias(spec.vocab, output_dtype) if spec.output_bias else None
        self.source: WeightSource | None = None  # of parameters that are not in memory (device meta)
        self.make_tables()

    def weight(self, name: str) -> Tensor:
        """A parameter; where it is not in memory, as its source reads it, which may be narrower than it is held in."""
        parameter = self.get_parameter(name)
        return self.source.read(name) if self.source is not None and parameter.is_meta else parameter

    def grouped(self, name: str) -> Grouped | StoredBlocks | None:
        """A matrix as its source has it in groups of integers; None where there is none in such groups."""
        absent = self.source is not None and self.get_parameter(name).is_meta
        return self.source.grouped(name) if absent and self.source is not None else None

    def packed(self, name: str) -> Grouped | ScaledFloats | None:
        """A matrix as its source has it stored, for devices; None where it is to be read in floating point."""
        absent = self.source is not None and self.get_parameter(name).is_meta
        return self.source.packed(name) if absent and self.source is not None else None

    def read_layers(self, grouped: bool = False, packed: bool = False) -> Iterator[Layer]:
        """The layers one by one. What is read from files for a layer leaves memory when the next one is asked for.

        With `grouped`, matrices that are to be products of integers are in `Layer.grouped` alone; with `packed`, those that
        devices multiply as they are stored are in `Layer.packed` alone.
        """
        layers: Iterable[Layer] = self.layers  # type: ignore[assignment]
        for i, layer in enumerate(layers):
            absent = {name: parameter for name, parameter in layer.named_parameters() if parameter.is_meta}
            for name in absent:
                place = f"layers.{i}.{name}"
                if grouped and layer.is_product(name) and (matrix := self.grouped(place)) is not None:
                    layer.grouped[name] = matrix
                elif packed and layer.is_product(name) and (stored := self.packed(place)) is not None:
                    layer.packed[name] = stored
                else:
                    _set_parameter(layer, name, nn.Parameter(self.weight(place), requires_grad=False))
            yield layer
            layer.grouped.clear()
            layer.packed.clear()
            for name, parameter in absent.items():
                _set_parameter(layer, name, parameter)

    def materialise(self, *names: str) -> Decoder:
        """Hold parameters in memory: these, or all without names."""
        for name, parameter in list(self.named_parameters()):
            if self.source is None or not parameter.is_meta or (names and name not in names):
                continue
            held = torch.empty_like(parameter, device="cpu")
            self.source.fill(name, held)
            _set_parameter(self, name, nn.Parameter(held, requires_grad=False))
        if not names:
            self.close()
            self.source = None
        return self

    def close(self) -> None:
        """Close the files that weights are read from. Reading more opens them again."""
        if self.source is not None:
            self.source.close()

    def make_tables(self, positions: int = 0) -> None:
        """Compute the rotary tables, one for each of `ModelSpec.ropes`: of the context, or of more positions where that works.

        Behind the context, rows must not see farther back than the context reaches.
        """
        s = self.spec
        is_relative = s.positions is None and not any(rope.has_variants for rope in s.ropes)
        self.reach = max(positions, s.context) if is_relative else s.context
        self.ropes = nn.ModuleList(RopeTable(rope, s.attention.head_dim, self.reach) for rope in s.ropes)
        ropes = [layer.attention.rope for layer in s.layers]
        self._rope_of = [None if rope is None else s.ropes.index(rope) for rope in ropes]  # the table of each layer

    def share_tables(self, other: Decoder) -> None:
        """Use the rotary tables of a decoder with the same positions and rotary settings."""
        self.ropes = other.ropes

    @property
    def rope(self) -> RopeTable:
        """The first of the tables."""
        return self.ropes[0]  # type: ignore[return-value]

    def rotary_start(self, max_length: int) -> int:
        """The first row of the rotary tables for a request of at most that many tokens; it stays the same to the end."""
        return self.rope.start(max_length) if len(self.ropes) else 0

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(N,) ids to (N, hidden) float32."""
        x = nn.functional.embedding(tokens, self.embedding).float()
        if self.spec.embedding_scale != 1.0:
            x = x * self.spec.embedding_scale
        if self.positions is None or self.spec.positions is None:
            return x
        return x + nn.functional.embedding(positions + self.spec.positions.offset, self.positions).float()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        ops: Ops,
        taps: tuple[int, ...] = (),
        layers: range | None = None,
        x: Tensor | None = None,
        rotary_rows: Tensor | None = None,
        deltas: Deltas | None = None,
        recur: Recur | None = None,
    ) -> Hidden:
        """Hidden rows of flat tokens; `taps` are layers whose input rows are wanted too.

        `layers` runs only some of the stack, on the rows `x` that enter it. `rotary_rows` are rows of the rotary tables, where
        they are not the positions. `deltas` are of rows that have adapters. `recur` runs recurrent mixers.
        """
        x = self.embed(tokens, positions) if x is None else x
        rows = positions if rotary_rows is None else rotary_rows
        turns = [table(rows) for table in self.ropes]
        layers = range(len(self.layers)) if layers is None else layers
        kept: dict[int, Tensor] = {}
        for i, layer in zip(layers, islice(self.layers, layers.start, layers.stop), strict=True):
            if i in taps:
                kept[i] = x
            rope = self._rope_of[i]
            x = layer(x, None if rope is None else turns[rope], attend, ops, deltas, recur)
        kept[layers.stop] = x
        return Hidden(self.last(x, ops), [kept[i] for i in taps])

    def last(self, x: Tensor, ops: Ops) -> Tensor:
        """Rows that left the last layer, after the final norm."""
        return normed(x, self.spec.norm, self.norm, self.norm_bias, ops)

    def logits(self, last: Tensor, ops: Ops) -> Tensor:
        """(N, hidden) after the final norm to (N, V) float32."""
        logits = ops.linear(last, self.embedding if self.output is None else self.output, self.output_bias).float()
        return finished_logits(logits, self.spec)


def finished_logits(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Logits after the model's scale and soft cap. Heads that use the target's output matrix need them too."""
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.logit_cap is not None:
        logits = spec.logit_cap * torch.tanh(logits / spec.logit_cap)
    return logits


def normed(x: Tensor, norm: Norm | None, weight: Tensor | None, bias: Tensor | None, ops: Ops) -> Tensor:
    """Rows after a norm; as they are where there is none."""
    if norm is None:
        return x
    assert weight is not None
    return ops.rms_norm(x, weight, norm.eps) if norm.kind == "rms" else ops.layer_norm(x, weight, bias, norm.eps)


def norm_weights(norm: Norm | None, width: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Weight and bias of a norm, float32; None where it has none."""
    if norm is None:
        return None, None
    return nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)) if norm.bias else None


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of a module or of one inside it."""
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A parameter. The matrix of a part that a layer does not have is empty, and none."""
    matrix = torch.empty(rows, columns, dtype=dtype)
    return nn.Parameter(matrix) if matrix.numel() else matrix


def _bias(width: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(width, dtype=dtype))
