"""Shared fixtures. Torch runs on one thread so that two test workers fit two cores."""

from __future__ import annotations

import outrider  # noqa: F401  (first: it makes bf16 safe before torch is used)
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# No shrinking by default: a failing example of a whole engine run is shown as found, at once.
settings.register_profile(
    "outrider",
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("outrider")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "native"])
def both_paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the torch path and on the native core."""
    from outrider.ops import find_core

    if request.param == "native" and find_core()[0] is None:
        pytest.skip(find_core()[1])
    monkeypatch.setenv("OUTRIDER_OPS", request.param)
    return str(request.param)
