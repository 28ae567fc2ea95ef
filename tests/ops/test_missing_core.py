"""The message where torch decodes because the native core is missing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider import LLM
from outrider.ops import find_core, missing_core, native, plain
from tests.support import write_family


@pytest.fixture
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_OPS", raising=False)
    monkeypatch.delenv("OUTRIDER_CORE", raising=False)
    monkeypatch.setattr(native, "_built", dict)
    monkeypatch.setattr(plain, "find_core", native.find_core.__wrapped__)


@pytest.mark.usefixtures("no_core")
@pytest.mark.parametrize(("machine", "words"), [("x86_64", "install a C++ compiler"), ("riscv64", "this one is riscv64")])
def test_the_reason_and_the_cure(machine: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    assert words in str(missing_core())


@pytest.mark.usefixtures("no_core")
def test_a_start_without_the_core_says_so_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        LLM(write_family(tmp_path, "llama2"), load_format="dummy", kv_bytes=2**20)
    said = [record.getMessage() for record in caplog.records if "native core" in record.getMessage()]
    assert len(said) == 1
    assert "torch decodes, slower" in said[0]
    assert "\n" not in said[0]


def test_torch_by_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_core()[0] is None:
        pytest.skip(find_core()[1])
    monkeypatch.setenv("OUTRIDER_OPS", "torch")
    assert "unset it" in str(missing_core())
    monkeypatch.setenv("OUTRIDER_OPS", "native")
    assert missing_core() is None
