"""A corpus changes no token and saves rounds where it is quoted; calls share their outputs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.draft import Kept
from outrider.errors import InvalidParameter
from tests.support import write_family

PROMPTS = [
    "def area(width, height):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\n\ndef load(path):\n",
    "def fibonacci(n):\n    if n",
    "for name in sorted(",
    "try:\n    import",
    "def main():\n    parser =",
    "with open(path) as",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculation="none", max_num_seqs=8)


@pytest.fixture(scope="module")
def quoted(plain: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose files are what the model writes after the prompts."""
    folder = tmp_path_factory.mktemp("corpus")
    for i, result in enumerate(plain.generate(PROMPTS, GREEDY)):
        (folder / f"{i}.py").write_text(PROMPTS[i] + result.outputs[0].text)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("method", ["suffix:12:adaptive=false", "ngram:8:adaptive=false", "mixture:16:members=suffix+recycle"])
def test_a_corpus_changes_no_token_and_saves_rounds(plain: LLM, quoted: Path, method: str) -> None:
    reading = LLM(speculation=method, corpus=quoted, max_num_seqs=8, calibration_s=0)
    assert reading.corpus is not None
    assert reading.corpus.files == len(PROMPTS)
    for batch in (1, 3, 8):
        for params in (GREEDY, SAMPLED):
            assert tokens_of(reading.generate(PROMPTS[:batch], params)) == tokens_of(plain.generate(PROMPTS[:batch], params))
    alone = reading.beside(method, target=replace(reading._target, corpus=None))
    rounds = [
        sum(result.outputs[0].speculation["rounds"] for result in llm.generate(PROMPTS, GREEDY)) for llm in (alone, reading)
    ]
    assert rounds[1] < 0.6 * rounds[0]


def test_a_corpus_is_read_only_where_a_drafter_searches_it(quoted: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert LLM(speculation="none", corpus=quoted).corpus is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for method in ("recycle:8", {"method": "suffix", "rule": "rejection"}):
        caplog.clear()
        assert LLM(speculation=method, corpus=quoted, calibration_s=0).corpus is None
        assert "ngram, suffix" in caplog.text


def test_what_is_wrong_with_a_corpus_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="does not exist"):
        LLM("no/model", corpus=[str(tmp_path / "missing")])
    write_family(tmp_path, "llama2")
    with pytest.raises(InvalidParameter, match="no tokenizer"):
        LLM(tmp_path, load_format="dummy", speculation="suffix", corpus=__file__)


def test_calls_are_one_tenant_unless_they_are_not_to_share(plain: LLM) -> None:
    method = "suffix:12:shared_tokens=4096:adaptive=false"
    expected = tokens_of(plain.generate(PROMPTS[0], GREEDY))
    sharing, apart = LLM(speculation=method), LLM(speculation=method, share=False)
    rounds = []
    for llm in (sharing, apart):
        for _ in range(2):
            (result,) = llm.generate(PROMPTS[0], GREEDY)
            assert [result.outputs[0].token_ids] == expected
            rounds.append(result.outputs[0].speculation["rounds"])
    assert rounds[1] < 0.6 * rounds[0]
    assert rounds[2] == rounds[3] == rounds[0]
    assert sharing.kept().texts == 2
    assert apart.kept() == Kept()
    (other,) = sharing.generate(PROMPTS[0], GREEDY, tenant="a")
    assert other.outputs[0].speculation["rounds"] == rounds[0]
    assert sharing.forget().texts == 2
    assert sharing.kept("a").texts == 1
    with pytest.raises(InvalidParameter, match="share"):
        LLM(share=1)  # type: ignore[arg-type]


def test_comparing_runs_does_not_draft_from_the_run_before() -> None:
    llm = LLM(speculation="suffix:12:shared_tokens=4096:adaptive=false")
    result = llm.benchmark(PROMPTS[0], params=GREEDY, repeats=1)
    assert result.tokens_equal
    assert llm.kept() == Kept()


def test_texts_are_remembered_for_a_tenant_or_for_all_calls() -> None:
    llm = LLM(speculation="suffix:12:shared_tokens=4096:adaptive=false")
    assert llm.remember(["def volume(a, b, c):\n    return a * b * c\n", [5, 6, 7]]).texts == 2
    assert llm.remember(["x = 1"], tenant="a").texts == 1
    assert llm.kept("b") == Kept()
    for wrong in ("text", [3], [[10**9]], None):
        with pytest.raises(InvalidParameter, match="texts"):
            llm.remember(wrong)  # type: ignore[arg-type]


def test_commands_take_a_corpus(quoted: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.progress")
    files = f"{quoted / '0.py'},{quoted / '1.py'}"
    flags = ["--max-tokens", "8", "--method", "suffix:8", "--corpus", files, "--corpus", str(quoted / "2.py")]
    with pytest.raises(SystemExit) as ended:
        main(["generate", PROMPTS[0], "--json", *flags])
    assert ended.value.code == 0
    assert "corpus: 3 files" in caplog.text
    with pytest.raises(SystemExit) as ended:
        main(["generate", PROMPTS[0], "--corpus", "missing.txt"])
    assert ended.value.code == 2
    assert "missing.txt does not exist" in capsys.readouterr().err
