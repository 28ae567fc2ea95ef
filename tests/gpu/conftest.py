"""Tests on a GPU. Without one they are skipped with a reason, except those that Triton's interpreter can run."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.device import missing_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if interpreted and getattr(getattr(item, "module", None), "INTERPRETED", False):
            continue
        if reason and "tests/gpu" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture
def products_of_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, products add their terms in order, whatever their sizes; NumPy's depend on them."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar.is_bf16():
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        if handle.dtype.scalar.is_fp8():
            return torch.from_numpy(handle.data).view(torch.float8_e4m3fn).float().numpy()
        return handle.data.astype(np.int32) if handle.data.dtype == np.int8 else handle.data

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        left, right, total = numbers(a), numbers(b), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def numbers_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 no longer turns arrays of one element into integers, which Triton's interpreter asks of it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)


@pytest.fixture(autouse=True)
def casts_to_fp8_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts to and from FP8 in Triton's interpreter are torch's: it cuts bits off itself, where a GPU rounds and saturates."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, before: Any, after: Any, rounding: Any) -> Any:
        if after.is_fp8e4nv() and before.is_fp32():
            return torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if before.is_fp8e4nv() and after.is_fp32():
            return torch.from_numpy(values.copy()).view(torch.float8_e4m3fn).float().numpy()
        return convert(values, before, after, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
