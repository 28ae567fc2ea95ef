"""From logits to tokens: parameters, noise, the target's distribution and its choice."""

from outrider.sampling.choice import CORRUPTED, Ranked, choose, draw, rank
from outrider.sampling.distribution import Row, law, process
from outrider.sampling.logprobs import Logprob, logprobs_of
from outrider.sampling.noise import Key, Stream, uniform
from outrider.sampling.params import SamplingParams

__all__ = [
    "CORRUPTED",
    "Key",
    "Logprob",
    "Ranked",
    "Row",
    "SamplingParams",
    "Stream",
    "choose",
    "draw",
    "law",
    "logprobs_of",
    "process",
    "rank",
    "uniform",
]
