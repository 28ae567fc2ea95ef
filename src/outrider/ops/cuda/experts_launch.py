"""Calls of the kernels for mixtures of experts from torch tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import experts as kernels
from outrider.ops.cuda import router
from outrider.ops.cuda.tiles import Tile, expert_tiles_for

__all__ = ["ExpertKernels", "ExpertRouter", "ExpertWeights", "Opening", "Routes"]

_BLOCK = 32  # rows of a block of `route`
_ROWS = 8  # that are chosen for together
_TILE, _SPAN = 8, 512  # experts and inner values of one of its programs
_MAX_ROWS = 1 << 16


class ExpertRouter(NamedTuple):
    """How rows choose their experts; `Router` of model/spec.py says what the fields mean."""

    matrix: Tensor  # (experts, and one more column where the shared expert has a gate; hidden) float32
    bias: Tensor | None
    correction: Tensor | None
    experts: int
    chosen: int
    scores: str
    groups: int
    chosen_groups: int
    normalised: bool
    scale: float
    closeness: float


class Opening(NamedTuple):
    """What follows the first product of an expert."""

    activation: str
    gated: bool
    gate_scale: float = 1.0
    limit: float = 0.0
    alpha: float = 0.0  # not 0: the clamped activation, with this limit


class ExpertWeights(NamedTuple):
    """Matrices of all experts one below the other, and their biases; gates and ups in pairs."""

    open: Tensor  # (experts * columns, hidden)
    close: Tensor  # (experts * hidden, width)
    open_bias: Tensor | None = None
    close_bias: Tensor | None = None


class Routes(NamedTuple):
    """The experts of rows and the work that follows from them, on the device. Pair p is expert p % chosen of row p // chosen."""

    experts: Tensor  # (rows, chosen) int32, in order of their numbers
    weights: Tensor  # (rows, chosen) float32
    gates: Tensor  # (rows,) float32, of the shared expert
    order: Tensor  # (pairs,) int32, the pairs by expert
    items: Tensor  # work items; see ops/cuda/router.py
    tiles: tuple[Tile, Tile]  # of the products, whose rows are those of an item
    max_items: int


class ExpertKernels:
    """Mixtures of experts of one model."""

    def __init__(self, dtype: torch.dtype, device: torch.device, layers: int) -> None:
        self.touched = torch.zeros(layers, dtype=torch.int32, device=device)  # distinct experts of the last forward, by layer
        self._layers = 0
        self._dtype = dtype
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._ended = torch.zeros(_MAX_ROWS // _BLOCK, dtype=torch.int32, device=device)  # programs of each block

    def add_layer(self) -> int:
        """The number of one more layer, by which `route` counts its experts."""
        self._layers += 1
        return self._layers - 1

    def route(
        self, x: Tensor, r: ExpertRouter, slots: Tensor, limit: int, layer: int, tiles: tuple[Tile, Tile] | None = None
    ) -> Routes:
        """The experts of rows. Rows whose KV goes to slot `limit` or behind are padding."""
        rows, hidden = x.shape
        columns, pairs = len(r.matrix), rows * r.chosen
        blocks, spans = triton.cdiv(rows, _BLOCK), triton.cdiv(hidden, _SPAN)
        tiles = tiles or expert_tiles_for(pairs / r.experts)
        max_items = min(pairs, r.experts) + pairs // tiles[0].rows + 1  # one more for padding
        partial, weights, gates = (
            torch.empty(size, device=x.device) for size in (spans * rows * columns, (rows, r.chosen), rows)
        )
        sizes = (blocks * r.experts, pairs, pairs, 2 + 3 * max_items)
        counts, chosen, order, items = (torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
        padded, numbers = _power(r.experts), (rows, limit, layer, tiles[0].rows)
        router.route[(blocks, triton.cdiv(columns, _TILE), spans)](
            x, r.matrix, r.matrix if r.bias is None else r.bias, r.matrix if r.correction is None else r.correction, slots,
            partial, self._ended, counts, chosen, weights, gates, order, items, self.touched, *numbers, r.scale, r.closeness,
            hidden, columns, r.experts, padded, r.chosen, _power(r.chosen), r.scores, r.bias is not None,
            r.correction is not None, r.groups, _power(r.groups), r.chosen_groups, r.normalised, padded.bit_length() - 1,
            _BLOCK, _ROWS, _TILE, _SPAN, spans, num_warps=4,
        )  # fmt: skip
        if blocks > 1:
            router.place_pairs[(blocks,)](
                chosen, counts, slots, order, items, self.touched, *numbers, r.experts, padded, r.chosen, _power(r.chosen),
                _BLOCK, _ROWS, num_warps=4,
            )  # fmt: skip
        return Routes(chosen.view(rows, r.chosen), weights, gates, order, items, tiles, max_items)

    def parts(self, x: Tensor, routes: Routes, w: ExpertWeights, opening: Opening, out: Tensor) -> None:
        """What every expert of every row gives, weighted, to out (chosen, rows, hidden)."""
        self.close(self.open(x, routes, w, opening), routes, w, out)

    def open(self, x: Tensor, routes: Routes, w: ExpertWeights, opening: Opening) -> Tensor:
        """The first product of every pair and its activation, in the order of `Routes.order`: (pairs, width)."""
        (rows, hidden), chosen, tile = x.shape, routes.experts.shape[1], routes.tiles[0]
        columns = len(w.open) // (len(w.close) // hidden)
        out = torch.empty(rows * chosen, w.close.shape[1], dtype=self._dtype, device=x.device)
        kernels.open_experts[(routes.max_items, triton.cdiv(columns, tile.columns))](
            x, w.open, w.open if w.open_bias is None else w.open_bias, routes.order, routes.items, out, columns, hidden, chosen,
            tile.rows, tile.columns, tile.inner, w.open_bias is not None, opening.gated, opening.activation, opening.gate_scale,
            opening.limit, opening.alpha, **self._product(tile, hidden),
        )  # fmt: skip
        return out

    def close(self, x: Tensor, routes: Routes, w: ExpertWeights, out: Tensor) -> None:
        """The second product of what `open` gave, weighted, to out (chosen, rows, hidden); what lies behind stays as it is."""
        (_, rows, hidden), chosen, width, tile = out.shape, routes.experts.shape[1], x.shape[1], routes.tiles[1]
        kernels.close_experts[(routes.max_items, triton.cdiv(hidden, tile.columns))](
            x, w.close, w.close if w.close_bias is None else w.close_bias, routes.weights, routes.order, routes.items, out, rows,
            hidden, width, len(w.close) // hidden, chosen, tile.rows, tile.columns, tile.inner, w.close_bias is not None,
            **self._product(tile, width),
        )  # fmt: skip

    def _product(self, tile: Tile, inner: int) -> dict[str, object]:
        return {
            "PRECISION": self._precision, "SPLIT_K": 4 if inner % 64 == 0 else 1, "IN_REGISTER": tile.rows <= 16,
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def _power(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), 2)
