"""How families name their tensors, and where each stored tensor goes in the decoder.

Whatever a checkpoint does differently is undone here: fused and split products, rows of q and k in another rotary order,
transposed matrices, norms stored as weight - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.model.families.expert_names import ExpertNames, expert_places
from outrider.model.families.place import Place
from outrider.model.families.recurrent_names import RecurrentNames, recurrent_places
from outrider.model.spec import LayerSpec, ModelSpec

__all__ = ["AFTER_PARTS", "LLAMA_PARTS", "Names", "Place", "places", "without"]

LLAMA_PARTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "sinks": "self_attn.sinks",
}  # fmt: skip
AFTER_PARTS = {part: name for part, name in LLAMA_PARTS.items() if not part.startswith("norm_")} | {
    "norm_attn_out": "post_attention_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}

_EXPERTS = ExpertNames()


@dataclass(frozen=True, slots=True)
class Names:
    """Stored names, without ".weight" and ".bias". A part that is missing or "" is not stored."""

    parts: Mapping[str, str] = field(default_factory=lambda: LLAMA_PARTS)  # of a layer: q k v or qkv, gate up or gate_up, ...
    layer: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    output: str = "lm_head"
    qkv_by_head: bool = False  # rows of a fused qkv: of each head of keys its queries, key and value
    experts: ExpertNames = _EXPERTS  # of layers with a router
    transposed: bool = False  # matrices of the layers are stored (in, out)
    norm_offset: float = 0.0  # added to stored norm weights
    recurrent: RecurrentNames | None = None
    ignored: tuple[str, ...] = ()  # endings of tensors that hold no weights
    ignored_layers: int | None = None  # layers from this number on are no part of the decoder

    def is_ignored(self, name: str) -> bool:
        """Whether a stored tensor holds no weights of the decoder."""
        before, _, after = self.layer.partition("{}")
        number = name.removeprefix(before).partition(after)[0] if name.startswith(before) else ""
        beyond = self.ignored_layers is not None and number.isdecimal() and int(number) >= self.ignored_layers
        return beyond or name.endswith(self.ignored)

    @property
    def prefix(self) -> str:
        """What begins all names but the output matrix's; some checkpoints leave it out."""
        return self.layer.partition(".")[0] + "."


def places(spec: ModelSpec, names: Names, stored: Collection[str] = ()) -> dict[str, Place]:
    """Stored tensor name -> its place in the decoder. What is `stored` decides between layouts that a family has."""
    found = {f"{names.embedding}.weight": Place("embedding")}
    if spec.positions is not None:
        found[f"{names.positions}.weight"] = Place("positions")
    if not spec.tied:
        found[f"{names.output}.weight"] = Place("output")
    if spec.output_bias:
        found[f"{names.output}.bias"] = Place("output_bias")
    found |= _norm(names.norm, "norm", spec.norm.bias, names)
    for i, layer in enumerate(spec.layers):
        prefix = names.layer.format(i)
        found |= {prefix + name: place for name, place in _layer(layer, names, f"layers.{i}.")}
        if layer.recurrent is not None and names.recurrent is not None:
            mixer = recurrent_places(layer.recurrent, names.recurrent)
            found |= {prefix + name: place._replace(parameter=f"layers.{i}.recurrent.{place.parameter}") for name, place in mixer}
        if layer.mlp.router is not None:
            held = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
            mixture = expert_places(layer.mlp, spec.hidden, names.experts, held)
            found |= {prefix + name: place._replace(parameter=f"layers.{i}.{place.parameter}") for name, place in mixture}
    return found


