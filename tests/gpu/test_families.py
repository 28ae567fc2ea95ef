"""Every family on the GPU against Transformers in float32. In Triton's interpreter prompts and texts are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidParameter
from outrider.model import load_decoder, read_spec
from outrider.model.backends import CUDA
from tests.support.families import CASES, PROMPT, assert_agreement, assert_greedy, build_reference, expected, greedy_text

INTERPRETED = True
ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from outrider.model.cuda_runner import CudaOptions, CudaRunner

    reference, device = build_reference(name, tmp_path), "cuda" if ON_GPU else "cpu"
    if CUDA.missing(read_spec(tmp_path)):
        with pytest.raises(InvalidParameter, match="an NVIDIA GPU has no"):
            CudaRunner(load_decoder(tmp_path), 40, 16, device)
        return
    runner = CudaRunner(load_decoder(tmp_path), 40, 16, device, CudaOptions(graphs=False))
    assert_agreement(runner, reference, PROMPT if ON_GPU else 5, bits=ON_GPU)  # numpy sums products of other sizes otherwise
    if ON_GPU:
        text = greedy_text(runner, name)
        assert_greedy(expected(reference, text), text)
