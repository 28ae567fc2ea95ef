"""A stack of the native core whose layers lie in a mapped file: it runs them one by one, and reads ahead."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.model.decoder import Layer
from outrider.ops.file_arena import FileArena
from outrider.ops.native import LayerWeights, Stack, StackRows, StackSpan

__all__ = ["AHEAD", "MappedStack", "in_file", "keep_layers"]

_log = logging.getLogger("outrider")
_WHOLE = StackSpan()
AHEAD = 2  # layers that are read while one runs


class MappedStack(Stack):
    """Runs layer after layer. While one runs, the next ones are read; what was used gives its memory up."""

    def __init__(self, weights_file: FileArena, *stack: Any) -> None:
        super().__init__(*stack)
        self._file = weights_file

    def forward(
        self,
        layout: array[int],
        taps: Tensor | None = None,
        span: StackSpan = _WHOLE,
        features: Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> StackRows:
        first, last = span.first_layer, self._weights.layers if span.last_layer is None else span.last_layer
        tapped: dict[int, Tensor] = {}
        asked = [] if taps is None else taps.tolist()
        rows: StackRows | None = None
        for layer in range(first, min(first + AHEAD, last)):
            self._file.read_ahead(layer)
        for layer in range(first, last):
            if layer + AHEAD < last:
                self._file.read_ahead(layer + AHEAD)
            own = sorted({tap for tap in asked if tap == layer or (layer + 1 == last and tap >= last)})
            rows = super().forward(
                layout,
                torch.tensor(own, dtype=torch.int32) if own else None,
                StackSpan(layer, layer + 1),
                features,
                wanted if layer + 1 == last else None,
            )
            self._file.give_up(layer)
            features = rows.stream
            if rows.taps is not None:
                tapped |= dict(zip(own, rows.taps.unbind(1), strict=True))
        if rows is None:
            return super().forward(layout, taps, span, features, wanted)
        return rows._replace(taps=torch.stack([tapped[tap] for tap in asked], 1) if asked else None)


def in_file(weights_file: FileArena, layers: Iterable[Layer], packed: Callable[[Layer], LayerWeights]) -> Iterator[LayerWeights]:
    """Layers as they are packed, each in a section of the file."""
    for layer in layers:
        weights_file.begin()
        yield packed(layer)
        weights_file.end()


def keep_layers(weights_file: FileArena, budget: int) -> None:
    """Keep as many layers as so many bytes hold, and say what is read from the disk in every forward, and how fast."""
    sizes, kept = weights_file.sizes, 0
    while kept < len(sizes) and sum(sizes[: kept + 1]) <= budget:
        kept += 1
    weights_file.keep(kept)
    left, speed = sum(sizes[kept:]), weights_file.bandwidth()
    _log.warning(
        "the weights take %.2f GiB and do not fit the memory: %d of %d layers stay there, %.2f GiB are read from the disk in "
        "every forward, at %.2f GB/s about %.2g s: %.2g tokens a second without drafts",
        sum(sizes) / 2**30, kept, len(sizes), left / 2**30, speed / 1e9, left / speed, speed / max(left, 1),
    )  # fmt: skip
