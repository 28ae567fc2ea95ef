"""The doctor's checks of a GPU: they hold, and they notice. These run in Triton's interpreter too."""

from __future__ import annotations

import pytest
import torch

INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter lacks some of bf16


def test_rows_are_invariant() -> None:
    from outrider.bench.gpu_doctor import gpu_attention, gpu_linear_is_invariant

    assert gpu_linear_is_invariant((64, 128), DEVICE, DTYPE)
    found = gpu_attention(DEVICE, DTYPE)
    assert found.nodes
    assert found.prompts or DEVICE == "cpu"  # numpy sums products of other sizes otherwise


def test_rows_that_know_their_neighbours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.bench.gpu_doctor import gpu_attention, gpu_linear_is_invariant
    from outrider.ops.cuda.launch import Kernels

    linear, attend = Kernels.linear, Kernels.attend_rows

    def nosy(self, x, w, bias, out, form, tile=None):  # type: ignore[no-untyped-def]
        linear(self, x, w, bias, out, form, tile)
        out *= 1.0 + 2.0**-20 * (len(x) > 16)

    def nosy_rows(self, q, *given):  # type: ignore[no-untyped-def]
        attend(self, q * (1.5 if len(q) == 1 else 1.0), *given)

    monkeypatch.setattr(Kernels, "linear", nosy)
    monkeypatch.setattr(Kernels, "attend_rows", nosy_rows)
    assert not gpu_linear_is_invariant((64, 128), DEVICE, DTYPE)
    assert not gpu_attention(DEVICE, DTYPE).nodes
