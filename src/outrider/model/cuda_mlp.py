"""The dense feed-forward part of a layer, as the GPU runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from outrider.model.cuda_attention import CudaRows
from outrider.model.cuda_weights import Upload
from outrider.model.decoder import Layer
from outrider.ops.cuda.launch import Kernels
from outrider.ops.cuda.matrix import Matrix, RowForm, Rows, pair_rows

__all__ = ["CudaMlp"]


class CudaMlp:
    """Two products with an activation between them."""

    def __init__(self, layer: Layer, kernels: Kernels, upload: Upload) -> None:
        self._spec, self._kernels = layer.spec.mlp, kernels
        pairs, gate_up_bias = partial(pair_rows, groups=1), upload.bias(layer.gate_up_bias)
        gated = self._spec.gated
        opened = layer.stored("gate_up")
        self.gate_up = upload.reordered(opened, pairs) if gated else upload.matrix(opened)
        self.down = upload.matrix(layer.stored("down"))
        self._gate_up_bias = pairs(gate_up_bias) if gate_up_bias is not None and gated else gate_up_bias
        self.bias = upload.bias(layer.down_bias)

    @property
    def reads(self) -> RowForm | None:
        return self.gate_up.reads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.gate_up, self.down

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        self.gate_up, self.down = change(self.gate_up), change(self.down)

    def forward(self, read: Rows, _: CudaRows | None = None) -> Tensor:
        """What follows the normed rows, in parts to be added in order and before `bias`: (parts, N, hidden)."""
        m, k = self._spec, self._kernels
        return k.parts(k.activated(read, self.gate_up, self._gate_up_bias, m.activation, m.gated), self.down)
