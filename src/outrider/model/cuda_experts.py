"""The feed-forward part of a layer that is a mixture of experts, as the GPU runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.model.cuda_attention import CudaRows
from outrider.model.cuda_weights import Upload
from outrider.model.decoder import Layer
from outrider.model.spec import FeedForward
from outrider.ops.cuda.experts_launch import ExpertKernels, ExpertRouter, ExpertWeights, Opening
from outrider.ops.cuda.launch import Kernels
from outrider.ops.cuda.matrix import DenseMatrix, Matrix, Rows, pair_rows

__all__ = ["CudaExperts"]


class CudaExperts:
    """A router, its experts, and the shared one, whose result is the last part."""

    bias = None  # experts add their own
    reads = None  # rows in the weights' dtype

    def __init__(self, layer: Layer, kernels: Kernels, experts: ExpertKernels, upload: Upload) -> None:
        m = self._spec = layer.spec.mlp
        self._kernels, self._experts, self._layer = kernels, experts, experts.add_layer()
        self.router = _router(layer, upload.device)
        self._opening = _opening(m)
        self.gate_up = self._opened(layer.gate_up, m.experts, upload)
        self.down: Matrix = DenseMatrix(upload.tensor(layer.down))
        gate_up_bias = upload.bias(layer.gate_up_bias)
        self._gate_up_bias = pair_rows(gate_up_bias, m.experts) if gate_up_bias is not None and m.gated else gate_up_bias
        self._down_bias = upload.bias(layer.down_bias)
        self._shared: tuple[Matrix, ...] = ()
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            self._shared = self._opened(layer.shared_gate_up, 1, upload), DenseMatrix(upload.tensor(layer.shared_down))

    def _opened(self, weight: Tensor, experts: int, upload: Upload) -> Matrix:
        """A first matrix in floating point, whatever other parts are rounded to."""
        values = upload.tensor(weight)
        if not self._spec.gated:
            return DenseMatrix(values)
        paired = pair_rows(values, experts)
        if weight.is_cuda:
            weight.data = weight.new_empty(0)
        return DenseMatrix(paired)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate_up, self.down, *self._shared

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        self.gate_up, self.down = change(self.gate_up), change(self.down)
        self._shared = tuple(map(change, self._shared))

    def forward(self, read: Rows, rows: CudaRows | None = None) -> Tensor:
        """What follows the normed rows, in parts to be added in order: (chosen experts and the shared one, N, hidden)."""
        assert rows is not None
        assert isinstance(read, Tensor)
        m, k, router = self._spec, self._kernels, self.router
        routes = self._experts.route(read, router, rows.meta.slots, rows.padding, self._layer)
        parts = torch.empty(router.chosen + (m.shared > 0), *read.shape, device=read.device)
        (opened,), (closing,) = self.gate_up.tensors, self.down.tensors
        weights = ExpertWeights(opened, closing, self._gate_up_bias, self._down_bias)
        self._experts.parts(read, routes, weights, self._opening, parts)
        if self._shared:
            gate_up, down = self._shared
            k.linear(k.activated(read, gate_up, None, m.activation, m.gated), down, None, parts[-1])
            if m.shared_gate:
                parts[-1].mul_(routes.gates[:, None])
        return parts


def _router(layer: Layer, device: torch.device) -> ExpertRouter:
    r = layer.spec.mlp.router
    assert r is not None
    assert layer.router is not None
    matrix, bias, correction = (
        None if part is None else part.detach().to(device, torch.float32).contiguous()
        for part in (layer.router, layer.router_bias, layer.correction)
    )
    assert matrix is not None
    numbers = (r.experts, r.chosen, r.scores, r.groups, r.chosen_groups, r.normalised, float(r.scale), float(r.closeness))
    return ExpertRouter(matrix, bias, correction, *numbers)


def _opening(m: FeedForward) -> Opening:
    clamp = (0.0, 0.0) if m.clamp is None else (float(m.clamp.limit), float(m.clamp.alpha))
    return Opening(m.activation, m.gated, float(m.gate_scale), *clamp)
