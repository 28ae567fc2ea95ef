"""Which weights stay on the GPU and which cross the bus in every forward: a pure plan from sizes, made before anything is loaded.

Matrices that do not fit lie in pinned host memory. Those of a layer cross together, into one of two buffers on the device, while
the layers before it run. So a layer's streamed matrices are one unit, and every buffer is as large as the largest unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from outrider.model.spec import LayerSpec, ModelSpec

__all__ = [
    "ALIGNMENT", "BUFFERS", "LOGIT_ROWS", "MAX_PASS_ROWS", "ModelSizes", "Placement", "aligned", "embedding_on_host",
    "matrices_of", "place", "sizes_of", "smallest_room", "weights_on_gpu",
]  # fmt: skip

MAX_PASS_ROWS = 2048  # of one pass over streamed weights; their activations lie on the device together
LOGIT_ROWS = 64  # rows whose logits are computed at once where such a pass has more
BUFFERS = 2  # units that fit the device beside the resident weights: one is read while the next one arrives
ALIGNMENT = 256  # bytes; of tensors in a unit
_ROUNDED = {"int8": 1.0, "fp8": 1.0, "int4": 0.53}  # bytes of a weight of a layer that was rounded at load


class ModelSizes(NamedTuple):
    """Bytes of a model's weights as the GPU holds them."""

    layers: tuple[tuple[int, ...], ...]  # of every layer's matrices, in the order of `matrices_of`
    output: int  # the output matrix, with the embedding where they are tied; it stays on the device
    embedding: int = 0  # an embedding of its own: its rows can be read from host memory one by one
    small: int = 0  # norms, biases and tables

    @property
    def total(self) -> int:
        return sum(map(sum, self.layers)) + self.output + self.embedding + self.small


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every matrix lies."""

    streamed: tuple[tuple[int, ...], ...] = ()  # of every layer, the places in `matrices_of` of what lies on the host
    unit_bytes: tuple[int, ...] = ()  # of every layer, what crosses the bus
    embedding_on_host: bool = False
    resident: int = 0  # bytes of weights on the device, without the buffers
    host: int = 0  # bytes of pinned host memory
    matrices: tuple[int, ...] = ()  # of every layer, how many it has

    @property
    def is_resident(self) -> bool:
        return not self.embedding_on_host and not any(self.streamed)

    @property
    def pass_bytes(self) -> int:
        """Bytes that cross the bus in a forward."""
        return sum(self.unit_bytes)

    @property
    def buffer(self) -> int:
        """Bytes of one of the buffers."""
        return max(self.unit_bytes, default=0)

    @property
    def device(self) -> int:
        """Bytes of weights and buffers on the device."""
        return self.resident + BUFFERS * self.buffer

    def describe(self, bandwidth: float | None = None) -> str:
        """The split in one line, and the speed of plain decoding that a bus of so many bytes a second allows."""
        layers = sum(not matrices for matrices in self.streamed)
        partly = sum(0 < len(streamed) < count for streamed, count in zip(self.streamed, self.matrices, strict=True))
        text = f"{_gib(self.resident)} of weights stay on the GPU ({layers} of {len(self.streamed)} layers whole"
        text += f", {partly} in part" if partly else ""
        text += f"), {_gib(self.pass_bytes)} cross the bus in every forward" if self.pass_bytes else ")"
        text += "; the embedding is read from host memory" if self.embedding_on_host else ""
        if bandwidth and self.pass_bytes:
            text += f"; at {bandwidth / 1e9:.0f} GB/s a forward takes {self.pass_bytes / bandwidth * 1e3:.0f} ms"
            text += f", plain decoding {bandwidth / self.pass_bytes:.1f} tok/s"
        return text


def aligned(size: int) -> int:
    """A size filled up, so that what follows is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def sizes_of(spec: ModelSpec) -> ModelSizes:
    """Bytes of a model as it is served."""
    item = 4 if spec.dtype == "float32" else 2
    table = spec.vocab * spec.hidden * item
    output = spec.vocab * spec.hidden if spec.dtype in _ROUNDED else table
    small = 4 * spec.hidden * (4 * spec.depth + 1) + 4 * spec.context * spec.head_dim * len(spec.ropes)
    small += item * spec.hidden * (spec.positions.rows if spec.positions else 0)
    layers = tuple(_layer_sizes(spec, layer) for layer in spec.layers)
    return ModelSizes(layers, output, 0 if spec.tied and output == table else table, small)


def _layer_sizes(spec: ModelSpec, layer: LayerSpec) -> tuple[int, ...]:
    """Bytes of a layer's matrices. Experts are held in bf16."""
    held, wide = _layer_bytes(spec), 4 if spec.dtype == "float32" else 2
    of_mixer = 3 if layer.recurrent is None and layer.attention.gate else 2
    return tuple(
        math.ceil(spec.hidden * width * (held if place < of_mixer or layer.mlp.router is None else wide))
        for place, width in enumerate(matrices_of(layer).values())
    )


