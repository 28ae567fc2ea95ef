"""`mtp` behind an LLM: where its module comes from, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import InvalidParameter
from outrider.heads import save_mtp
from outrider.model import LoadOptions, load_decoder
from outrider.train.shapes import MtpShape
from tests.heads.test_mtp import checkpoint
from tests.support.families import build_reference
from tests.support.heads import toy_head

PROMPT = [i * 7 % 90 for i in range(9)]


def texts(model: Path, speculation: Any) -> tuple[list[list[int]], int]:
    """Greedy and sampled tokens, and how many tokens were drafted."""
    params = [SamplingParams(temperature=temperature, seed=5, max_tokens=24) for temperature in (0.0, 0.8)]
    with LLM(str(model), dtype="float32", speculation=speculation) as llm:
        outputs = [llm.generate([PROMPT], one)[0].outputs[0] for one in params]
    assert [output.speculation["fallback_reason"] for output in outputs] == [None, None]
    return [output.token_ids for output in outputs], sum(output.speculation["drafted"] for output in outputs)


@pytest.mark.parametrize("layout", ["appended", "under mtp"])
def test_a_targets_own_module_drafts(layout: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, layout)
    plain, _ = texts(tmp_path, "none")
    made, drafted = texts(tmp_path, "mtp:3:adaptive=false")
    assert made == plain
    assert drafted > 0


def test_a_module_in_a_folder_beside_the_target_drafts(tmp_path: Path) -> None:
    build_reference("qwen3-moe", tmp_path)
    with pytest.raises(InvalidParameter, match="brings none in mtp/"):
        LLM(str(tmp_path), speculation="mtp")
    target = load_decoder(tmp_path, LoadOptions(dtype="float32"))
    save_mtp(toy_head(target, MtpShape().config(target.spec)), tmp_path / "mtp")
    plain, _ = texts(tmp_path, "none")
    for method in ("mtp:3:adaptive=false", "mtp:6:beam=2:branch=2:adaptive=false", "auto"):
        made, drafted = texts(tmp_path, method)
        assert made == plain
        assert drafted > 0 or method == "auto"
