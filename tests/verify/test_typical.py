"""`typical`: the criterion, and that it is lossy."""

import math

import pytest
import torch

from outrider.verify import typical
from tests.support.enumeration import PARAMS, continued, dirichlet, drafts, joint, processed


def rows(*laws):
    return torch.tensor(laws, dtype=torch.float64)


def test_a_token_of_more_than_eps_is_always_kept():
    p = rows([0.91, 0.09], [0.9, 0.1], [0.5, 0.5])
    assert typical.count(p, torch.tensor([0, 1]), delta=1e9) == 2
    assert typical.count(p, torch.tensor([1, 1]), delta=1e9) == 0  # 0.09 is not more than 0.09


def test_an_even_law_lowers_the_bar():
    vocab = 50
    p = torch.full((2, vocab), 1 / vocab, dtype=torch.float64)
    bar = 0.3 / vocab  # exp(-H) = 1 / vocab
    assert typical.count(p, torch.tensor([3])) == 1
    assert typical.count(p, torch.tensor([3]), delta=0.99) == 1
    assert typical.count(p, torch.tensor([3]), delta=1.01) == 0
    p[0, 0] = 0.9 * bar
    p[0, 1] += 1 / vocab - 0.9 * bar
    assert typical.count(p, torch.tensor([0])) == 0


def test_counting_stops_at_the_first_refusal():
    p = rows([0.9, 0.1], [1.0, 0.0], [0.2, 0.8], [0.5, 0.5])
    assert typical.count(p, torch.tensor([1, 1, 1])) == 1
    assert typical.count(p, torch.tensor([1, 0, 1])) == 3
    assert typical.count(p[:1], torch.empty(0, dtype=torch.int64)) == 0


def test_the_threshold_is_min_of_eps_and_entropy():
    law = [0.6, 0.25, 0.1, 0.05]
    entropy = -sum(p * math.log(p) for p in law)
    for token, p in enumerate(law):
        for eps, delta in ((0.09, 0.3), (0.3, 0.3), (0.2, 0.9)):
            want = int(p > min(eps, delta * math.exp(-entropy)))
            assert typical.count(rows(law, law), torch.tensor([token]), eps, delta) == want


def test_it_changes_the_distribution():
    target, drafter = processed(dirichlet(3, seed=5), PARAMS["plain"]), dirichlet(3, seed=6)
    texts = {}
    for tokens, chance in drafts(drafter, 3, 2):
        p = torch.stack([target(tokens[:i]) for i in range(3)])
        accepted = typical.count(p, torch.tensor(tokens))
        for token in range(3):
            text = (*tokens[:accepted], token)
            texts[text] = texts.get(text, 0.0) + chance * float(p[accepted, token])
    error = abs(continued(texts, target, 3) - joint(target, 3)).max()
    assert error > 1e-3
    assert sum(texts.values()) == pytest.approx(1.0)
