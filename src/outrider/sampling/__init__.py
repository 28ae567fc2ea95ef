"""From logits to tokens: parameters, noise, the target's distribution and its choice."""

from outrider.sampling.choice import CORRUPTED, Ranked, choose, draw, rank
from outrider.sampling.distribution import Logprob, Row, logprobs_of, probs_of, process, rows_of
from outrider.sampling.grammar import Grammars
from outrider.sampling.guide import Guide
from outrider.sampling.noise import Key, Stream, uniform
from outrider.sampling.params import SamplingParams
from outrider.sampling.structured import Structured

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
    "logprobs_of",
    "probs_of",
    "process",
    "rank",
    "rows_of",
    "uniform",
]