def _layer(spec: LayerSpec, names: Names, to: str) -> Iterator[tuple[str, Place]]:
    a, m = spec.attention, spec.mlp
    if a.sinks:
        yield names.parts["sinks"], Place(f"{to}sinks")
    rope_order = a.rope.order(a.head_dim) if a.rope is not None else None
    rows = _rows(spec)
    biased = {"qkv": a.bias, "out": a.out_bias, "gate_up": m.bias, "down": m.bias}
    for part, name in names.parts.items():
        if part in rows and name:
            parameter, where = rows[part]
            order = _row_order(spec, names, part, rope_order)
            yield f"{name}.weight", Place(f"{to}{parameter}", where, order, names.transposed)
            if biased[parameter]:
                yield f"{name}.bias", Place(f"{to}{parameter}_bias", where, order)
    for part in ("norm_in", "norm_mlp", "norm_attn_out", "norm_mlp_out"):
        norm = getattr(spec, part)
        if norm is not None:
            yield from _norm(names.parts.get(part, ""), to + part, norm.bias, names)
    if a.qk_norm is not None:
        for part, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
            order = None if rope_order is None else _by_head(1 if a.qk_norm.one_head else heads, rope_order)
            for name, place in _norm(names.parts.get(part, ""), to + part, a.qk_norm.norm.bias, names):
                if "{}" not in name:
                    by_head = a.qk_norm.over == "head" and not a.qk_norm.shared
                    yield name, place._replace(order=order, columns=a.head_dim if by_head else 0)
                    continue
                for head in range(heads):  # each head has a tensor of its own
                    where = slice(head * a.head_dim, (head + 1) * a.head_dim)
                    one = None if rope_order is None else _by_head(1, rope_order)
                    yield name.format(head), place._replace(rows=where, order=one)


def without(parts: Mapping[str, str], *left_out: str) -> dict[str, str]:
    """Names of parts, some left out."""
    return {part: name for part, name in parts.items() if part not in left_out}


def _norm(name: str, parameter: str, biased: bool, names: Names) -> Iterator[tuple[str, Place]]:
    if name:
        yield f"{name}.weight", Place(parameter, add=names.norm_offset)
        if biased:
            yield f"{name}.bias", Place(f"{parameter}_bias")


def _rows(spec: LayerSpec) -> dict[str, tuple[str, slice]]:
    """The parameter and rows of each stored product."""
    a, m = spec.attention, spec.mlp
    q, kv, all_rows = a.qkv_width - 2 * a.kv_width, a.kv_width, slice(None)  # queries with their gate
    rows = {
        "qkv": ("qkv", all_rows),
        "q": ("qkv", slice(0, q)),
        "k": ("qkv", slice(q, q + kv)),
        "v": ("qkv", slice(q + kv, q + 2 * kv)),
        "kv": ("qkv", slice(q, q + 2 * kv)),
        "out": ("out", all_rows),
    }
    rows = rows if a.heads else {}
    if m.router is not None or not m.width:
        return rows
    rows |= dict.fromkeys(("gate_up", "up"), ("gate_up", all_rows)) | {"down": ("down", all_rows)}
    if m.gated:
        rows |= {"gate": ("gate_up", slice(0, m.width)), "up": ("gate_up", slice(m.width, 2 * m.width))}
    return rows


def _row_order(spec: LayerSpec, names: Names, part: str, rope_order: list[int] | None) -> Callable[[], Tensor] | None:
    """The stored row of each row of a product of queries and keys."""
    a = spec.attention
    fused_by_head = part == "qkv" and names.qkv_by_head
    if part == "q" and a.gate:
        return _gated_queries(a.heads, rope_order or list(range(a.head_dim)))
    if part not in ("q", "k", "qkv") or (rope_order is None and not fused_by_head):
        return None
    if part != "qkv":
        return _by_head(a.heads if part == "q" else a.kv_heads, rope_order or list(range(a.head_dim)))

    def order() -> Tensor:
        rows = torch.arange(a.qkv_width)
        if fused_by_head:
            group = a.heads // a.kv_heads
            by_group = rows.view(a.kv_heads, group + 2, a.head_dim)
            rows = torch.cat([part.flatten() for part in by_group.tensor_split((group, group + 1), 1)])
        if rope_order is not None:
            heads = rows.view(-1, a.head_dim)
            turned = heads[: a.heads + a.kv_heads, rope_order]
            rows = torch.cat((turned, heads[a.heads + a.kv_heads :])).flatten()
        return rows

    return order


def _gated_queries(heads: int, order: list[int]) -> Callable[[], Tensor]:
    """Queries of all heads, then gates of all heads, where each head's queries and gate are stored side by side."""
    size = len(order)
    stored = [*order, *range(size, 2 * size)]

    def rows() -> Tensor:
        return (2 * size * torch.arange(heads)[:, None] + torch.tensor(stored)).view(heads, 2, size).transpose(0, 1).flatten()

    return rows


def _by_head(heads: int, order: list[int]) -> Callable[[], Tensor]:
    return lambda: (torch.arange(heads)[:, None] * len(order) + torch.tensor(order)).flatten()
