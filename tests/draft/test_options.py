"""Options of drafters: declared once, checked in one place, and one error says what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import LLM
from outrider.config import METHODS, SpeculationConfig
from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft import DraftContext, check_speculation, registry
from outrider.draft.options import declared, describe, option
from outrider.draft.registry import drafter_class
from outrider.errors import InvalidParameter
from tests.support import write_family

DOCS = Path(__file__).parents[2] / "docs" / "drafters.md"


class Silent:
    """Guesses nothing, with options by its constructor."""

    needs = Needs()

    def __init__(self, size: int = 3, share: float = 0.5, name: str = "x", on: bool = True, shape: Any = None) -> None:
        self.settings = (size, share, name, on, shape)

    def begin(self, seq: Sequence) -> None: ...

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        return Drafts.empty(len(plan.lengths))

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None: ...

    def end(self, seq: Sequence) -> None: ...


@dataclass(frozen=True)
class DeclaredOptions:
    size: int = option(3, "how much", 1, 9)


class Declared(Silent):
    """The same with declared options."""

    Options = DeclaredOptions

    @classmethod
    def build(cls, context: DraftContext) -> Declared:
        return cls(context.options(DeclaredOptions).size)


SILENT, DECLARED = f"{__name__}:Silent", f"{__name__}:Declared"


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Names registered by a test are gone after it."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("m"), "llama2")


@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_declares_frozen_options(method: str) -> None:
    kind = drafter_class(method).Options
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    check_speculation(SpeculationConfig(method))
    assert all(one.doc for one in declared(kind).values())


@pytest.mark.parametrize("method", METHODS)
def test_the_docs_list_every_option(method: str) -> None:
    section = DOCS.read_text(encoding="utf-8").split(f"\n## {method}\n")[1].split("\n## ")[0]
    for line in describe(drafter_class(method).Options):
        assert line in section.splitlines()


@pytest.mark.parametrize(
    ("method", "settings", "name"),
    [
        ("ngram", {"ngram_min": 3, "ngram_max": 2}, "ngram_min"),
        ("ngram", {"ngram_min": 0}, "ngram_min"),
        ("ngram", {"ngram_max": 33}, "ngram_max"),
        ("suffix", {"min_match": 0}, "min_match"),
        ("suffix", {"min_match": 5, "max_match": 4}, "min_match"),
        ("suffix", {"factor": -1.0}, "factor"),
        ("suffix", {"factor": 0.0, "offset": 0.0}, "factor"),
        ("suffix", {"min_prob": 1.5}, "min_prob"),
        ("suffix", {"min_prob": float("nan")}, "min_prob"),
        ("suffix", {"branch": 0}, "branch"),
        ("suffix", {"shared_tokens": -1}, "shared_tokens"),
        ("recycle", {"top": 0}, "top"),
        ("recycle", {"top": 9}, "top"),
        ("recycle", {"table_tokens": 0}, "table_tokens"),
        ("recycle", {"tenants": 0}, "tenants"),
        ("recycle", {"shared": 2}, "shared"),
        ("lookahead", {"window": -1}, "window"),
        ("lookahead", {"ngram": 1}, "ngram"),
        ("lookahead", {"pool_tokens": 3}, "pool_tokens"),
        ("eagle", {"beam": 0}, "beam"),
        ("eagle", {"beam": True}, "beam"),
        ("eagle", {"depth": 65}, "depth"),
        ("draft_model", {"branch": "wide"}, "branch"),
        ("draft_model", {"vocabulary": "ours"}, "vocabulary"),
        ("draft_model", {"dtype": "float8"}, "dtype"),
        ("medusa", {"dynamic": "yes"}, "dynamic"),
        ("early_exit", {"exit_layer": 0}, "exit_layer"),
        ("mixture", {"enough": 0}, "enough"),
        ("auto", {"load_format": "gguf"}, "load_format"),
    ],
)
def test_values_are_checked(method: str, settings: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_speculation(SpeculationConfig.parse({"method": method} | settings))
    assert caught.value.param == name


def test_an_error_names_the_method_the_option_and_the_valid_ones() -> None:
    with pytest.raises(InvalidParameter, match=r"beam: must be an integer in \[1, 64\], got 'x' .*'eagle'.*beam, branch, depth"):
        check_speculation(SpeculationConfig.parse("eagle:beam=x"))
    with pytest.raises(
        InvalidParameter, match=r"unknown setting 'baem' for method 'eagle' \(did you mean 'beam'\?\).*branch, depth"
    ):
        check_speculation(SpeculationConfig.parse("eagle:baem=2"))
    with pytest.raises(InvalidParameter, match="unknown setting 'typo' for method 'ngram'.*ngram_min, ngram_max"):
        check_speculation(SpeculationConfig.parse("mixture:members=suffix+(ngram:typo=1)"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 2.5}, f"size: must be an integer.*'{SILENT}'.*its options: size, share, name, on, shape, deadline_s"),
        ({"share": "x"}, "share: must be a number"),
        ({"name": 7}, "name: must be a string"),
        ({"on": 2}, "on: must be in"),
        ({"sise": 2}, "unknown setting 'sise'.*did you mean 'size'"),
        ({"deadline_s": "soon"}, "deadline_s: must be a number"),
    ],
)
def test_a_constructor_s_parameters_are_its_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        LLM("/no/such/model", speculation={"method": SILENT} | settings)


def test_a_constructor_gets_its_options(model: Path) -> None:
    settings = {"size": -2, "share": 2, "name": "y", "on": 0, "shape": [1, 2], "deadline_s": 5}
    llm = LLM(model, load_format="dummy", speculation={"method": SILENT} | settings)
    assert llm.engine.drafter.drafter._drafter.settings == (-2, 2, "y", False, [1, 2])  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [DECLARED, "declared"])
def test_a_user_s_class_declares_options_as_ours_do(model: Path, method: str, forgetful: None) -> None:
    outrider.register_drafter("declared", Declared)
    llm = LLM(model, load_format="dummy", speculation={"method": method, "size": 7})
    assert llm.engine.drafter.drafter._drafter.settings[0] == 7  # type: ignore[attr-defined]
    for settings, message in (({"size": 10}, r"size: must be in \[1, 9\]"), ({"share": 1}, "its options: size, deadline_s")):
        with pytest.raises(InvalidParameter, match=message):
            LLM("/no/such/model", speculation={"method": method} | settings)


def test_what_a_factory_does_not_read_is_unknown(model: Path, forgetful: None) -> None:
    outrider.register_drafter("bare", lambda context: Silent())
    outrider.register_drafter("reading", lambda context: Silent(context.config.options.get("size", 4)))
    outrider.register_drafter("handing", lambda context: Silent(**context.config.options))
    for method in ("reading", "handing"):
        llm = LLM(model, load_format="dummy", speculation={"method": method, "size": 7, "deadline_s": 2})
        assert llm.engine.drafter.drafter._drafter.settings[0] == 7  # type: ignore[attr-defined]
    for method, message in (
        ("bare", "unknown setting 'sise' for method 'bare'; its options: none"),
        ("reading", r"unknown setting 'sise' for method 'reading' \(did you mean 'size'\?\); its options: size"),
        ("handing", "'handing' cannot be built.*unexpected keyword argument 'sise'"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            LLM(model, load_format="dummy", speculation={"method": method, "sise": 7})
