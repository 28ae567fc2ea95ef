"""A saved model for the tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.model import save_decoder, write_config
from tests.support import random_decoder, write_family


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a small random model of the Llama family."""
    decoder = random_decoder(write_family(tmp_path / "config", "llama2"))
    out = tmp_path / "model"
    out.mkdir()
    save_decoder(decoder, out)
    write_config(decoder.spec, out)
    return out