def weights_on_gpu(spec: ModelSpec) -> int:
    """Bytes of all matrices of a model as it is served."""
    sizes = sizes_of(spec)
    return sizes.total - sizes.small


def _layer_bytes(spec: ModelSpec) -> float:
    """Bytes of a weight of a layer."""
    return _ROUNDED.get(spec.dtype) or spec.layer_bytes or (4 if spec.dtype == "float32" else 2)


def place(sizes: ModelSizes, room: int) -> Placement | None:
    """The placement that streams the fewest bytes within so many on the device; None where none fits.

    Buffers are as large as the largest unit, so keeping the same matrices of every layer makes them smaller too. Layers that
    are kept whole are spread evenly: the bus is busy while they run.
    """
    for on_host in (False, True) if sizes.embedding else (False,):
        if sizes.total - on_host * sizes.embedding <= room:
            return _placed(sizes, [()] * len(sizes.layers), on_host)
    candidates = [placed for kept in _subsets(sizes) if (placed := _fill(sizes, room, kept)) is not None]
    return min(candidates, key=lambda placed: (placed.pass_bytes, placed.device), default=None)


def embedding_on_host(sizes: ModelSizes) -> Placement | None:
    """All weights on the device but an embedding of its own; None where there is none."""
    return place(sizes, sizes.total - sizes.embedding) if sizes.embedding else None


def smallest_room(sizes: ModelSizes) -> int:
    """The fewest bytes of the device that some placement fits."""
    bare = min((_placed(sizes, _without(sizes, kept), True).device for kept in _subsets(sizes)), default=0)
    return min(bare, sizes.total - sizes.embedding)


def matrices_of(layer: LayerSpec) -> dict[str, int]:
    """The matrices of a layer in the order of `CudaLayer.matrices`, and their weights for each value of a hidden row."""
    a, m, recurrent = layer.attention, layer.mlp, layer.recurrent
    if recurrent is not None:
        mixer = {"mixer in": recurrent.width, "mixer out": recurrent.inner}
    elif a.gate:
        mixer = {"gate of attention": a.q_width, "qkv": a.qkv_width - a.q_width, "out": a.q_width}
    else:
        mixer = {"qkv": a.qkv_width, "out": a.q_width}
    shared = {"shared gate/up": m.shared_up_width, "shared down": m.shared} if m.shared else {}
    return mixer | {"gate/up": m.experts * m.up_width, "down": m.experts * m.width} | shared


def _subsets(sizes: ModelSizes) -> Iterator[tuple[int, ...]]:
    """Which matrices of every layer may be kept."""
    places = range(max(map(len, sizes.layers), default=0))
    for count in range(len(places)):
        yield from combinations(places, count)


def _without(sizes: ModelSizes, kept: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(i for i in range(len(layer)) if i not in kept) for layer in sizes.layers]


def _fill(sizes: ModelSizes, room: int, kept: tuple[int, ...]) -> Placement | None:
    """These matrices of every layer are kept, then as many whole layers as there is room for, then parts of one more."""
    base = _without(sizes, kept)
    if _placed(sizes, base, True).device > room:
        return None
    low, high = 0, len(sizes.layers)
    while low < high:  # the most whole layers that fit
        middle = (low + high + 1) // 2
        fits = _placed(sizes, _spread(base, middle), True).device <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    streamed = _spread(base, low)
    for index in sorted(range(len(streamed)), key=lambda i: -len(streamed[i])):
        for matrix in sorted(streamed[index], key=lambda i: -sizes.layers[index][i]):
            fewer = list(streamed)
            fewer[index] = tuple(i for i in streamed[index] if i != matrix)
            if _placed(sizes, fewer, True).device <= room:
                streamed = fewer
    return _placed(sizes, streamed, True)


def _spread(base: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """So many layers kept whole, evenly spread, the others as they are."""
    whole = {(2 * i + 1) * len(base) // (2 * count) for i in range(count)}
    return [() if i in whole else matrices for i, matrices in enumerate(base)]


def _placed(sizes: ModelSizes, streamed: Sequence[tuple[int, ...]], on_host: bool) -> Placement:
    on_host = on_host and sizes.embedding > 0
    units = tuple(sum(aligned(layer[i]) for i in matrices) for layer, matrices in zip(sizes.layers, streamed, strict=True))
    crossing = sum(sum(layer[i] for i in matrices) for layer, matrices in zip(sizes.layers, streamed, strict=True))
    resident = sizes.total - crossing - on_host * sizes.embedding
    host = sum(units) + on_host * aligned(sizes.embedding)
    return Placement(tuple(streamed), units, on_host, resident, host, tuple(map(len, sizes.layers)))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
