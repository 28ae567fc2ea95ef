"""Attention over paged KV, as the GPU runs it: a layer's matrices in the kernels' order, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache import KVPool
from outrider.model.cuda_weights import Upload, norm_on
from outrider.model.decoder import Layer, RopeTable
from outrider.ops.cuda.launch import AttentionMetadata, HeadForm, Kernels, RowNorm, Turns
from outrider.ops.cuda.matrix import Matrix, RowForm, Rows, pair_qkv, pair_rows
from outrider.ops.cuda.recurrence_launch import gate_heads

if TYPE_CHECKING:
    from outrider.model.cuda_states import RecurrentInputs

__all__ = ["CudaAttention", "CudaRows", "turns_of"]


@dataclass(frozen=True, slots=True)
class CudaRows:
    """The rows of a forward: single ones, or prompts in `chunks` and the `single` ones after them."""

    meta: AttentionMetadata
    chunks: Tensor | None = None
    single: slice | None = None
    from_start: bool = False  # the rows are one sequence from position 0
    singles: AttentionMetadata | None = None  # of the rows `single`
    padding: int = 1 << 30  # rows whose KV goes to this slot or behind are padding
    recurrent: RecurrentInputs | None = None  # where the model has recurrent layers

    def for_forward(self, pool: KVPool | None = None) -> CudaRows:
        """A copy for the layers of one forward, which list the work of attention once. A pool's last page is the padding's."""
        singles = None if self.single is None else self.meta.rows(self.single).for_forward()
        padding = self.padding if pool is None else (pool.pages - 1) * pool.page_size
        return replace(self, meta=self.meta.for_forward(), singles=singles, padding=padding)


class CudaAttention:
    """The mixer that reads keys and values of all earlier positions."""

    def __init__(self, layer: Layer, kernels: Kernels, upload: Upload, turns: Turns | None) -> None:
        self._spec, self._kernels, self._device = layer.spec.attention, kernels, upload.device
        a = self._spec
        pairs, qkv_bias = partial(pair_qkv, turned_heads=a.heads + a.kv_heads, head=a.head_dim), upload.bias(layer.qkv_bias)
        self._sinks = None if layer.sinks is None else layer.sinks.detach().to(upload.device, torch.float32)
        queries = a.heads * a.head_dim
        gate = range(queries, 2 * queries if a.gate else queries)  # columns of the output gate, after the queries
        fused, without = upload.matrix(layer.stored("qkv")), partial(_without, columns=gate)
        self.gate = fused.reordered(lambda rows: rows[gate.start : gate.stop].clone()) if a.gate else None
        self._gate_bias = qkv_bias[gate.start : gate.stop].clone() if a.gate and qkv_bias is not None else None
        self.qkv = fused.reordered(lambda rows: pairs(without(rows)))
        upload.release(layer.stored("qkv"))
        self.out = upload.matrix(layer.stored("out"))
        self._qkv_bias = None if qkv_bias is None else pairs(without(qkv_bias))
        self.bias = upload.bias(layer.out_bias)
        self._form = self._head_form(layer, turns)

    @property
    def reads(self) -> RowForm | None:
        return self.qkv.reads if self.gate is None or self.gate.reads == self.qkv.reads else None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.qkv, self.out) if self.gate is None else (self.gate, self.qkv, self.out)

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        self.gate = None if self.gate is None else change(self.gate)
        self.qkv, self.out = change(self.qkv), change(self.out)

    def forward(self, read: Rows, rows: CudaRows, kv: tuple[Tensor, Tensor] | None) -> Tensor:
        """What attention gives for normed rows, in parts to be added in order and before `bias`: (parts, N, hidden)."""
        assert kv is not None
        gate = None if self.gate is None else self._kernels.parts(read, self.gate)
        return self.attend(self.place(read, rows.meta, kv), rows, kv, gate)

    def place(self, read: Rows, meta: AttentionMetadata, kv: tuple[Tensor, Tensor]) -> Tensor:
        """The queries of normed rows (N, heads * head_dim), with keys and values written."""
        q = torch.empty(len(read), self._spec.q_width, device=self._device, dtype=self._kernels.dtype)
        self._kernels.qkv(read, self.qkv, self._qkv_bias, self._form, q, kv, meta)
        return q

    def attend(self, q: Tensor, rows: CudaRows, kv: tuple[Tensor, Tensor], gate: Tensor | None = None) -> Tensor:
        """What `forward` gives, from queries; `gate` is the product of the output gate, (parts, N, heads * head_dim)."""
        mixed = self._mixed(q, rows, kv)
        if gate is not None:
            gate_heads(mixed, gate, self._gate_bias)
        return self._kernels.parts(mixed, self.out)

    def _mixed(self, q: Tensor, rows: CudaRows, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Values mixed for every row (N, heads * head_dim)."""
        k, a, mixed = self._kernels, self._spec, torch.empty_like(q)
        if rows.chunks is None:
            k.attend_rows(q, kv, rows.meta, mixed, a.window, a.soft_cap, self._sinks)
        elif rows.from_start and not k.exact and a.window is None and a.soft_cap is None and not a.sinks:
            return self._torch_attention(q, kv, rows.meta)
        else:
            k.attend_chunks(q, kv, rows.meta.table, rows.chunks, mixed, a.window, a.soft_cap, self._sinks)
            if rows.single is not None:
                singles = rows.singles or rows.meta.rows(rows.single)
                k.attend_rows(q[rows.single], kv, singles, mixed[rows.single], a.window, a.soft_cap, self._sinks)
        return mixed

    def _torch_attention(self, q: Tensor, kv: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        """A prompt's attention by torch's fastest kernel, for one sequence that is read from its start."""
        a, rows, page = self._spec, len(q), self._kernels.shape.page
        pages = meta.table[0, : -(-rows // page)]
        keys, values = (part[pages].transpose(0, 1).reshape(a.kv_heads, -1, a.head_dim)[None, :, :rows] for part in kv)
        heads = q.view(1, rows, a.heads, a.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows, -1)

    def _head_form(self, layer: Layer, turns: Turns | None) -> HeadForm:
        a, qk = layer.spec.attention, layer.spec.attention.qk_norm
        scale = a.scale / a.head_dim**-0.5  # attention scales by the latter
        if qk is None:
            return HeadForm(turns, scale=scale)
        norms = []
        weights = ((layer.q_norm, layer.q_norm_bias, a.heads), (layer.k_norm, layer.k_norm_bias, a.kv_heads))
        for weight, bias, heads in weights:
            norm = norm_on(self._device, qk.norm, weight, bias)
            assert norm is not None
            paired = (None if part is None else pair_rows(part, 1 if qk.one_head else heads) for part in norm[2:])
            norms.append(RowNorm(norm.kind, norm.eps, *paired))  # type: ignore[arg-type]
        return HeadForm(turns, (norms[0], norms[1]), qk.over == "width", qk.one_head, scale)


def _without(rows: Tensor, columns: range) -> Tensor:
    """A tensor without some of its rows."""
    return torch.cat((rows[: columns.start], rows[columns.stop :])) if columns else rows


def turns_of(table: RopeTable, device: torch.device, lag: int = 0) -> Turns:
    """Rotary tables on the device. With a `lag` rows carry the position that many before their slot's."""
    cos, sin = (torch.cat((part[:1].expand(lag, -1), part[: len(part) - lag])).to(device) for part in (table.cos, table.sin))
    return Turns(cos, sin, None if table.growth is None else table.growth.to(device), len(table.starts) > 1 and not lag)
