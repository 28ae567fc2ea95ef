"""A decoder in the native core's format: packed weights, and rows laid out as integers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.cache import KVPool
from outrider.model.decoder import Decoder, Layer
from outrider.model.spec import Attention, ModelSpec
from outrider.ops import Core, LayerWeights, PackedLinear, Stack, StackWeights

if TYPE_CHECKING:
    from outrider.model.runner import Feed

__all__ = ["decoder_stack", "lay_out_rows", "layer_weights", "stack_over"]


def lay_out_rows(feeds: Sequence[Feed]) -> array[int]:
    """The feeds as integers, in the format of read_layout in core.cpp."""
    heads: list[int] = []
    tokens: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    for feed in feeds:
        heads += (feed.start, len(feed.tokens), len(feed.parents), feed.known, feed.first_key, len(feed.pages))
        tokens += feed.tokens
        tokens += feed.nodes
        pages += feed.pages
        parents += feed.parents
    return array("i", [len(feeds), len(tokens), *heads, *tokens, *pages, *parents])


def decoder_stack(decoder: Decoder, pool: KVPool, core: Core) -> Stack:
    """The decoder's layers over a pool. The pool switches to the core's layout: bf16, unless the weights are float32."""
    c = decoder.spec
    layers = [layer_weights(layer, core, c.dtype) for layer in decoder.read_layers()]
    output = PackedLinear(core, c.dtype, decoder.weight("embedding" if c.tied else "output"))
    decoder.materialise("embedding")  # the core reads its rows
    return stack_over(pool, core, decoder, c, layers, c.dtype, output=output)


def stack_over(
    pool: KVPool, core: Core, network: Any, shape: ModelSpec, layers: Sequence[LayerWeights], kind: str, **form: Any
) -> Stack:
    """Packed layers with a network's embedding, rotary table and last norm, over a pool of KV."""
    pool.keep_words(bf16=kind != "float32")
    weights = StackWeights(
        layers=layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        eps=shape.norm.eps,
        embedding=network.embedding,
        cos=network.rope.cos,
        sin=network.rope.sin,
        norm=network.norm,
        **form,
    )
    return Stack(core, weights, pool.keys, pool.values, pool.page_size)


def layer_weights(layer: Layer, core: Core, kind: str) -> LayerWeights:
    """One layer's products and norms."""
    c = layer.spec.attention
    return LayerWeights(
        qkv=PackedLinear(core, kind, layer.qkv, layer.qkv_bias, order=_by_head(c)),
        out=PackedLinear(core, kind, layer.out, layer.out_bias),
        gate_up=PackedLinear(core, kind, layer.gate_up, layer.gate_up_bias, paired=True),
        down=PackedLinear(core, kind, layer.down, layer.down_bias),
        norm_in=layer.norm_in,
        norm_mlp=layer.norm_mlp,  # type: ignore[arg-type]
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        window=c.window,
    )


def _by_head(c: Attention) -> Tensor:
    """Rows of q, k and v in the core's order: of each head of keys its queries, key and value."""
    parts = torch.arange(c.qkv_width).tensor_split((c.q_width, c.q_width + c.kv_width))
    return torch.cat([part.view(c.kv_heads, -1) for part in parts], 1).flatten()
