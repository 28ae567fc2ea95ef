"""Every family against Transformers in float32, on tiny random models: logits everywhere, and the tokens of a long greedy text.

A new family is one entry in tests/support/families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.model import Feed, Runner, load_decoder, read_spec
from outrider.model.backends import CPU
from outrider.ops import Blocked, Native, find_core
from tests.support import make_pool
from tests.support.families import (
    CASES,
    PAGES,
    assert_agreement,
    assert_greedy,
    build_reference,
    expected,
    greedy_text,
    logits,
)

BACKENDS = ["plain", "cpu"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family's name, its Transformers model and the directory that it was saved in."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, build_reference(request.param, directory), directory


def runner_of(directory: Path, backend: str) -> Runner:
    decoder, core = load_decoder(directory), find_core()[0]
    if backend == "cpu" and core is None:
        pytest.skip("the native core is not built")
    if backend == "cpu" and (missing := CPU.missing(decoder.spec)):
        pytest.skip(f"the native core lacks {missing}")
    return Runner(decoder, make_pool(decoder, pages=40), Blocked() if backend == "plain" else Native(core))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_decoding_and_tree_nodes_agree(case: tuple[str, Any, Path], backend: str) -> None:
    _, reference, directory = case
    assert_agreement(runner_of(directory, backend), reference)


def test_two_hundred_greedy_tokens_are_those_of_transformers(case: tuple[str, Any, Path]) -> None:
    """Each reads the text that one backend wrote, the native core if it has what the model needs.

    Decoding has the bits of reading (the test above).
    """
    name, reference, directory = case
    backends = ["plain"] if CPU.missing(read_spec(directory)) else BACKENDS
    writer, reader = runner_of(directory, backends[-1]), runner_of(directory, "plain")
    text = greedy_text(writer, name)
    assert_greedy(expected(reference, text), text)
    assert_greedy(logits(reader, Feed(PAGES, 0, text, rotary_start=reader.decoder.rotary_start(len(text)))), text)
