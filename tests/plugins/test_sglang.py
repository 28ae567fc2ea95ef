"""The serve backend, against SGLang's contract as it was recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider.plugins.sglang import create_backend, flags_of, run

RECORDED = json.loads((Path(__file__).parent / "interfaces.json").read_text(encoding="utf-8"))["sglang"]


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """SGLang's module with the recorded classes in it."""
    module: Any = ModuleType("sglang.cli.serve_backends")
    fields = [(name, Any, field(default=default)) for name, default in RECORDED["ServeBackend"].items()]
    module.ServeBackend = make_dataclass("ServeBackend", fields, frozen=True)
    module.ServeRequest = make_dataclass("ServeRequest", RECORDED["ServeRequest"], frozen=True)
    for name, part in (("sglang", ModuleType("sglang")), ("sglang.cli", ModuleType("sglang.cli")), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, part)
    return module


def test_the_factory_makes_a_backend_of_the_recorded_version(contract: Any) -> None:
    backend = create_backend()
    assert isinstance(backend, contract.ServeBackend)
    assert backend.api_version == RECORDED["api_version"]
    assert backend.run is run
    assert backend.detect is None  # used only where it is named
    assert backend.requires_model_path is False  # the bundled model needs none


def test_flags_have_our_names() -> None:
    argv = ("--model-path", "/m", "--context-length=512", "--port", "1", "--mem-fraction-static", "0.8", "--api-key", "a=b")
    expected = ["--model", "/m", "--max-model-len=512", "--port", "1", "--memory", "0.8", "--api-key", "a=b"]
    assert list(flags_of(argv)) == expected


def test_help_is_shown_and_nothing_is_served(contract: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(contract.ServeRequest(("--help",), None, False))
    assert ended.value.code == 0
    assert "--max-num-seqs" in capsys.readouterr().out


def test_a_wrong_flag_ends_with_an_error(contract: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(contract.ServeRequest(("--model-path", "/nowhere", "--port", "0"), "/nowhere", False))
    assert ended.value.code == 2
    assert "/nowhere" in capsys.readouterr().err


def test_the_recorded_contract_is_the_installed_one() -> None:
    installed = pytest.importorskip("sglang.cli.serve_backends", reason="SGLang is not installed")
    assert RECORDED["group"] == installed.SERVE_BACKENDS_GROUP
    assert RECORDED["api_version"] == installed.SERVE_BACKEND_API_VERSION
    assert list(installed.ServeBackend.__dataclass_fields__) == list(RECORDED["ServeBackend"])
