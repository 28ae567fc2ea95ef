"""Every family on the GPU against Transformers in float32. In Triton's interpreter prompts and texts are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.model import load_decoder
from tests.support.families import CASES, PROMPT, assert_agreement, assert_greedy, build_reference, expected, greedy_text

INTERPRETED = True
ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    reference = build_reference(name, tmp_path)
    runner = CudaRunner(load_decoder(tmp_path), 40, 16, "cuda" if ON_GPU else "cpu", CudaOptions(graphs=False))
    assert_agreement(runner, reference, PROMPT if ON_GPU else 5, bits=ON_GPU)  # numpy sums products of other sizes otherwise
    if ON_GPU:
        text = greedy_text(runner, name)
        assert_greedy(expected(reference, text), text)
