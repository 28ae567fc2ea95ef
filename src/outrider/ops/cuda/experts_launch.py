"""Calls of the kernels for mixtures of experts from torch tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from outrider.ops.cuda import experts as kernels
from outrider.ops.cuda import router
from outrider.ops.cuda.matrix import Matrix
from outrider.ops.cuda.quantised_matrix import QuantisedMatrix, interpreted
from outrider.ops.cuda.quantised_tiles import QuantisedTile, quantised_tile_for
from outrider.ops.cuda.tiles import Tile, expert_tile_for, item_rows_for

__all__ = ["ExpertKernels", "ExpertRouter", "ExpertWeights", "Opening", "Routes"]

_BLOCK = 32  # rows of a block of `route`
_ROWS = 8  # that are chosen for together
_TILE, _SPAN = 8, 512  # experts and inner values of one of its programs
_MAX_ROWS = 1 << 16
_MAX_QUANTISED_ROWS = 64  # of a work item of quantised experts
AnyTile = Tile | QuantisedTile


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

    open: Matrix  # (experts * columns, hidden)
    close: Matrix  # (experts * hidden, width)
    open_bias: Tensor | None = None
    close_bias: Tensor | None = None

    def item_rows(self, rows: int, r: ExpertRouter) -> int:
        """Pairs of a work item, for so many rows."""
        wanted = item_rows_for(rows * r.chosen / r.experts)
        return wanted if self.open.kind == self.close.kind == "" else min(wanted, _MAX_QUANTISED_ROWS)


class Routes(NamedTuple):
    """The experts of rows and the work that follows from them, on the device. Pair p is expert p % chosen of row p // chosen."""

    experts: Tensor  # (rows, chosen) int32, in order of their numbers
    weights: Tensor  # (rows, chosen) float32
    gates: Tensor  # (rows,) float32, of the shared expert
    order: Tensor  # (pairs,) int32, the pairs by expert
    items: Tensor  # work items; see ops/cuda/router.py
    item_rows: int  # pairs of an item, at most
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

    def route(self, x: Tensor, r: ExpertRouter, slots: Tensor, limit: int, layer: int, item_rows: int = 16) -> Routes:
        """The experts of rows. Rows whose KV goes to slot `limit` or behind are padding."""
        rows, hidden = x.shape
        columns, pairs = len(r.matrix), rows * r.chosen
        blocks, spans = triton.cdiv(rows, _BLOCK), triton.cdiv(hidden, _SPAN)
        max_items = min(pairs, r.experts) + pairs // item_rows + 1  # one more for padding
        partial, weights, gates = (
            torch.empty(size, device=x.device) for size in (spans * rows * columns, (rows, r.chosen), rows)
        )
        sizes = (blocks * r.experts, pairs, pairs, 2 + 3 * max_items)
        counts, chosen, order, items = (torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
        padded, numbers = _power(r.experts), (rows, limit, layer, item_rows)
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
        return Routes(chosen.view(rows, r.chosen), weights, gates, order, items, item_rows, max_items)

    def parts(self, x: Tensor, routes: Routes, w: ExpertWeights, opening: Opening, out: Tensor) -> None:
        """What every expert of every row gives, weighted, to out (chosen, rows, hidden)."""
        self.close(self.open(x, routes, w, opening), routes, w, out)

    def open(self, x: Tensor, routes: Routes, w: ExpertWeights, opening: Opening, tile: AnyTile | None = None) -> Tensor:
        """The first product of every pair and its activation, in the order of `Routes.order`: (pairs, width)."""
        (rows, hidden), chosen, width = x.shape, routes.experts.shape[1], w.close.shape[1]
        columns = w.open.shape[0] // (w.close.shape[0] // hidden)
        operand = _Operand.of(w.open, columns, routes.item_rows, False, tile)
        out = torch.empty(rows * chosen, width, dtype=self._dtype, device=x.device)
        bias = operand.tensors[0] if w.open_bias is None else w.open_bias
        kernels.open_experts[(routes.max_items, triton.cdiv(columns, operand.tile.columns))](
            operand.inputs_of(x), *operand.tensors, bias, routes.order, routes.items, out, w.open.shape[0],
            columns, hidden, chosen, w.open_bias is not None, opening.gated, opening.activation,
            opening.gate_scale, opening.limit, opening.alpha, **operand.options,
        )  # fmt: skip
        return out

    def close(self, x: Tensor, routes: Routes, w: ExpertWeights, out: Tensor, tile: AnyTile | None = None) -> None:
        """The second product of what `open` gave, weighted, to out (chosen, rows, hidden); what lies behind stays as it is."""
        (_, rows, hidden), chosen, width = out.shape, routes.experts.shape[1], x.shape[1]
        operand = _Operand.of(w.close, hidden, routes.item_rows, True, tile)
        bias = operand.tensors[0] if w.close_bias is None else w.close_bias
        kernels.close_experts[(routes.max_items, triton.cdiv(hidden, operand.tile.columns))](
            operand.inputs_of(x), *operand.tensors, bias, routes.weights, routes.order, routes.items, out, rows,
            w.close.shape[0], hidden, width, w.close.shape[0] // hidden, chosen,
            w.close_bias is not None, **operand.options,
        )  # fmt: skip


class _Operand(NamedTuple):
    """A matrix of experts as the kernels take it."""

    matrix: Matrix
    tensors: tuple[Tensor, Tensor, Tensor]  # values or codes, scales, zeros
    tile: AnyTile
    options: dict[str, object]

    @classmethod
    def of(cls, w: Matrix, columns: int, rows: int, second: bool, tile: AnyTile | None) -> _Operand:
        if isinstance(w, QuantisedMatrix):
            chosen = tile or quantised_tile_for(w.kind, rows, columns)
            return cls(w, *_quantised(w, chosen._replace(rows=rows)))
        (values,), chosen = w.tensors, tile or expert_tile_for(rows, second)
        options = {
            "KIND": "", "WIDTH": w.shape[1], "ZERO": "", "OFFSET": 0, "GROUP": 0, "PARTS": _parts_of(w.shape[1]),
            "SWAPPED": False, "BM": chosen.rows, "BN": chosen.columns, "BK": chosen.inner, "WARPS": chosen.warps,
            "STAGES": chosen.stages, "FAST": False, "PRECISION": "ieee" if values.dtype == torch.float32 else "tf32",
            "num_warps": chosen.warps, "num_stages": chosen.stages,
        }  # fmt: skip
        return cls(w, (values, values, values), chosen, options)

    def inputs_of(self, x: Tensor) -> Tensor:
        """Rows in the order of the matrix's inputs."""
        order = self.matrix.inputs if isinstance(self.matrix, QuantisedMatrix) else None
        return x if order is None else x[:, order]


def _parts_of(inner: int) -> int:
    """Parts of a sum in floating point: as of other products that are not wide, since those of one expert are not."""
    return 4 if inner % 64 == 0 else 1


def _quantised(w: QuantisedMatrix, tile: AnyTile) -> tuple[tuple[Tensor, Tensor, Tensor], AnyTile, dict[str, object]]:
    assert isinstance(tile, QuantisedTile)
    codes = w.codes if interpreted() or not w.kind.endswith("weights") else w.codes.view(torch.uint8)
    options = {
        "KIND": w.kind, "WIDTH": w.width, "ZERO": w.zero_kind, "OFFSET": w.offset, "GROUP": w.group, "PARTS": w.parts,
        "SWAPPED": tile.swapped, "BM": tile.rows, "BN": tile.columns, "BK": w.step(tile), "WARPS": tile.warps,
        "STAGES": tile.stages, "FAST": not interpreted(), "PRECISION": "tf32", "num_warps": tile.warps, "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }  # fmt: skip
    return (codes, w.scale, w.scale if w.zero is None else w.zero), tile, options


def _power(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), 2)
