"""Tests on a GPU. Without one they are skipped with a reason, except those that Triton's interpreter can run."""

from __future__ import annotations

import os

import pytest

from outrider.engine.device import missing_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if interpreted and getattr(getattr(item, "module", None), "INTERPRETED", False):
            continue
        if reason and "tests/gpu" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))
