"""A decoder in the native core's format: packed weights, and rows laid out as integers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache import KVPool
from outrider.model.decoder import Decoder, Layer, RopeTable
from outrider.model.load import INT4
from outrider.model.mapped_stack import MappedStack, in_file
from outrider.model.rotary import Rope
from outrider.model.shard import lazy_layers
from outrider.model.spec import Attention, FeedForward, ModelSpec, Norm
from outrider.ops import Core, Epilogue, LayerWeights, NormWeights, PackedLinear, RotaryRows, Stack, StackWeights
from outrider.ops.experts import ExpertRouter, PackedExperts

if TYPE_CHECKING:
    from outrider.model.runner import Feed
    from outrider.ops.file_arena import FileArena
    from outrider.ops.group import Group

__all__ = ["decoder_stack", "lay_out_rows", "layer_stack", "logit_epilogue", "lossless_kind", "norm_weights"]

_NORMS = ("norm_in", "norm_mlp", "norm_attn_out", "norm_mlp_out")


def lay_out_rows(feeds: Sequence[Feed]) -> array[int]:
    """The feeds as integers, in the format of read_layout in core.cpp."""
    heads: list[int] = []
    tokens: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    for feed in feeds:
        sizes = (feed.start, len(feed.tokens), len(feed.parents), feed.known, feed.first_key, len(feed.pages))
        heads += (*sizes, feed.rotary_start, feed.adapter)
        tokens += feed.tokens
        tokens += feed.nodes
        pages += feed.pages
        parents += feed.parents
    return array("i", [len(feeds), len(tokens), *heads, *tokens, *pages, *parents])


def decoder_stack(
    decoder: Decoder, pool: KVPool, core: Core, group: Group | None = None, weights_file: FileArena | None = None
) -> Stack:
    """The decoder's layers over a pool. The pool switches to the core's layout: bf16, unless the weights are float32.

    With a `group` the decoder is one rank's share, and rows enter as features. With a file the layers lie there.
    """
    s = decoder.spec
    output = _output(decoder, core)
    learned = None
    if s.positions is not None and decoder.positions is not None:
        learned = _floats(decoder.positions[s.positions.offset :])
    return layer_stack(
        pool, core, s, _kind(s.dtype),
        decoder.read_layers(grouped=True) if group is None else lazy_layers(decoder),
        decoder.ropes,  # type: ignore[arg-type]
        weights_file,
        embedding=_embedding(decoder, core, output) if group is None else None,
        embedding_scale=float(s.embedding_scale),
        learned=learned,
        learned_rows=0 if learned is None else len(learned),
        norm=norm_weights(s.norm, decoder.norm, decoder.norm_bias),
        output=output,
        vocab=s.vocab if group is None else s.vocab * group.size,
        ranks=1 if group is None else group.size,
        gather=0 if group is None else group.address,
    )  # fmt: skip


def _kind(dtype: str) -> str:
    """What products of a dtype read where a matrix is not in groups of integers."""
    return "int8" if dtype == INT4 else dtype


def _output(decoder: Decoder, core: Core) -> PackedLinear:
    s = decoder.spec
    name = "embedding" if s.tied else "output"
    matrix = decoder.grouped(name)
    return PackedLinear(
        core, _kind(s.dtype), decoder.weight(name) if matrix is None else matrix, decoder.output_bias, logit_epilogue(s)
    )


def _embedding(decoder: Decoder, core: Core, output: PackedLinear) -> PackedLinear:
    """The matrix whose columns are embeddings: the output matrix, where they are tied and it has the same values."""
    s, kind = decoder.spec, _kind(decoder.spec.dtype)
    if s.tied and (output.is_grouped or kind != "bfloat16"):
        return output
    matrix = None if s.tied else decoder.grouped("embedding")
    if matrix is not None:
        return PackedLinear(core, kind, matrix)
    weight = decoder.weight("embedding")
    if kind == "bfloat16":
        kind = lossless_kind(weight)
        if s.tied and kind == "bfloat16":
            return output
    return PackedLinear(core, kind, weight)


def lossless_kind(weight: Tensor) -> str:
    """bfloat16 where that keeps every value of a matrix, else float32."""
    exact = weight.dtype == torch.bfloat16 or all(
        torch.equal(part, part.bfloat16().float()) for part in torch.split(weight, 4096)
    )
    return "bfloat16" if exact else "float32"


def layer_stack(
    pool: KVPool,
    core: Core,
    spec: ModelSpec,
    kind: str,
    layers: Iterable[Layer],
    ropes: Iterable[RopeTable],
    weights_file: FileArena | None = None,
    **around: Any,
) -> Stack:
    """Layers of a spec over a pool of KV, with the rotary tables of `ModelSpec.ropes`. `around` are fields of StackWeights."""
    pool.keep_words(bf16=kind != "float32")
    tables: dict[Rope | None, RotaryRows] = {None: RotaryRows()}
    tables |= {rope: RotaryRows(table.cos, table.sin, table.growth) for rope, table in zip(spec.ropes, ropes, strict=True)}
    pack = partial(_layer_weights, tables=tables, core=core, kind=kind, arena=weights_file)
    packed = list(map(pack, layers) if weights_file is None else in_file(weights_file, layers, pack))
    sizes = {name: getattr(spec, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    rows = min((len(table.cos) for table in tables.values() if table.cos is not None), default=spec.context)
    weights = StackWeights(packed, len(packed), rotary_rows=rows, **sizes | around)
    stack = core, weights, pool.keys, pool.values, pool.page_size
    return Stack(*stack) if weights_file is None else MappedStack(weights_file, *stack)


def logit_epilogue(spec: ModelSpec) -> Epilogue:
    """What follows the output matrix; see `finished_logits`."""
    return Epilogue(scale=spec.logit_scale, cap=spec.logit_cap)


def norm_weights(norm: Norm | None, weight: Tensor | None, bias: Tensor | None = None, heads: int = 1) -> NormWeights:
    """A norm in the core's format, its weights repeated for that many heads."""
    if norm is None or weight is None:
        return NormWeights()
    weight, bias = (None if x is None else _floats(x).repeat(heads) for x in (weight, bias))
    return NormWeights(weight, bias, norm.kind == "layer", float(norm.eps))


