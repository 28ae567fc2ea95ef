"""Pearson's chi-square test of counts against a law."""

import numpy as np
import torch

UNLIKELY = 1e-6  # a correct law falls below this once in a million seeds; the seeds are fixed


def p_value(counts, law):
    """Chance of counts at least this far from the law. Cells that expect fewer than five are pooled."""
    counts, law = np.asarray(counts, dtype=float).ravel(), np.asarray(law, dtype=float).ravel()
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
