"""Recurrent mixers as the GPU runs them: their matrices, and their launches. `Mixer` is the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.model.cuda_states import delta_shape
from outrider.model.cuda_weights import Upload
from outrider.ops.cuda.launch import Kernels
from outrider.ops.cuda.matrix import Matrix, RowForm, Rows
from outrider.ops.cuda.recurrence_launch import ConvolutionWeights, DeltaWeights, gated_delta, gated_norm, short_convolution

if TYPE_CHECKING:
    from outrider.model.cuda_attention import CudaRows
    from outrider.model.recurrence import Mixer

__all__ = ["CudaRecurrent"]


class CudaRecurrent:
    """A mixer whose state goes along rows."""

    def __init__(self, mixer: Mixer, kernels: Kernels, upload: Upload) -> None:
        self._kernels, self._number, self._shape = kernels, mixer.number, delta_shape(mixer.spec)
        self.read, self.write = upload.matrix(mixer.read), upload.matrix(mixer.write)
        self.bias = upload.bias(mixer.write_bias)
        make = _convolution_weights if mixer.spec.kind == "short convolution" else _delta_weights
        self._weights: ConvolutionWeights | DeltaWeights = make(mixer, upload)

    @property
    def reads(self) -> RowForm | None:
        return self.read.reads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.read, self.write

    def replace_matrices(self, change: Callable[[Matrix], Matrix]) -> None:
        self.read, self.write = change(self.read), change(self.write)

    def forward(self, read: Rows, rows: CudaRows, _: object) -> Tensor:
        """What the mixer gives for normed rows, in parts to be added in order and before `bias`: (parts, N, hidden)."""
        k, s, w = self._kernels, self._shape, self._weights
        assert rows.recurrent is not None
        state, buffers = rows.recurrent.layer(self._number)
        parts = k.parts(read, self.read)
        mixed = torch.empty(parts.shape[1], s.inner, device=parts.device, dtype=k.dtype)
        if isinstance(w, ConvolutionWeights):
            short_convolution(parts, rows.recurrent.paths, state, w, s, mixed)
        else:
            gated_delta(parts, rows.recurrent.paths, state, w, s, buffers)
            gated_norm(parts, w, s, buffers, mixed)
        return k.parts(mixed, self.write)


def _delta_weights(mixer: Mixer, upload: Upload) -> DeltaWeights:
    s = mixer.spec
    assert mixer.decay is not None
    assert mixer.step_bias is not None
    assert mixer.norm is not None
    assert s.norm_eps is not None
    conv, conv_bias = _taps(mixer, upload)
    decay = _small(-torch.exp(mixer.decay.float()), upload)
    return DeltaWeights(conv, conv_bias, decay, _small(mixer.step_bias, upload), _small(mixer.norm, upload), s.norm_eps)


def _convolution_weights(mixer: Mixer, upload: Upload) -> ConvolutionWeights:
    return ConvolutionWeights(*_taps(mixer, upload), upload.bias(mixer.read_bias))


def _taps(mixer: Mixer, upload: Upload) -> tuple[Tensor, Tensor | None]:
    """The convolution (kernel, channels) and its bias."""
    return _small(mixer.conv[:, 0].T, upload), None if mixer.conv_bias is None else _small(mixer.conv_bias, upload)


def _small(weight: Tensor, upload: Upload) -> Tensor:
    return weight.detach().to(upload.device, torch.float32).contiguous()
