"""Pearson's chi-square test of counts against a distribution."""

import numpy as np
import torch

UNLIKELY = 1e-6  # counts of the right distribution fall below this once in a million seeds; the seeds are fixed


def p_value(counts, probs):
    """Probability of counts at least this far from the expected ones. Cells that expect fewer than five are pooled."""
    counts, probs = np.asarray(counts, dtype=float).ravel(), np.asarray(probs, dtype=float).ravel()
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
