"""Heads that the `speculators` package wrote: those kept in stored/, and new ones where `make oracles` has its environment.

That environment has the package and not this one, because the package pins other versions of what both need.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor

from outrider.model import Decoder, LoadOptions, load_decoder

HERE = Path(__file__).parent
PYTHON = os.environ.get("OUTRIDER_ORACLES")  # of that environment
FULL = LoadOptions(dtype="float32")


class Oracle(NamedTuple):
    """A folder that package_models.py filled."""

    folder: Path
    target: Decoder  # OUT/verifier

    def case(self, name: str) -> tuple[Path, dict[str, Tensor]]:
        """The folder of a head, and the inputs and outputs of its forward."""
        if not (self.folder / name).exists():
            pytest.skip(f"{name} is not kept")
        return self.folder / name, load_file(self.folder / "cases" / f"{name}.safetensors")


@pytest.fixture(scope="session", params=["stored", "new"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = HERE / "stored"
    if request.param == "new":
        folder = tmp_path_factory.mktemp("oracles") / "models"
        run_package(str(HERE / "package_models.py"), str(folder), "11")
    return Oracle(folder, load_decoder(folder / "verifier", FULL))


def run_package(*arguments: str) -> str:
    """Run the package's Python and return what it prints; skipped where there is none."""
    if PYTHON is None:
        pytest.skip("the package's environment is made by `make oracles`")
    done = subprocess.run([PYTHON, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
