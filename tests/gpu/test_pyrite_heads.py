"""Pyrite's heads and early exit on a GPU: the same tokens greedy and sampled, alone and together."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.model.bundled import bundled_model

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import json\n", "for line in open(path):\n"]
HEAT = (0.0, 0.8, 0.8, 0.0)
METHODS = [
    "eagle:4:adaptive=false",
    "eagle:24:beam=8:branch=8:depth=6:adaptive=false",
    "early_exit:3:exit_layer=9:adaptive=false",
    *(["dflash:24:adaptive=false"] if (bundled_model() / "dflash").exists() else []),
]


def outputs(method: str) -> list[list[int]]:
    """What four prompts give together, then alone."""
    params = [SamplingParams(temperature=heat, seed=i, max_tokens=96, ignore_eos=True) for i, heat in enumerate(HEAT)]
    llm = LLM(speculation=method, device="cuda", max_num_seqs=4)
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate(prompt, p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    made = [out.outputs[0] for out in (*together, *alone)]
    if method != "none":
        assert all(out.speculation["fallback_reason"] is None and out.speculation["accepted"] > 0 for out in made), method
    return [list(out.token_ids) for out in made]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return outputs("none")


@pytest.mark.parametrize("method", METHODS)
def test_heads_change_no_token(plain: list[list[int]], method: str) -> None:
    assert outputs(method) == plain
