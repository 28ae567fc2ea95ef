"""One rank's share of a model: its spec, and its weights cut out of the stored ones as they are read.

Products before attention and inside the feed-forward part are split by column (heads, channels), those after them by row, so
one sum over the ranks closes each part. The vocabulary is split too. No rank holds more than its share and one stored tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import InvalidParameter
from outrider.model.backends import RECURRENT
from outrider.model.decoder import Decoder
from outrider.model.load import DTYPES
from outrider.model.spec import LayerSpec, ModelSpec

__all__ = [
    "LACKS",
    "PARAMETER",
    "Cut",
    "PartSource",
    "ShardWeights",
    "check_ranks",
    "lazy_layers",
    "open_shard",
    "shard_spec",
    "vocabulary_share",
]

PARAMETER = "tensor_parallel_size"
# features of ModelSpec.features that ranks cannot share yet
LACKS = RECURRENT | {"attention sinks", "learned positions", "mixture of experts", "q/k norm over the width"}
_BY_COLUMN = ("out", "down")  # columns of the stored matrix, which is (out, in): each rank has a part of the inner dimension
_ONCE = ("out_bias", "down_bias")  # added by the first rank alone


class PartSource(Protocol):
    """Where the whole parameters of a decoder come from."""

    def parts(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Tensors that a parameter is made of, and their rows of it."""

    def release(self) -> None:
        """Unmap files. Reading maps them again."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Which rank, of how many."""

    rank: int
    ranks: int

    def share(self, width: int, start: int = 0) -> slice:
        """This rank's part of a range that begins at `start`."""
        part = width // self.ranks
        return slice(start + self.rank * part, start + (self.rank + 1) * part)


def check_ranks(spec: ModelSpec, ranks: int) -> None:
    """Refuse a model that so many ranks cannot share."""
    if missing := sorted(LACKS & spec.features()):
        raise InvalidParameter(PARAMETER, f"tensor parallel does not serve {', '.join(missing)} yet; leave it at 1")
    if spec.dtype == "int4":
        raise InvalidParameter(PARAMETER, "tensor parallel does not serve int4 yet; leave it at 1, or pass dtype=int8")
    sizes: dict[str, list[int]] = {"attention heads": [], "heads of keys": [], "feed-forward channels": []}
    for layer in spec.layers:
        for name, size in zip(sizes, (layer.attention.heads, layer.attention.kv_heads, layer.mlp.width), strict=True):
            sizes[name].append(size)
    for name, counts in sizes.items():
        uneven = [count for count in counts if count % ranks]
        if uneven:
            fitting = [n for n in range(1, 65) if not any(count % n for all_of in sizes.values() for count in all_of)]
            raise InvalidParameter(
                PARAMETER,
                f"{ranks} ranks cannot share {uneven[0]} {name} evenly; this model takes {', '.join(map(str, fitting))}",
            )


