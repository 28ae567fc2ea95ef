"""The doctor's checks of a GPU pass, and fail for kernels that are not row-invariant. They run in Triton's interpreter too."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("products_of_fixed_order")
INTERPRETED = True
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter lacks some of bf16


def test_rows_are_invariant() -> None:
    from outrider.bench.doctor import gpu_attention, gpu_linear_is_invariant

    assert gpu_linear_is_invariant((64, 128), DEVICE, DTYPE)
    checked = gpu_attention(DEVICE, DTYPE)
    assert checked.nodes
    assert checked.prompts


def test_kernels_that_are_not_invariant_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.bench.doctor import gpu_attention, gpu_linear_is_invariant
    from outrider.ops.cuda.launch import Kernels

    linear, attend = Kernels.linear, Kernels.attend_rows

    def dependent(self, x, w, bias, out):  # type: ignore[no-untyped-def]
        linear(self, x, w, bias, out)
        out *= 1.0 + 2.0**-20 * (len(x) > 16)

    def dependent_rows(self, q, *args):  # type: ignore[no-untyped-def]
        attend(self, q * (1.5 if len(q) == 1 else 1.0), *args)

    monkeypatch.setattr(Kernels, "linear", dependent)
    monkeypatch.setattr(Kernels, "attend_rows", dependent_rows)
    assert not gpu_linear_is_invariant((64, 128), DEVICE, DTYPE)
    assert not gpu_attention(DEVICE, DTYPE).nodes
