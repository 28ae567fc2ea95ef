"""The same request decoded plainly and speculatively, side by side."""

from __future__ import annotations

import secrets
import statistics
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.llm import LLM
from outrider.engine.outputs import CompletionOutput
from outrider.sampling import SamplingParams

__all__ = ["Comparison", "compare_runs"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs of one request, and the speeds they came at."""

    plain: CompletionOutput
    fast: CompletionOutput
    plain_tok_s: float
    fast_tok_s: float
    identical: bool

    @property
    def speedup(self) -> float:
        return self.fast_tok_s / self.plain_tok_s if self.plain_tok_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "speedup": self.speedup,
            "plain": {"tok_s": self.plain_tok_s, "token_ids": self.plain.token_ids},
            "speculative": {"tok_s": self.fast_tok_s, "token_ids": self.fast.token_ids} | self.fast.speculation,
            "text": self.fast.text,
            "seed": self.fast.seed,
            "finish_reason": self.fast.finish_reason,
        }


def compare_runs(llm: LLM, prompt: str, params: SamplingParams, repeats: int) -> Comparison:
    """Run both ways `repeats` times, interleaved after one warm-up; speeds are medians of decoding."""
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    llm.generate(prompt, replace(params, max_tokens=min(4, params.max_tokens or 4), min_tokens=0))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    outputs: dict[bool, list[CompletionOutput]] = {False: [], True: []}
    for _ in range(repeats):
        for speculate in (False, True):
            output = llm.generate(prompt, params, speculation=speculate)[0].outputs[0]
            outputs[speculate].append(output)
            speeds[speculate].append(output.timings.decode_tokens_per_s)
    every = [*outputs[False], *outputs[True]]
    identical = all(o.token_ids == every[0].token_ids and o.text == every[0].text for o in every)
    plain, fast = (statistics.median(speeds[speculate]) for speculate in (False, True))
    return Comparison(outputs[False][0], outputs[True][0], plain, fast, identical)
