"""From logits to tokens: parameters, noise, the target's distribution and its choice."""

from outrider.sampling.choice import CORRUPTED, Ranked, choose, draw, rank
from outrider.sampling.distribution import Row, law, process, rows_of
from outrider.sampling.grammar import Grammars, Guide, Structured
from outrider.sampling.logprobs import Logprob, logprobs_of
from outrider.sampling.noise import Key, Stream, uniform
from outrider.sampling.params import SamplingParams

__all__ = [
    "CORRUPTED",
    "Grammars",
    "Guide",
    "Key",
    "Logprob",
    "Ranked",
    "Row",
    "SamplingParams",
    "Stream",
    "Structured",
    "choose",
    "draw",
    "law",
    "logprobs_of",
    "process",
    "rank",
    "rows_of",
    "uniform",
]
