"""Tests on a GPU; skipped with a reason where there is none."""

from __future__ import annotations

import pytest

from outrider.engine.device import missing_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    for item in items:
        if reason and "tests/gpu" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))
