"""The statistics of an audit: chi-square tests of sampled tokens, and the temperature that they were sampled at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ChiSquare", "Temperature", "estimate_temperature", "goodness_of_fit", "homogeneity"]

_FEWEST = 5.0  # expected counts of a cell; smaller cells are pooled
_STEPS = 50


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic and its degrees of freedom. Sums of independent ones are one again."""

    statistic: float = 0.0
    df: int = 0

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(self.statistic + other.statistic, self.df + other.df)

    @property
    def p_value(self) -> float:
        """The probability of a statistic at least this large where the distributions are equal."""
        if self.df == 0:
            return 1.0
        half = torch.tensor([self.df / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def goodness_of_fit(samples: Sequence[str], logprobs: Mapping[str, float]) -> ChiSquare:
    """Samples against the distribution whose most probable values these are; all others are one cell."""
    counts, total = Counter(samples), len(samples)
    cells = [(counts[value], math.exp(logprob) * total) for value, logprob in logprobs.items()]
    rest = (total - sum(seen for seen, _ in cells), max(total - sum(expected for _, expected in cells), 0.0))
    kept = [cell for cell in cells if cell[1] >= _FEWEST]
    pooled = [cell for cell in cells if cell[1] < _FEWEST] + [rest]
    kept.append((sum(seen for seen, _ in pooled), sum(expected for _, expected in pooled)))
    if kept[-1][1] < _FEWEST and len(kept) > 1:  # too small alone: with the smallest of the others
        smallest = min(range(len(kept) - 1), key=lambda i: kept[i][1])
        seen, expected = kept.pop()
        kept[smallest] = (kept[smallest][0] + seen, kept[smallest][1] + expected)
    return ChiSquare(sum((seen - expected) ** 2 / expected for seen, expected in kept), len(kept) - 1)


def homogeneity(a: Sequence[str], b: Sequence[str]) -> ChiSquare:
    """Whether two samples come from one distribution. Rare values are pooled."""
    counts_a, counts_b = Counter(a), Counter(b)
    total = len(a) + len(b)
    if not a or not b:
        return ChiSquare()
    smaller = min(len(a), len(b)) / total
    common = [value for value, count in (counts_a + counts_b).items() if count * smaller >= _FEWEST]
    columns = [(counts_a[value], counts_b[value]) for value in common]
    rare = (len(a) - sum(x for x, _ in columns), len(b) - sum(y for _, y in columns))
    if sum(rare) * smaller >= _FEWEST:
        columns.append(rare)
    elif columns and sum(rare):
        columns[-1] = (columns[-1][0] + rare[0], columns[-1][1] + rare[1])
    statistic = 0.0
    for x, y in columns:
        for seen, size in ((x, len(a)), (y, len(b))):
            expected = (x + y) * size / total
            statistic += (seen - expected) ** 2 / expected
    return ChiSquare(statistic, max(len(columns) - 1, 0))


@dataclass(frozen=True, slots=True)
class Temperature:
    """The temperature that samples look like, its standard error, and how many standard errors 1 is away."""

    value: float
    error: float
    deviation: float

    @property
    def p_value(self) -> float:
        """The probability of a deviation at least this large at temperature 1."""
        return math.erfc(abs(self.deviation) / math.sqrt(2))


def estimate_temperature(groups: Sequence[tuple[Sequence[str], Mapping[str, float]]]) -> Temperature | None:
    """Maximum likelihood over prompts: of each its samples, and the log probabilities of the most probable values at 1.

    At another temperature the probabilities are p**(1/T). Samples outside the most probable values are left out, which leaves
    the others' distribution as it is.
    """
    kept = [
        ([logprobs[value] for value in samples if value in logprobs], list(logprobs.values())) for samples, logprobs in groups
    ]
    inverse, (score, information) = 1.0, _score(kept, 1.0)
    if information <= 0:
        return None
    deviation = score / math.sqrt(information)
    for _ in range(_STEPS):
        score, information = _score(kept, inverse)
        step = max(-0.5 * inverse, min(score / max(information, 1e-9), 0.5 * inverse))
        inverse += step
        if abs(step) < 1e-9:
            break
    return Temperature(1 / inverse, inverse**-2 / math.sqrt(max(_score(kept, inverse)[1], 1e-9)), deviation)


def _score(groups: Sequence[tuple[Sequence[float], Sequence[float]]], inverse: float) -> tuple[float, float]:
    """The derivative of the log likelihood by the inverse temperature, and its variance."""
    score = information = 0.0
    for samples, logprobs in groups:
        weights = [math.exp(inverse * (value - max(logprobs))) for value in logprobs]
        mean = sum(w * value for w, value in zip(weights, logprobs, strict=True)) / sum(weights)
        variance = sum(w * (value - mean) ** 2 for w, value in zip(weights, logprobs, strict=True)) / sum(weights)
        score += sum(samples) - len(samples) * mean
        information += len(samples) * variance
    return score, information
