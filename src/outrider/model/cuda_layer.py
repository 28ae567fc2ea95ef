"""One layer as the GPU runs it: a mixer and a feed-forward part between norms. Targets and EAGLE heads share it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.model.cuda_attention import CudaAttention, CudaRows, turns_of
from outrider.model.cuda_experts import CudaExperts
from outrider.model.cuda_mlp import CudaMlp
from outrider.model.cuda_recurrent import CudaRecurrent
from outrider.model.cuda_weights import DevicePart, Upload, norm_on
from outrider.model.decoder import Layer
from outrider.ops.cuda.experts_launch import ExpertKernels
from outrider.ops.cuda.launch import Kernels, RowNorm, Turns
from outrider.ops.cuda.matrix import Matrix, RowForm, Rows

__all__ = ["CudaLayer", "CudaRows", "norm_on", "turns_of"]


class CudaLayer:
    """A layer over paged KV. Matrices of a decoder that was built on the device are moved, not copied."""

    def __init__(
        self,
        layer: Layer,
        kernels: Kernels,
        device: torch.device,
        turns: Turns | None,
        upload: Upload | None = None,
        experts: ExpertKernels | None = None,  # where the layer has some
    ) -> None:
        s = self.spec = layer.spec
        self._kernels, upload = kernels, upload or Upload(device, kernels.dtype)
        self.mixer: CudaAttention | CudaRecurrent
        if layer.recurrent is None:
            self.mixer = CudaAttention(layer, kernels, upload, turns)
        else:
            self.mixer = CudaRecurrent(layer.recurrent, kernels, upload)
        self.mlp = _mlp(layer, kernels, experts, upload)
        self.norm_in = norm_on(device, s.norm_in, layer.norm_in, layer.norm_in_bias)
        self.norm_mlp = norm_on(device, s.norm_mlp, layer.norm_mlp, layer.norm_mlp_bias)
        self._norm_attn_out = norm_on(device, s.norm_attn_out, layer.norm_attn_out, layer.norm_attn_out_bias)
        self._norm_mlp_out = norm_on(device, s.norm_mlp_out, layer.norm_mlp_out, layer.norm_mlp_out_bias)

    @property
    def reads(self) -> RowForm | None:
        """The form of the rows that the layer reads; None: the weights' dtype."""
        return None if self.spec.parallel and self.mlp.reads != self.mixer.reads else self.mixer.reads

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
        self, read: Rows, stream: Tensor, after: RowNorm | None, rows: CudaRows, kv: tuple[Tensor, Tensor] | None
    ) -> Tensor:  # fmt: skip
        """Add the mixer over the rows `read` and the feed-forward part to the stream, in place; returns its norm `after`.

        Layers with attention have keys and values.
        """
        return self.after_mixer(self.mixer.forward(read, rows, kv), read, stream, after, rows)

    def forward_to(
        self, form: RowForm | None, read: Rows, stream: Tensor, after: RowNorm | None, rows: CudaRows,
        kv: tuple[Tensor, Tensor] | None,
    ) -> Rows:  # fmt: skip
        """The same, with the norm in the form that the next layer reads."""
        return self._finished(form, self._fed_forward(self.mixer.forward(read, rows, kv), read, stream, rows), stream, after)

    def after_mixer(
        self, mixed: Tensor, read: Rows, stream: Tensor, after: RowNorm | None, rows: CudaRows | None = None
    ) -> Tensor:
        """What follows the mixer's result for the rows `read`: see `forward`. Layers with experts need `rows`."""
        normed = self._finished(None, self._fed_forward(mixed, read, stream, rows), stream, after)
        assert isinstance(normed, Tensor)
        return normed

    def _fed_forward(self, mixed: Tensor, read: Rows, stream: Tensor, rows: CudaRows | None) -> Tensor:
        """The mixer's result is added to the stream; returns the feed-forward part's, in parts."""
        k, s = self._kernels, self.spec
        if not s.parallel:
            reads, scale = self.mlp.reads, s.residual_scale
            read = k.finish_as(reads, mixed, self.mixer.bias, stream, self.norm_mlp, self._norm_attn_out, scale)
        elif s.norm_mlp is not None:
            read = k.norm(stream, self.norm_mlp)
        made = self.mlp.forward(read, rows)
        if s.parallel:
            k.finish(mixed, self.mixer.bias, stream, None, None, s.residual_scale)
        return made

    def _finished(self, form: RowForm | None, made: Tensor, stream: Tensor, after: RowNorm | None) -> Rows:
        scale = self.spec.residual_scale
        return self._kernels.finish_as(form, made, self.mlp.bias, stream, after, self._norm_mlp_out, scale)


def _mlp(layer: Layer, kernels: Kernels, experts: ExpertKernels | None, upload: Upload) -> CudaMlp | CudaExperts:
    if layer.spec.mlp.router is None:
        return CudaMlp(layer, kernels, upload)
    assert experts is not None, "only a target's layers have experts"
    return CudaExperts(layer, kernels, experts, upload)
