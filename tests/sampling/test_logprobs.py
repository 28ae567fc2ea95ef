"""Log probabilities and ranks against a naive sort of the whole row."""

import math

import numpy as np
import pytest
import torch

from outrider.sampling import logprobs_of


def reference(logits, token, top):
    """{id: (log probability, rank)}, most probable first; the chosen token last if it is not among them."""
    x = [float(v) for v in logits]
    whole = max(x) + math.log(math.fsum(math.exp(v - max(x)) for v in x))
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    wanted = ranked[:top] + ([] if token in ranked[:top] else [token])
    return {i: (x[i] - whole, ranked.index(i) + 1) for i in wanted}


ROWS = {
    "normal": lambda rng, v: rng.normal(size=v) * 3,
    "ties": lambda rng, v: rng.integers(-2, 3, size=v),
    "flat": lambda _, v: np.zeros(v),
    "nearly flat": lambda rng, v: rng.normal(size=v) * 1e-7,
}


@pytest.mark.grid
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("vocab", [1, 4, 90, 1500])
@pytest.mark.parametrize("top", [0, 1, 3, 20, 100])
def test_logprobs_equal_the_reference(shape, vocab, top):
    rng = np.random.default_rng(vocab + top)
    logits = torch.from_numpy(ROWS[shape](rng, vocab).astype(np.float32))
    for token in {0, vocab - 1, vocab // 2, int(logits.argmax())}:
        got = logprobs_of(logits, token, top)
        want = reference(logits, token, top)
        assert list(got) == list(want)
        assert [entry.rank for entry in got.values()] == [rank for _, rank in want.values()]
        assert [entry.logprob for entry in got.values()] == pytest.approx([value for value, _ in want.values()], abs=1e-5)


def test_removed_tokens_report_minus_infinity():
    logits = torch.tensor([0.0, float("-inf"), 0.0])
    got = logprobs_of(logits, 1, 1)
    assert list(got) == [0, 1]
    assert got[0].logprob == pytest.approx(-math.log(2))
    assert (got[1].logprob, got[1].rank) == (float("-inf"), 3)
