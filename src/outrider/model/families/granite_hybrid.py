"""Granite 4: Granite's multipliers over layers of Mamba-2 and of attention, most of it without rotary; dense or with experts.

Every layer has a shared feed-forward part. In the dense models it is the only one.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.granite import granite_model
from outrider.model.families.mamba import MAMBA, mamba2
from outrider.model.families.names import LLAMA_PARTS, Names, without
from outrider.model.families.reading import Sizes
from outrider.model.spec import NO_ATTENTION, ModelSpec

__all__ = ["FAMILY"]

_RECURRENT, _FULL = ("linear_attention", "mamba"), ("full_attention", "attention")


def _compile(sizes: Sizes) -> ModelSpec:
    fields = sizes.fields
    experts = fields.integer("num_local_experts", 0, 4096, 8)
    shared = fields.integer("shared_intermediate_size", 1, 2**20, 1024)
    mlp = sizes.mlp(router=sizes.router(), shared=shared) if experts else sizes.mlp(width=shared)
    spec = granite_model(sizes, "granite_hybrid", mlp)
    rotary = fields.word("position_embedding_type", "none")
    if rotary not in ("none", "nope", "rope"):
        raise fields.error(f"position_embedding_type {rotary!r} is not supported; known: rope, nope")
    kinds = sizes.kinds(_RECURRENT + _FULL) or [_RECURRENT[0]] * sizes.layers
    mixer, attention = mamba2(sizes), spec.layers[0].attention
    attention = attention if rotary == "rope" else replace(attention, rope=None)
    layers = (
        replace(layer, attention=attention) if kind in _FULL else replace(layer, attention=NO_ATTENTION, recurrent=mixer)
        for kind, layer in zip(kinds, spec.layers, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _names(spec: ModelSpec) -> Names:
    """The shared part is an ordinary one where there are no experts."""
    shared = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
    experts = ExpertNames(
        router="block_sparse_moe.router.layer",
        always_fused=True,
        fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared={part: f"{name}.weight" for part, name in shared.items()},
    )
    dense = {} if spec.layers[0].mlp.router is not None else shared
    return Names(without(LLAMA_PARTS, "gate", "up", "down") | dense, experts=experts, recurrent=MAMBA)


_MODELS = "Granite 4.0 nano, micro, tiny and small, with H or without"
FAMILY = Family("granite_hybrid", _MODELS, ("GraniteMoeHybridForCausalLM",), _compile, _names)
