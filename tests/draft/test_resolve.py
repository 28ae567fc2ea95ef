"""Drafters that the settings leave open come from the model's folder, or the error says what to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from outrider.config import SpeculationConfig, parse_method, pinned
from outrider.draft.resolve import resolve_drafters
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams
from tests.support import write_family


def methods(word: str, directory: Path) -> list[str]:
    return list(resolve_drafters(SpeculationConfig.parse(word), directory).methods())


def test_a_cascade_takes_the_draft_model_of_the_folder(tmp_path: Path) -> None:
    write_family(tmp_path / "draft", "llama2")
    assert methods("cascade:8", tmp_path) == ["cascade", "ngram", "draft_model"]
    assert methods("cascade:levels=draft_model", tmp_path) == ["cascade", "draft_model"]
    assert methods("mixture:members=suffix+cascade", tmp_path) == ["mixture", "suffix", "cascade", "ngram", "draft_model"]


def test_a_cascade_without_a_draft_model_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="levels: method 'cascade' needs a draft model") as caught:
        methods("cascade", tmp_path)
    _, _, typed = str(caught.value).partition("--method ")
    assert parse_method(shlex.split(typed.split(",")[0])[0])["levels"][1] == {"method": "draft_model", "model": "DIR"}


@pytest.mark.parametrize(
    ("folders", "members"),
    [
        ((), ["suffix", "recycle"]),
        (("draft",), ["suffix", "draft_model"]),
        (("medusa",), ["suffix", "medusa"]),
        (("draft", "eagle", "medusa"), ["suffix", "eagle"]),
        (("draft", "dflash"), ["suffix", "dflash"]),
    ],
)
def test_a_mixture_takes_the_best_network_of_the_folder(tmp_path: Path, folders: tuple[str, ...], members: list[str]) -> None:
    for folder in folders:
        write_family(tmp_path / folder, "llama2")
    assert methods("mixture", tmp_path) == ["mixture", *members]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa", "dflash"])
def test_methods_with_weights_say_what_to_type(tmp_path: Path, method: str) -> None:
    directory = write_family(tmp_path, "llama2")
    message = rf"needs the directory.*--method {method} --draft-model DIR.*speculation=\{{'method': '{method}', 'model': DIR\}}"
    with pytest.raises(InvalidParameter, match=message):
        LLM(directory, load_format="dummy", speculation=method)


def test_they_draft_and_the_tokens_are_the_same(tmp_path: Path) -> None:
    directory = write_family(tmp_path, "llama2")
    write_family(tmp_path / "draft", "llama2", num_hidden_layers=1)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = {}
    for method in ("none", "cascade", "mixture", "early_exit"):
        llm = LLM(directory, load_format="dummy", speculation=method if method == "none" else pinned(method))
        outputs[method] = llm.generate([[1, 2, 3] * 4], params)[0].outputs[0]
        assert outputs[method].speculation["fallback_reason"] is None
        assert outputs[method].token_ids == outputs["none"].token_ids
    assert outputs["cascade"].speculation["drafted"] > 0
    assert outputs["mixture"].speculation["drafted"] > 0
