"""What the matrices of a model multiply in a calibration text, layer by layer: one layer's weights are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from outrider.cache import KVPool
from outrider.model import Decoder, Feed
from outrider.model.decoder import Attend, Deltas, Layer
from outrider.model.runner import Rows, lay_out
from outrider.ops import Plain, paged_attention

__all__ = ["Calibration"]

_OPS = Plain()
_PAGE = 64
_ROWS = 2048  # that go through a layer together


class Calibration:
    """The rows of a text on their way through the layers of a decoder whose matrices are in float32."""

    def __init__(self, decoder: Decoder, texts: Sequence[Sequence[int]]) -> None:
        decoder.materialise("embedding", "positions", "norm")
        self._decoder, spec = decoder, decoder.spec
        pages = -(-max(map(len, texts)) // _PAGE)
        per_chunk = max(_ROWS // (pages * _PAGE), 1)
        self._pool = KVPool(1, per_chunk * pages, spec.kv_heads, _PAGE, spec.head_dim)
        self._rows, self._x = list[Rows](), list[Tensor]()
        for chunk in _chunks(texts, per_chunk):
            feeds = [Feed(range(i * pages, (i + 1) * pages), 0, text) for i, text in enumerate(chunk)]
            self._rows.append(lay_out(feeds, self._pool, frozenset(spec.windows)))
            self._x.append(decoder.embed(self._rows[-1].tokens, self._rows[-1].positions))

    def layers(self) -> Iterator[Layer]:
        """The layers in order, with their weights in float32."""
        for layer in self._decoder.read_layers():
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(parameter.float().clone(), requires_grad=False))
            yield layer

    def hessians(self, layer: Layer) -> dict[str, Tensor]:
        """X^T X of the rows X that each product of a layer reads. Those of experts are left out."""
        found: dict[str, Tensor] = {}

        def add(_: int, product: str, x: Tensor, y: Tensor) -> Tensor:
            x = x.float()
            found[product] = found[product].addmm_(x.T, x) if product in found else x.T @ x
            return y

        for i in range(len(self._x)):
            self._run(layer, i, add)
        return found

    def advance(self, layer: Layer) -> None:
        """Take all rows through a layer."""
        self._x = [self._run(layer, i) for i in range(len(self._x))]

    @torch.inference_mode()
    def _run(self, layer: Layer, chunk: int, deltas: Deltas | None = None) -> Tensor:
        rows, rope = self._rows[chunk], layer.spec.attention.rope
        turn = None if rope is None else self._decoder.ropes[self._decoder.spec.ropes.index(rope)](rows.positions)
        out: Tensor = layer(self._x[chunk], turn, self._attend(layer, rows), _OPS, deltas)
        return out

    def _attend(self, layer: Layer, rows: Rows) -> Attend:
        a = layer.spec.attention

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._pool.write(0, rows.slots, k, v)
            return paged_attention(q, *self._pool.layer(0), rows.plan, a.window, a.soft_cap, layer.sinks)

        return attend


def _chunks(texts: Sequence[Sequence[int]], count: int) -> Iterator[list[Sequence[int]]]:
    remaining = iter(texts)
    while chunk := list(islice(remaining, count)):
        yield chunk
