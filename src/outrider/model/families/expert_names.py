"""How families name the tensors of a mixture of experts, and where each goes.

Checkpoints hold every expert's matrices by themselves, or those of all experts stacked: gate and up fused, or apart. Which of
these a checkpoint does is seen from what it holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.model.families.place import Place
from outrider.model.spec import FeedForward

__all__ = ["ExpertNames", "expert_places"]

_WHOLE = slice(None)
_SHARED = {
    "gate": "mlp.shared_expert.gate_proj.weight",
    "up": "mlp.shared_expert.up_proj.weight",
    "down": "mlp.shared_expert.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Stored names within a layer. {} is an expert's number."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"  # whole names from here on, but for the experts' own
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # stacked
    shared: Mapping[str, str] = field(default_factory=lambda: _SHARED)
    shared_gate: str = "mlp.shared_expert_gate.weight"
    always_fused: bool = False  # in safetensors
    transposed: bool = False  # fused matrices are (experts, in, out)
    interleaved: bool = False  # in the fused gate_up each row of a gate is followed by that of its up

    @property
    def apart(self) -> dict[str, str]:
        """Names of stacked tensors that are not fused, without ".weight", by the part that they hold."""
        return {part: getattr(self, part).replace(".{}", "") for part in ("gate", "up", "down")}


def expert_places(m: FeedForward, hidden: int, names: ExpertNames, stored: Container[str] = ()) -> Iterator[tuple[str, Place]]:
    """Names within a layer, of which some are `stored`, and their places in the layer."""
    assert m.router is not None
    count = m.experts
    yield f"{names.router}.weight", Place("router", slice(0, count))
    if m.router.bias:
        yield f"{names.router}.bias", Place("router_bias")
    if m.router.correction:
        yield names.correction, Place("correction")
    apart = [f"{name}.weight" for name in names.apart.values()]
    if any(name in stored for name in apart):
        yield from _apart(m, names)
    elif names.always_fused or any(name in stored for name in names.fused):
        yield from _fused(m, names)
    else:
        yield from _single(m, hidden, names)
    if m.shared:
        rows = {"gate": slice(0, m.shared), "up": slice(m.shared_up_width - m.shared, m.shared_up_width)}
        for part, name in names.shared.items():
            yield name, Place("shared_down") if part == "down" else Place("shared_gate_up", rows.get(part, _WHOLE))
    if m.shared_gate:
        yield names.shared_gate, Place("router", slice(count, count + 1))


def _fused(m: FeedForward, names: ExpertNames) -> Iterator[tuple[str, Place]]:
    def interleaved() -> Tensor:
        return torch.arange(2 * m.width).view(-1, 2).T.flatten()

    for name, part in zip(names.fused, ("gate_up", "down"), strict=True):  # "gate_up" is up alone where there is no gate
        order = interleaved if names.interleaved and part == "gate_up" else None
        yield name, Place(part, order=order, transposed=names.transposed, experts=m.experts)
        if m.bias:
            yield f"{name}_bias", Place(f"{part}_bias", order=order, experts=m.experts)


def _apart(m: FeedForward, names: ExpertNames) -> Iterator[tuple[str, Place]]:
    where = {"gate": ("gate_up", slice(0, m.width)), "up": ("gate_up", slice(m.width, 2 * m.width)), "down": ("down", _WHOLE)}
    for part, name in names.apart.items():
        parameter, rows = where[part]
        yield f"{name}.weight", Place(parameter, rows, experts=m.experts)
        if m.bias:
            yield f"{name}.bias", Place(f"{parameter}_bias", rows, experts=m.experts)


def _single(m: FeedForward, hidden: int, names: ExpertNames) -> Iterator[tuple[str, Place]]:
    for expert in range(m.experts):
        first, end = expert * m.up_width, (expert + 1) * m.up_width
        if m.gated:
            yield f"{names.gate.format(expert)}.weight", Place("gate_up", slice(first, first + m.width))
        yield f"{names.up.format(expert)}.weight", Place("gate_up", slice(end - m.width, end))
        yield f"{names.down.format(expert)}.weight", Place("down", slice(expert * hidden, (expert + 1) * hidden))
