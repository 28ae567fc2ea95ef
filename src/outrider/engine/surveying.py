"""Costs measured on a live engine before anybody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.control import Adaptive, Survey
from outrider.core import Request
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams

__all__ = ["survey_costs"]

_PROMPT = 64  # tokens


def survey_costs(engine: Engine, batches: Sequence[int]) -> None:
    """Time forwards and proposals of all sizes with made-up requests, whose tokens are thrown away."""
    policy, vocab = engine.policy, engine.runner.decoder.config.vocab
    assert isinstance(policy, Adaptive)
    for batch in batches:
        survey = Survey(policy.arms, policy.costs, forwards=batch == 1)
        length = min(_PROMPT, engine.context - survey.rounds)
        if length <= 0 or engine.has_work:
            return
        params = SamplingParams(temperature=0.8, seed=0, max_tokens=survey.rounds, ignore_eos=True)
        prompts = [tuple((i * 7919 + b) % vocab for i in range(length)) for b in range(batch)]
        writers = [
            engine.submit(Request(f"survey-{b}", prompt, params, 0, frozenset(), survey.rounds, tenant="survey"), "survey")
            for b, prompt in enumerate(prompts)
        ]
        engine.policy = survey
        try:
            while engine.has_work and not survey.done:
                engine.round()
        finally:
            engine.policy = policy
            for writer in writers:
                engine.abort(writer)
    engine.reset_counts()