def vocabulary_share(spec: ModelSpec, ranks: int) -> int:
    """Output rows of each rank; the last rank's may be filled up with zeros."""
    return -(-spec.vocab // ranks)


def shard_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The spec of one rank: a share of the heads, of the channels and of the vocabulary."""
    layers = tuple(_layer_share(layer, ranks) for layer in spec.layers)
    return replace(spec, layers=layers, vocab=vocabulary_share(spec, ranks))


def _layer_share(layer: LayerSpec, ranks: int) -> LayerSpec:
    a, m = layer.attention, layer.mlp
    attention = replace(a, heads=a.heads // ranks, kv_heads=a.kv_heads // ranks)
    return replace(layer, attention=attention, mlp=replace(m, width=m.width // ranks))


def open_shard(whole: Decoder, cut: Cut) -> Decoder:
    """A rank's share of a decoder that holds no weights, which reads its own when it is asked for them.

    Of the whole one it fills in what every rank holds: a few vectors.
    """
    check_ranks(whole.spec, cut.ranks)
    with torch.device("meta"):
        shard = Decoder(shard_spec(whole.spec, cut.ranks), whole.layers[0].qkv.dtype)  # type: ignore[arg-type]
    shard.share_tables(whole)
    shard.requires_grad_(False)
    source: PartSource = whole.source  # type: ignore[assignment]
    shard.source = ShardWeights(source, shard, whole, cut, DTYPES.get(whole.spec.dtype, torch.float32))
    for decoder in (whole, shard):  # a few vectors, which all ranks hold
        names = (name for name, _ in decoder.named_parameters() if not name.startswith(("layers.", "embedding", "output")))
        decoder.materialise(*names, "output_bias")
    return shard.eval()


def lazy_layers(shard: Decoder) -> Iterator[Any]:
    """The layers, each parameter of which is read when it is asked for."""
    return (_LazyLayer(shard, layer, f"layers.{i}.") for i, layer in enumerate(shard.layers))


class _LazyLayer:
    """A layer that holds no parameters."""

    def __init__(self, shard: Decoder, layer: torch.nn.Module, prefix: str) -> None:
        self._shard, self._layer, self._prefix = shard, layer, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        return self._shard.weight(self._prefix + name) if isinstance(value, Tensor) and value.is_meta else value


class ShardWeights:
    """A rank's share of every parameter, cut out of the stored tensors. Files are unmapped after each matrix.

    Pages of a mapped file count as this process's memory for as long as it is mapped.
    """

    def __init__(self, source: PartSource, shard: Decoder, whole: Decoder, cut: Cut, dtype: torch.dtype) -> None:
        self._source = source
        self._shapes = {name: parameter.shape for name, parameter in shard.named_parameters()}
        self._vectors = {name: parameter.dtype for name, parameter in shard.named_parameters() if parameter.dim() == 1}
        self._spec = whole.spec
        self._cut = cut
        self._dtype = dtype
        self._scratch = torch.empty(0, dtype=torch.uint8)  # of the matrix that was read last

    def read(self, name: str) -> Tensor:
        """A parameter of this rank. A layer's matrix stays until the next one is read; see `lazy_layers`."""
        shape = self._shapes[name]
        parts = list(self._source.parts(name))
        dtypes = {part.dtype for _, part in parts}  # of a matrix it may be narrower than what is served
        dtype = self._vectors.get(name) or (dtypes.pop() if len(dtypes) == 1 else self._dtype)
        shared = name.startswith("layers.") and name not in self._vectors
        target = self._room(shape, dtype) if shared else torch.empty(shape, dtype=dtype)
        self._fill(name, parts, target)
        del parts
        self._source.release()
        return target

    def grouped(self, name: str) -> None:
        """A share is read in floating point: groups of integers are decoded."""

    def packed(self, name: str) -> None:
        """A share is read in floating point."""

    def fill(self, name: str, target: Tensor) -> None:
        self._fill(name, list(self._source.parts(name)), target)

    def _fill(self, name: str, parts: Sequence[tuple[slice, Tensor]], target: Tensor) -> None:
        last = name.rpartition(".")[2]
        if not parts:
            target.fill_(1.0)  # the weight of a norm that has none
        if last in _ONCE and self._cut.rank:
            target.zero_()
            return
        if last in _BY_COLUMN:
            ((rows, part),) = parts
            assert rows == slice(None)
            target.copy_(part[:, self._cut.share(part.shape[1])])
            return
        done = 0
        for wanted in self._rows(name):
            for rows, part in parts:
                done += _copy(part, rows, wanted, target[done:])
        if parts:
            target[done:].zero_()  # rows that fill up the last share of the vocabulary

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory that matrices share in turn, not from the heap, which keeps holes of what was allocated and freed."""
        size = shape.numel() * dtype.itemsize
        if len(self._scratch) < size:
            self._scratch = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return self._scratch[:size].view(dtype).view(shape)

    def close(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._source.close()

    def _rows(self, name: str) -> Sequence[slice]:
        """Rows of the whole parameter that this rank holds, in their order."""
        last, share = name.rpartition(".")[2].removesuffix("_bias"), self._cut.share
        if last in ("embedding", "output"):
            part, vocab = vocabulary_share(self._spec, self._cut.ranks), self._spec.vocab
            return [slice(min(self._cut.rank * part, vocab), min((self._cut.rank + 1) * part, vocab))]
        if not name.startswith("layers."):
            return [slice(0, self._shapes[name][0])]
        layer = self._spec.layers[int(name.split(".")[1])]
        a, m = layer.attention, layer.mlp
        if last == "qkv":
            return [share(a.q_width), share(a.kv_width, a.q_width), share(a.kv_width, a.q_width + a.kv_width)]
        if last == "gate_up":
            return [share(m.width), share(m.width, m.width)] if m.gated else [share(m.width)]
        if last in ("q_norm", "k_norm") and a.qk_norm is not None and not a.qk_norm.one_head:
            return [share(a.q_width if last == "q_norm" else a.kv_width)]
        return [slice(0, self._shapes[name][0])]


def _copy(part: Tensor, rows: slice, wanted: slice, target: Tensor) -> int:
    """Copy those rows of a part that are wanted; how many they are. `rows` is where the part lies in its parameter."""
    first = rows.start or 0
    start: int = max(wanted.start, first)
    count: int = min(wanted.stop, first + len(part)) - start
    if count <= 0:
        return 0
    target[:count].copy_(part[start - first :][:count])
    return count
