"""Calibration: time forwards and proposals on a live engine before it serves requests."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from outrider.control import Calibration, Controller
from outrider.core import Request
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams

__all__ = ["calibrate"]

_PROMPT = 64  # tokens
_STRIDE = 7919  # between tokens that are made up


def calibrate(engine: Engine, batches: Sequence[int], seconds: float = math.inf) -> None:
    """Run synthetic requests in batches of each size until `seconds` have passed. Their tokens are discarded."""
    deadline = time.monotonic() + seconds
    for batch in batches:
        if time.monotonic() >= deadline or engine.has_work or not _run(engine, batch, deadline):
            break
    engine.reset_counts()


def _run(engine: Engine, batch: int, deadline: float) -> bool:
    """Calibrate with one batch size. Returns False if the context is too short for it."""
    policy, vocab = engine.policy, engine.runner.decoder.spec.vocab
    assert isinstance(policy, Controller)
    made_up = [i * _STRIDE % vocab for i in range(_PROMPT)] if batch == 1 else []  # unlike each other, as experts may tell
    calibration = Calibration(policy.arms, policy.costs, made_up, deadline)
    length = min(_PROMPT, engine.context - calibration.rounds)
    if length <= 0:
        return False
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=calibration.rounds, ignore_eos=True)
    prompts = [tuple((i * _STRIDE + b) % vocab for i in range(length)) for b in range(batch)]
    requests = [
        Request(f"calibration-{b}", prompt, params, 0, frozenset(), calibration.rounds, tenant="calibration", memory="")
        for b, prompt in enumerate(prompts)
    ]
    processors = [engine.submit(request, "calibration") for request in requests]
    engine.policy = calibration
    try:
        while engine.has_work and not calibration.done:
            engine.round()
    finally:
        engine.policy = policy
        for processor in processors:
            engine.abort(processor)
    return True
