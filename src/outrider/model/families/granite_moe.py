"""Granite-MoE: Granite's multipliers, and experts that are stored stacked."""

from __future__ import annotations

from outrider.model.families.expert_names import ExpertNames
from outrider.model.families.family import Family
from outrider.model.families.granite import granite_model
from outrider.model.families.names import Names
from outrider.model.families.reading import Sizes
from outrider.model.spec import ModelSpec

__all__ = ["FAMILY"]

_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    always_fused=True,
    fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)


def _compile(sizes: Sizes) -> ModelSpec:
    return granite_model(sizes, "granite_moe", sizes.mlp(router=sizes.router()))


FAMILY = Family("granite_moe", "Granite 3 1B-A400M, 3B-A800M", ("GraniteMoeForCausalLM",), _compile, Names(experts=_NAMES))
