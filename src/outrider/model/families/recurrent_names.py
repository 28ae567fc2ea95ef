"""How families name the tensors of recurrent mixers, and where each goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from outrider.model.families.place import Place
from outrider.model.recurrent import Recurrent

__all__ = ["RecurrentNames", "recurrent_places"]


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Stored names within a layer, without ".weight" and ".bias"."""

    read: tuple[tuple[str, tuple[int, ...]], ...]  # products that make up the one it reads, and the parts of each
    write: str = "mamba.out_proj"
    conv: str = "mamba.conv1d"
    norm: str = "mamba.norm"
    decay: str = "mamba.A_log"  # whole names from here on
    step_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    orders: tuple[Callable[[Recurrent], Tensor] | None, ...] = ()  # the stored row of each row of those products


def recurrent_places(s: Recurrent, names: RecurrentNames) -> Iterator[tuple[str, Place]]:
    """Names within a layer, and their places in the layer's mixer."""
    for place, (name, parts) in enumerate(names.read):
        first = sum(s.parts[: parts[0]])
        rows = slice(first, first + sum(s.parts[part] for part in parts))
        order = names.orders[place] if names.orders else None
        yield f"{name}.weight", Place("read", rows, None if order is None else _of(order, s))
        if s.bias:
            yield f"{name}.bias", Place("read_bias", rows)
    yield f"{names.write}.weight", Place("write")
    if s.out_bias:
        yield f"{names.write}.bias", Place("write_bias")
    yield f"{names.conv}.weight", Place("conv")
    if s.conv_bias:
        yield f"{names.conv}.bias", Place("conv_bias")
    if s.norm_eps is not None:
        yield f"{names.norm}.weight", Place("norm")
    if s.key_dim:
        yield names.decay, Place("decay")
        yield names.step_bias, Place("step_bias")
    if s.kind == "Mamba-2":
        yield names.skip, Place("skip")


def _of(order: Callable[[Recurrent], Tensor], s: Recurrent) -> Callable[[], Tensor]:
    return lambda: order(s)
