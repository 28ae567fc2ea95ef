"""One layer as the GPU runs it: its weights in the kernels' order, and its launches. Targets and EAGLE heads share it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.model.decoder import Layer, RopeTable
from outrider.model.spec import Norm
from outrider.ops.cuda.launch import AttentionMetadata, HeadForm, Kernels, RowNorm, Turns, pair_qkv, pair_rows

__all__ = ["CudaLayer", "CudaRows", "norm_on", "turns_of"]


@dataclass(frozen=True, slots=True)
class CudaRows:
    """The rows of a forward: single ones, or prompts in `chunks` and the `single` ones after them."""

    meta: AttentionMetadata
    chunks: Tensor | None = None
    single: slice | None = None
    from_start: bool = False  # the rows are one sequence from position 0
    singles: AttentionMetadata | None = None  # of the rows `single`

    def for_forward(self) -> CudaRows:
        """A copy for the layers of one forward, which list the work of attention once."""
        singles = None if self.single is None else self.meta.rows(self.single).for_forward()
        return replace(self, meta=self.meta.for_forward(), singles=singles)


class CudaLayer:
    """A layer over paged KV. Matrices of a decoder that was built on the device are moved, not copied."""

    def __init__(self, layer: Layer, kernels: Kernels, device: torch.device, turns: Turns | None) -> None:
        self.spec, self._kernels, self._device = layer.spec, kernels, device
        a, m = layer.spec.attention, layer.spec.mlp
        self.qkv = pair_qkv(self._take(layer.qkv), a.heads + a.kv_heads, a.head_dim)
        self.gate_up = pair_rows(self._take(layer.gate_up), 1) if m.gated else self._take(layer.gate_up)
        self.out, self.down = self._take(layer.out), self._take(layer.down)
        if layer.qkv.is_cuda:
            layer.qkv.data = layer.gate_up.data = self.qkv.new_empty(0)
        qkv_bias, gate_up_bias = self._maybe(layer.qkv_bias), self._maybe(layer.gate_up_bias)
        self._qkv_bias = None if qkv_bias is None else pair_qkv(qkv_bias, a.heads + a.kv_heads, a.head_dim)
        self._gate_up_bias = pair_rows(gate_up_bias, 1) if gate_up_bias is not None and m.gated else gate_up_bias
        self._out_bias, self._down_bias = self._maybe(layer.out_bias), self._maybe(layer.down_bias)
        s = layer.spec
        self.norm_in = norm_on(device, s.norm_in, layer.norm_in, layer.norm_in_bias)
        self._norm_mlp = norm_on(device, s.norm_mlp, layer.norm_mlp, layer.norm_mlp_bias)
        self._norm_attn_out = norm_on(device, s.norm_attn_out, layer.norm_attn_out, layer.norm_attn_out_bias)
        self._norm_mlp_out = norm_on(device, s.norm_mlp_out, layer.norm_mlp_out, layer.norm_mlp_out_bias)
        self._form = self._head_form(layer, turns)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def forward(
        self, read: Tensor, stream: Tensor, after: RowNorm | None, rows: CudaRows, kv: tuple[Tensor, Tensor]
    ) -> Tensor:  # fmt: skip
        """Add attention over the rows `read` and the feed-forward part to the stream, in place; returns its norm `after`."""
        k, s = self._kernels, self.spec
        mixed = k.parts(self._attention(read, rows, kv), self.out)
        if not s.parallel:
            read = k.finish(mixed, self._out_bias, stream, self._norm_mlp, self._norm_attn_out, s.residual_scale)
        elif s.norm_mlp is not None:
            read = k.norm(stream, self._norm_mlp)
        inner = k.activated(read, self.gate_up, self._gate_up_bias, s.mlp.activation, s.mlp.gated)
        if s.parallel:
            k.finish(mixed, self._out_bias, stream, None, None, s.residual_scale)
        return k.finish(k.parts(inner, self.down), self._down_bias, stream, after, self._norm_mlp_out, s.residual_scale)

    def _attention(self, read: Tensor, rows: CudaRows, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Values mixed for every row (N, heads * head_dim), with keys and values written."""
        k, a = self._kernels, self.spec.attention
        q, mixed = (torch.empty(len(read), a.q_width, device=self._device, dtype=k.dtype) for _ in range(2))
        k.qkv(read, self.qkv, self._qkv_bias, self._form, q, kv, rows.meta)
        if rows.chunks is None:
            k.attend_rows(q, kv, rows.meta, mixed, a.window, a.soft_cap)
        elif rows.from_start and not k.exact and a.window is None and a.soft_cap is None:
            return self._torch_attention(q, kv, rows.meta)
        else:
            k.attend_chunks(q, kv, rows.meta.table, rows.chunks, mixed, a.window, a.soft_cap)
            if rows.single is not None:
                singles = rows.singles or rows.meta.rows(rows.single)
                k.attend_rows(q[rows.single], kv, singles, mixed[rows.single], a.window, a.soft_cap)
        return mixed

    def _torch_attention(self, q: Tensor, kv: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        """A prompt's attention by torch's fastest kernel, for one sequence that is read from its start."""
        a, rows, page = self.spec.attention, len(q), self._kernels.shape.page
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

    def _take(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._device, self._kernels.dtype).contiguous()

    def _maybe(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self._take(bias)


def norm_on(device: torch.device, norm: Norm | None, weight: Tensor | None, bias: Tensor | None) -> RowNorm | None:
    """A norm with its weights on the device."""
    if norm is None:
        return None
    assert weight is not None
    return RowNorm(norm.kind, norm.eps, weight.detach().to(device), None if bias is None else bias.detach().to(device))


def turns_of(table: RopeTable, device: torch.device, lag: int = 0) -> Turns:
    """Rotary tables on the device. With a `lag` rows carry the position that many before their slot's."""
    cos, sin = (torch.cat((part[:1].expand(lag, -1), part[: len(part) - lag])).to(device) for part in (table.cos, table.sin))
    return Turns(cos, sin, None if table.growth is None else table.growth.to(device), len(table.starts) > 1 and not lag)
