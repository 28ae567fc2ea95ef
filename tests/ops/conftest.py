"""Every build of the native core that runs here, or the one that the environment names."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from outrider.ops import Core
from outrider.ops.native import load_build, usable_builds


def _cores() -> dict[str, Core]:
    if "OUTRIDER_CORE" in os.environ:
        return {"chosen": Core(Path(os.environ["OUTRIDER_CORE"]))}
    cores = {}
    for name in usable_builds():
        with contextlib.suppress(OSError):
            cores[name] = load_build(name)
    return cores


CORES = _cores()


@pytest.fixture(params=CORES, scope="module")
def core(request: pytest.FixtureRequest) -> Core:
    chosen = CORES[request.param]
    chosen.threads = 1
    return chosen
