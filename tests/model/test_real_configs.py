"""The configs of models that people run are read as what those models are (tests/support/real_configs.py)."""

from __future__ import annotations

import pytest

from outrider.model import compile_spec
from outrider.model.families import FAMILIES
from outrider.model.listing import Wants
from tests.support.real_configs import REAL_CONFIGS


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_real_configs(name: str) -> None:
    real = REAL_CONFIGS[name]
    spec = compile_spec(real.config)
    assert (spec.depth, spec.heads, spec.kv_heads, spec.head_dim) == real[1:5]
    assert spec.parameters / 1e9 == pytest.approx(real.billions, rel=0.01)
    assert "+".join(Wants(spec).rotary.split(", ")) == real.rotary
    windows = [window for window in spec.windows if window is not None]
    assert "+".join(f"{window}x{windows.count(window)}" for window in dict.fromkeys(windows)) == real.windows
    assert ", ".join(sorted(spec.features())) == ", ".join(sorted(real.features.split(", "))).removeprefix(", ")


def test_most_families_have_a_real_config() -> None:
    seen = {compile_spec(real.config).family for real in REAL_CONFIGS.values()}
    assert len(seen) >= 0.7 * len(FAMILIES)
    assert len(REAL_CONFIGS) >= 25
