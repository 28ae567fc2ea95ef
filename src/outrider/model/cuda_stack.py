"""A decoder as the GPU runs it: weights in the kernels' order, and one forward as a list of launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache import KVPool
from outrider.errors import InvalidParameter
from outrider.model.decoder import Decoder, Layer, RopeTable
from outrider.ops.cuda.launch import AttentionMetadata, Kernels, Shape, pair_qkv, pair_rows, supported

__all__ = ["CudaPool", "CudaStack", "Forward"]

EXTRA_POSITIONS = 320  # positions past the context that padding and the longest draft may use


class CudaPool(KVPool):
    """Keys and values of every layer on the device, (layers, pages, KV heads, page_size, head_dim).

    Keys keep each pair of rotated dimensions side by side.
    """

    def __init__(self, kernels: Kernels, layers: int, pages: int, device: torch.device) -> None:
        s = kernels.shape
        self.page_size = s.page
        self.pages = pages
        self.head_dim = s.head
        self._kernels = kernels
        shape = (layers, pages, s.kv_heads, s.page, s.head)
        self.keys, self.values = (torch.zeros(shape, dtype=kernels.dtype, device=device) for _ in range(2))

    def move(self, source, target) -> None:  # type: ignore[no-untyped-def]
        """Copy slots to slots in every layer; sources are read before any target is written."""
        if source:
            moves = torch.tensor([list(source), list(target)], dtype=torch.int32).to(self.keys.device)
            for pool in (self.keys, self.values):
                self._kernels.move(pool, moves)


@dataclass(slots=True)
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_in: Tensor
    norm_mlp: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    window: int | None


@dataclass(slots=True)
class Forward:
    """The outputs of a forward for every row."""

    last: Tensor  # (N, hidden) after the last norm, in the weights' dtype
    taps: Tensor | None  # (N, taps, hidden) float32


class CudaStack:
    """Layers over paged KV. With `exact` all products use the row-invariant kernels, otherwise cuBLAS."""

    def __init__(
        self, decoder: Decoder, page_size: int, device: torch.device, exact: bool = True, future_tokens: Tensor | None = None
    ) -> None:
        c = self.config = decoder.config
        _check(decoder)
        self.device = device
        self.dtype = torch.bfloat16 if c.dtype == "bfloat16" else torch.float32
        shape = Shape(c.hidden, c.heads, c.kv_heads, c.head_dim, page_size, c.norm_eps)
        self.kernels = Kernels(shape, self.dtype, future_tokens)
        self._exact = exact
        windows = c.windows or (None,) * c.layers
        self.layers = [self._layer(layer, window) for layer, window in zip(decoder.read_layers(), windows, strict=True)]
        self.embedding = self._take(decoder.weight("embedding"))
        self.output = self.embedding if decoder.output is None else self._take(decoder.weight("output"))
        self.norm = decoder.norm.detach().to(device)
        rope = RopeTable(c.rope, c.head_dim, c.context + EXTRA_POSITIONS)
        self.turns = (rope.cos.to(device), rope.sin.to(device))

    def _take(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype).contiguous()

    def _layer(self, layer: Layer, window: int | None) -> _Layer:
        c = self.config

        def paired_qkv(fused: Tensor) -> Tensor:
            return pair_qkv(fused, c.heads + c.kv_heads, c.head_dim)

        def maybe(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else self._take(bias)

        qkv_bias, gate_up_bias = maybe(layer.qkv_bias), maybe(layer.gate_up_bias)
        qkv, gate_up = paired_qkv(self._take(layer.qkv)), pair_rows(self._take(layer.gate_up), 1)
        if layer.qkv.is_cuda:  # the decoder was built on the device: keep one copy
            layer.qkv.data, layer.gate_up.data = qkv.new_empty(0), gate_up.new_empty(0)
        return _Layer(
            qkv, self._take(layer.out), gate_up, self._take(layer.down),
            layer.norm_in.detach().to(self.device), layer.norm_mlp.detach().to(self.device),
            None if qkv_bias is None else paired_qkv(qkv_bias), maybe(layer.out_bias),
            None if gate_up_bias is None else pair_rows(gate_up_bias, 1), maybe(layer.down_bias), window,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a forward with logits reads."""
        matrices = [part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(part.numel() * part.element_size() for part in (*matrices, self.output))

    def forward(
        self,
        meta: AttentionMetadata,
        pool: KVPool,
        taps: tuple[int, ...] = (),
        chunks: Tensor | None = None,
        single: slice | None = None,
        from_start: bool = False,
    ) -> Forward:
        """Run rows through all layers and write their KV. `chunks` covers prompt rows; without it all rows are single ones.

        With chunks, `single` are the remaining rows. `from_start` says that the rows are one sequence from position 0.
        """
        k, rows, c = self.kernels, len(meta.tokens), self.config
        stream, normed = k.embed(meta, self.embedding, self.layers[0].norm_in)
        kept: dict[int, Tensor] = {}
        width = c.heads * c.head_dim
        for i, layer in enumerate(self.layers):
            if i in taps:
                kept[i] = stream.clone()
            q, mixed = (torch.empty(rows, width, device=self.device, dtype=self.dtype) for _ in range(2))
            kv = (pool.keys[i], pool.values[i])
            self._qkv(normed, layer, q, kv, meta)
            if chunks is None:
                k.attend_rows(q, kv, meta, mixed, layer.window)
            elif from_start and not self._exact and layer.window is None:
                mixed = self._torch_attention(q, kv, meta)
            else:
                k.attend_chunks(q, kv, meta.table, chunks, mixed, layer.window)
                if single is not None:
                    k.attend_rows(q[single], kv, meta.rows(single), mixed[single], layer.window)
            normed = self._add_norm(mixed, layer.out, layer.out_bias, stream, layer.norm_mlp)
            after = self.layers[i + 1].norm_in if i + 1 < len(self.layers) else self.norm
            normed = self._add_norm(self._gated(normed, layer), layer.down, layer.down_bias, stream, after)
        kept[len(self.layers)] = stream
        return Forward(normed, torch.stack([kept[i] for i in taps], 1) if taps else None)

    def _torch_attention(self, q: Tensor, kv: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        """A prompt's attention by torch's fastest kernel, for one sequence that is read from its start."""
        c, rows, page = self.config, len(q), self.kernels.shape.page
        pages = meta.table[0, : -(-rows // page)]
        keys, values = (part[pages].transpose(0, 1).reshape(c.kv_heads, -1, c.head_dim)[None, :, :rows] for part in kv)
        heads = q.view(1, rows, c.heads, c.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows, -1)

    def logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """Float32 logits (N, V) of rows after the last norm."""
        out = torch.empty(len(last), len(self.output), device=self.device) if out is None else out
        if self._exact:
            self.kernels.linear(last, self.output, None, out, "store")
        else:
            out.copy_(F.linear(last, self.output))
        return out

    def _qkv(self, x: Tensor, layer: _Layer, q: Tensor, kv: tuple[Tensor, Tensor], meta: AttentionMetadata) -> None:
        if self._exact:
            self.kernels.qkv(x, layer.qkv, layer.qkv_bias, q, kv, meta, self.turns)
        else:
            self.kernels.place(F.linear(x, layer.qkv, layer.qkv_bias), q, kv, meta, self.turns)

    def _add_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor) -> Tensor:
        """Add a product to the stream in place and return the norm of the stream."""
        if self._exact:
            return self.kernels.add_norm(x, weight, bias, stream, norm)
        stream += F.linear(x, weight, bias)
        return self.kernels.norm(stream, norm)

    def _gated(self, x: Tensor, layer: _Layer) -> Tensor:
        if not self._exact:
            return self.kernels.silu(F.linear(x, layer.gate_up, layer.gate_up_bias))
        out = torch.empty(len(x), self.config.ffn, device=self.device, dtype=self.dtype)
        self.kernels.linear(x, layer.gate_up, layer.gate_up_bias, out, "silu")
        return out


def _check(decoder: Decoder) -> None:
    c = decoder.config
    group = c.heads // c.kv_heads
    if c.dtype not in ("bfloat16", "float32"):
        raise InvalidParameter("dtype", f"{c.dtype} weights are served on the processor alone; pass dtype=bfloat16 or device=cpu")
    if c.qk_norm:
        raise InvalidParameter("device", f"{c.architecture} has norms on q and k, which the GPU path lacks; pass device=cpu")
    if not supported(c.head_dim, group):
        shape = f"heads of {c.head_dim} and {group} query heads per KV head"
        raise InvalidParameter(
            "device", f"the GPU path takes heads of 16 to 256 in groups of 1 to 16, not {shape}; pass device=cpu"
        )