def _layer_weights(
    layer: Layer, tables: Mapping[Rope | None, RotaryRows], core: Core, kind: str, arena: FileArena | None
) -> LayerWeights:
    s, a, m = layer.spec, layer.spec.attention, layer.spec.mlp
    norms = {name: norm_weights(getattr(s, name), getattr(layer, name), getattr(layer, f"{name}_bias")) for name in _NORMS}
    if s.parallel and s.norm_mlp is None:
        norms["norm_mlp"] = norms["norm_in"]
    qk, qk_norm = a.qk_norm, None if a.qk_norm is None else a.qk_norm.norm
    q_heads, k_heads = (a.heads, a.kv_heads) if qk is not None and qk.one_head else (1, 1)
    # a norm after a part scales its result; without one, the part's last product does
    after_attention, after_mlp = (Epilogue(scale=1.0 if norm else s.residual_scale) for norm in (s.norm_attn_out, s.norm_mlp_out))
    dense, groups, linear = m.router is None, layer.grouped, partial(PackedLinear, core, kind, arena=arena)
    return LayerWeights(
        qkv=linear(groups.get("qkv", layer.qkv), layer.qkv_bias, order=_by_head(a)),
        out=linear(groups.get("out", layer.out), layer.out_bias, after_attention),
        gate_up=linear(groups.get("gate_up", layer.gate_up), layer.gate_up_bias, _after_up(m)) if dense else None,
        down=linear(groups.get("down", layer.down), layer.down_bias, after_mlp) if dense else None,
        **norms,
        q_norm=norm_weights(qk_norm, layer.q_norm, layer.q_norm_bias, q_heads),
        k_norm=norm_weights(qk_norm, layer.k_norm, layer.k_norm_bias, k_heads),
        qk_over_width=qk is not None and qk.over == "width",
        parallel=s.parallel,
        rotary=tables[a.rope],
        scale=float(a.scale),
        window=a.window or 0,
        soft_cap=float(a.soft_cap or 0.0),
        residual_scale=float(s.residual_scale),
        sinks=None if layer.sinks is None else _floats(layer.sinks),
        experts=None if dense else _experts(layer, core, linear),
    )


def _after_up(m: FeedForward) -> Epilogue:
    """What follows the first product of a feed-forward part."""
    if m.clamp is not None:
        return Epilogue("clamped", True, m.clamp.alpha, m.clamp.limit)
    return Epilogue(m.activation, paired=m.gated)


def _experts(layer: Layer, core: Core, linear: Callable[..., PackedLinear]) -> PackedExperts:
    """A layer's mixture. Its router is float32, because it chooses."""
    m, r = layer.spec.mlp, layer.spec.mlp.router
    assert r is not None
    assert layer.router is not None
    bias = None if layer.router_bias is None else F.pad(_floats(layer.router_bias), (0, int(m.shared_gate)))
    matrix = PackedLinear(core, "float32", layer.router, bias)
    correction = None if layer.correction is None else _floats(layer.correction)
    numbers = (r.experts, r.chosen, r.scores, r.groups, r.chosen_groups, r.normalised, float(r.scale), float(r.closeness))
    products = [layer.expert_products(expert) for expert in range(r.experts)]
    gate_up = [linear(*opened, _after_up(m)) for opened, _ in products]
    down = [linear(*closing) for _, closing in products]
    shared = None
    if layer.shared_gate_up is not None and layer.shared_down is not None:
        shared = linear(layer.shared_gate_up, None, _after_up(m)), linear(layer.shared_down)
    return PackedExperts(ExpertRouter(matrix, correction, *numbers), gate_up, down, shared)


def _by_head(a: Attention) -> Tensor:
    """Rows of q, k and v in the core's order: of each head of keys its queries, key and value."""
    parts = torch.arange(a.qkv_width).tensor_split((a.q_width, a.q_width + a.kv_width))
    return torch.cat([part.view(a.kv_heads, -1) for part in parts], 1).flatten()


def _floats(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()
