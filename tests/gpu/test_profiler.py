"""The profiler on a GPU: every forward is timed, a draft model's chain too, and the tokens stay as they are."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.profiler import Profiler, decode_rounds, profiling

PROMPT = "import json\nfrom pathlib import Path\n\n\ndef load_config(path: Path) -> dict:\n    "


class Counting(Profiler):
    """Counts what was put on the stream in each round."""

    def around(self, round_):  # type: ignore[no-untyped-def]
        rounds = len(self.rounds)
        result = super().around(round_)
        if len(self.rounds) > rounds:
            counts.append(len(self._events))
        return result


counts: list[int] = []


@pytest.mark.parametrize(
    "method", ["none", "suffix:8", "draft_model:3", "eagle:4", "eagle:12:beam=2:branch=3:depth=3", "medusa:8"]
)
def test_forwards_on_the_device_are_timed_and_change_no_token(method: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True)
    expected = LLM(speculation="none", device="cuda", max_num_seqs=8).generate(PROMPT, params)[0].outputs[0].token_ids
    llm = LLM(speculation=method, device="cuda", max_num_seqs=8, prefix_cache=False)
    llm.generate(PROMPT, params)  # captures graphs
    with profiling(llm, alone=True) as profiler:
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == expected
    rounds = decode_rounds(profiler.rounds)
    assert rounds
    share = sum(r.alone for r in rounds) / sum(r.wall for r in rounds)
    assert 0.0 < share < 1.1  # a launch behind this round counts for it and runs in the next
    print(f"{method}: efficiency {share:.3f}")


def test_a_draft_models_chain_is_among_them() -> None:
    llm = LLM(speculation="draft_model:3:adaptive=false", device="cuda", max_num_seqs=8, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    llm.generate(PROMPT, params)
    counts.clear()
    profile = Counting()
    llm.engine.listen(profile)
    llm.engine.profile(profile)
    llm.generate(PROMPT, params)
    drafting = [n for n, r in zip(counts, profile.rounds, strict=True) if r.nodes]
    assert drafting
    assert min(drafting[:-1]) >= 2  # the chain and the target; the last round launches nothing behind it
