"""The proposer, called as vLLM calls it: its batch is arrays, and requests move between rows."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.plugins.vllm import SuffixProposer

RECORDED = json.loads((Path(__file__).parent / "interfaces.json").read_text(encoding="utf-8"))["vllm"]
CONTEXT, LENGTH = 64, 4
LOOP = [5, 6, 7, 8, 9]


def proposer(length: int = LENGTH, context: int = CONTEXT) -> SuffixProposer:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(max_model_len=context, tokenizer="owner/name", model="owner/name"),
    )
    return SuffixProposer(config)


class Batch:
    """The part of vLLM's input batch that a proposer sees. Rows hold stale tokens behind the text."""

    def __init__(self, proposer: Any, *texts: list[int]) -> None:
        self.proposer = proposer
        self.texts = list(texts)

    def step(self, *sampled: list[int]) -> list[list[int]]:
        tokens = np.full((8, CONTEXT), 99, dtype=np.int32)
        sizes = np.zeros(8, dtype=np.int32)
        for row, (text, new) in enumerate(zip(self.texts, sampled, strict=True)):
            text += new
            tokens[row, : len(text)] = text
            sizes[row] = len(text)
        drafts: list[list[int]] = self.proposer.propose(list(sampled), sizes, tokens, slot_mappings=None)
        return drafts


def test_it_is_found_and_called_as_recorded() -> None:
    module, _, name = "outrider.plugins.vllm.SuffixProposer".rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert list(inspect.signature(found).parameters) == RECORDED["constructor"]
    parameters = inspect.signature(found.propose).parameters
    expected = RECORDED["propose"]
    assert list(parameters) == ["self", *expected["positional"], *expected["by_name"]]
    assert all(parameters[name].default is None for name in expected["by_name"])


def test_it_is_called_by_name_with_tensors_too() -> None:
    """vLLM's class around it passes every argument by name, and says that the texts are a tensor."""
    text = [*LOOP, 1, 5, 6]
    tokens = torch.full((2, CONTEXT), 99, dtype=torch.int32)
    tokens[0, : len(text)] = torch.tensor(text)
    arguments = [[[5, 6]], torch.tensor([len(text)], dtype=torch.int32), tokens, None]
    names = [*RECORDED["propose"]["positional"], *RECORDED["propose"]["by_name"]]
    assert proposer().propose(**dict(zip(names, arguments, strict=True))) == [[7, 8, 9, 1]]


def test_it_imports_without_vllm() -> None:
    code = "import sys, outrider.plugins.vllm, outrider.plugins.sglang; assert not {'vllm', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_proposes_what_followed_before() -> None:
    batch = Batch(proposer(), [*LOOP, 1], [3, 4, 3])
    assert batch.step([5, 6], [4]) == [[7, 8, 9, 1], [3, 4, 3, 4]]
    assert batch.step([7], [2]) == [[8, 9, 1, 5], []]


def test_a_row_in_the_middle_of_its_prompt_gets_no_draft() -> None:
    batch = Batch(proposer(), [*LOOP, 1], [*LOOP])
    assert batch.step([], [5]) == [[], [6, 7, 8, 9]]
    assert batch.step([5], [6])[0] == [6, 7, 8, 9]


def test_drafts_end_with_the_context() -> None:
    text = LOOP * 12
    batch = Batch(proposer(context=CONTEXT), text)
    assert [len(batch.step([LOOP[i % 5]])[0]) for i in range(4)] == [2, 1, 0, 0]


def test_a_request_is_known_again_in_another_row() -> None:
    drafter = proposer()
    batch = Batch(drafter, [*LOOP, 1], [3, 4, 3])
    batch.step([5], [4])
    known = [row.seq for row in drafter._rows if row is not None]
    batch.texts = batch.texts[::-1]  # rows were swapped
    assert batch.step([3], [6]) == [[4, 3, 4, 3], [7, 8, 9, 1]]
    assert [row.seq for row in drafter._rows if row is not None] == known[::-1]
    batch.texts = batch.texts[1:]  # the first has ended, and the last took its row
    assert batch.step([7]) == [[8, 9, 1, 5]]
    assert [row.seq for row in drafter._rows if row is not None] == [known[0]]
    assert list(drafter._drafter._states) == [known[0]]


def test_nothing_of_one_request_is_drafted_for_another() -> None:
    drafter = proposer()
    Batch(drafter, [*LOOP]).step([1])
    batch = Batch(drafter, [2, 5])
    assert batch.step([6]) == [[]]
    assert drafter._drafter.sources() == set()


@pytest.mark.parametrize("length", [1, 3])
def test_no_draft_is_longer_than_vllm_takes(length: int) -> None:
    batch = Batch(proposer(length), LOOP * 3)
    assert len(batch.step([5])[0]) == length


def test_the_recorded_interface_is_the_installed_ones() -> None:
    utils = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer", reason="vLLM is not installed")
    assert "user_class(vllm_config)" in inspect.getsource(utils)
