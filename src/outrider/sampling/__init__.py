"""From logits to tokens: parameters, noise, the target's distribution and its choice."""

from outrider.sampling.choice import CORRUPTED, Ranked, choose, draw, rank
from outrider.sampling.distribution import Logprob, Row, logprobs_of, probs_of, process, rows_of
from outrider.sampling.grammar import Grammars
from outrider.sampling.guide import Guide
from outrider.sampling.noise import Key, Stream, uniform
from outrider.sampling.params import SamplingParams
from outrider.sampling.reasoning import Markers, Reasoning
from outrider.sampling.reasoning_guide import ReasoningGuide
from outrider.sampling.structured import Structured

__all__ = [
    "CORRUPTED",
    "Grammars",
    "Guide",
    "Key",
    "Logprob",
    "Markers",
    "Ranked",
    "Reasoning",
    "ReasoningGuide",
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
