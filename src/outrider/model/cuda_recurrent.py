"""The gated delta rule as the GPU runs it: a mixer's matrices, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.model.cuda_states import delta_shape
from outrider.model.cuda_weights import Upload
from outrider.ops.cuda.launch import Kernels
from outrider.ops.cuda.matrix import Matrix, RowForm, Rows
from outrider.ops.cuda.recurrence_launch import DeltaWeights, gated_delta, gated_norm

if TYPE_CHECKING:
    from outrider.model.cuda_attention import CudaRows
    from outrider.model.recurrence import Mixer

__all__ = ["CudaRecurrent"]


class CudaRecurrent:
    """A mixer whose state goes along rows; `Mixer` is the reference."""

    def __init__(self, mixer: Mixer, kernels: Kernels, upload: Upload) -> None:
        s = mixer.spec
        assert s.kind == "gated delta rule", "the backend lacks other kinds"
        assert mixer.decay is not None
        assert mixer.step_bias is not None
        assert mixer.norm is not None
        assert s.norm_eps is not None
        self._kernels, self._number, self._shape = kernels, mixer.number, delta_shape(s)
        self.read, self.write = upload.matrix(mixer.read), upload.matrix(mixer.write)
        self.bias = upload.bias(mixer.write_bias)

        def small(weight: Tensor) -> Tensor:
            return weight.detach().to(upload.device, torch.float32).contiguous()

        conv_bias = None if mixer.conv_bias is None else small(mixer.conv_bias)
        self._weights = DeltaWeights(
            small(mixer.conv[:, 0].T), conv_bias, small(-torch.exp(mixer.decay.float())), small(mixer.step_bias),
            small(mixer.norm), s.norm_eps,
        )  # fmt: skip

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
        gated_delta(parts, rows.recurrent.paths, state, w, s, buffers)
        mixed = torch.empty(len(read), s.inner, device=read.device, dtype=k.dtype)
        gated_norm(parts, w, s, buffers, mixed)
        return k.parts(mixed, self.write)
