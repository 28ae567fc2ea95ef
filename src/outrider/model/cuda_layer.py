"""One layer as the GPU runs it: a mixer and a feed-forward part between norms. Targets and EAGLE heads share it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.model.cuda_attention import CudaAttention, CudaRows, turns_of
from outrider.model.cuda_mlp import CudaMlp
from outrider.model.cuda_recurrent import CudaRecurrent
from outrider.model.cuda_weights import DevicePart, Upload, norm_on
from outrider.model.decoder import Layer
from outrider.ops.cuda.launch import Kernels, RowNorm, Turns
from outrider.ops.cuda.matrix import Matrix

__all__ = ["CudaLayer", "CudaRows", "norm_on", "turns_of"]


class CudaLayer:
    """A layer over paged KV. Matrices of a decoder that was built on the device are moved, not copied."""

    def __init__(
        self, layer: Layer, kernels: Kernels, device: torch.device, turns: Turns | None, upload: Upload | None = None
    ) -> None:
        s = self.spec = layer.spec
        self._kernels, upload = kernels, upload or Upload(device, kernels.dtype)
        self.mixer: CudaAttention | CudaRecurrent
        if layer.recurrent is None:
            self.mixer = CudaAttention(layer, kernels, upload, turns)
        else:
            self.mixer = CudaRecurrent(layer.recurrent, kernels, upload)
        self.mlp = CudaMlp(layer, kernels, upload)
        self.norm_in = norm_on(device, s.norm_in, layer.norm_in, layer.norm_in_bias)
        self.norm_mlp = norm_on(device, s.norm_mlp, layer.norm_mlp, layer.norm_mlp_bias)
        self._norm_attn_out = norm_on(device, s.norm_attn_out, layer.norm_attn_out, layer.norm_attn_out_bias)
        self._norm_mlp_out = norm_on(device, s.norm_mlp_out, layer.norm_mlp_out, layer.norm_mlp_out_bias)

    @property
    def attention(self) -> CudaAttention:
        """The mixer of a layer that has no other."""
        assert isinstance(self.mixer, CudaAttention)
        return self.mixer

    @property
    def parts(self) -> tuple[DevicePart, ...]:
        return self.mixer, self.mlp

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for part in self.parts for matrix in part.matrices)

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        """Use what `change` makes of each matrix, in the order of `matrices`."""
        for part in self.parts:
            part.replace_matrices(change)

    def forward(
        self, read: Tensor, stream: Tensor, after: RowNorm | None, rows: CudaRows, kv: tuple[Tensor, Tensor] | None
    ) -> Tensor:  # fmt: skip
        """Add the mixer over the rows `read` and the feed-forward part to the stream, in place; returns its norm `after`.

        Layers with attention have keys and values.
        """
        return self.after_mixer(self.mixer.forward(read, rows, kv), read, stream, after)

    def after_mixer(self, mixed: Tensor, read: Tensor, stream: Tensor, after: RowNorm | None) -> Tensor:
        """What follows the mixer's result for the rows `read`: see `forward`."""
        k, s = self._kernels, self.spec
        if not s.parallel:
            read = k.finish(mixed, self.mixer.bias, stream, self.norm_mlp, self._norm_attn_out, s.residual_scale)
        elif s.norm_mlp is not None:
            read = k.norm(stream, self.norm_mlp)
        made = self.mlp.forward(read)
        if s.parallel:
            k.finish(mixed, self.mixer.bias, stream, None, None, s.residual_scale)
        return k.finish(made, self.mlp.bias, stream, after, self._norm_mlp_out, s.residual_scale)
