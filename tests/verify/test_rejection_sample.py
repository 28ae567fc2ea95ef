"""`rejection_sample`: by exact enumeration the emitted tokens have the target's distribution, and its example runs."""

from __future__ import annotations

import doctest
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.verify import rejection, rejection_sample

VOCAB = 3
Model = Callable[[Sequence[int]], Tensor]  # prefix -> (V,) float64


def table(seed: int, zeros: bool) -> Model:
    """A model that is a table of distributions, some with tokens that never come."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(4**4, VOCAB, generator=generator, dtype=torch.float64) ** 3
    if zeros:
        rows[::2, seed % VOCAB] = 0.0

    def model(prefix: Sequence[int]) -> Tensor:
        row = rows[sum((token + 1) * 4**i for i, token in enumerate(prefix))]
        return row / row.sum()

    return model


def texts(target: Model, draft: Model, length: int, sample: Callable[..., list[int]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of the emitted tokens, carried on by the target to length + 1.

    The function is constant between the borders that p and the rule give, so each interval counts once, by its length.
    """
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for chain in itertools.product(range(VOCAB), repeat=length):
        p = torch.stack([target(chain[:i]) for i in range(length + 1)])
        q = torch.stack([draft(chain[:i]) for i in range(length)])
        tokens = torch.tensor(chain)
        drawn = float(q.gather(1, tokens[:, None]).prod())
        if drawn:
            rule = rejection.acceptance(p, q, tokens)
            borders = sorted({0.0, *torch.cat([p, rule.next]).cumsum(1).clamp(max=1.0).flatten().tolist()})
            for coins, weight in _coins(rule.accept.tolist()):
                for low, high in itertools.pairwise(borders):
                    if high - low > 1e-15:
                        emitted = sample(p, q, tokens, torch.tensor(coins, dtype=torch.float64), (low + high) / 2)
                        _carry_on(found, target, tuple(emitted), drawn * weight * (high - low), length + 1)
    return found


def _coins(accept: Sequence[float]) -> list[tuple[list[float], float]]:
    """One coin of each kind at every position, inside the interval that succeeds or fails, and the probability of it."""
    sides = [[side for side in ((chance / 2, chance), ((1 + chance) / 2, 1 - chance)) if side[1] > 0] for chance in accept]
    out = []
    for choice in itertools.product(*sides):
        weight = 1.0
        for _, share in choice:
            weight *= share
        out.append(([coin for coin, _ in choice], weight))
    return out


def _carry_on(found: dict[tuple[int, ...], float], target: Model, text: tuple[int, ...], weight: float, length: int) -> None:
    if len(text) == length:
        found[text] += weight
        return
    for token, chance in enumerate(target(text).tolist()):
        _carry_on(found, target, (*text, token), weight * chance, length)


def error(length: int, seed: int, zeros: bool, sample: Callable[..., list[int]]) -> float:
    target, draft = table(seed, zeros), table(seed + 1, zeros)
    expected: dict[tuple[int, ...], float] = defaultdict(float)
    _carry_on(expected, target, (), 1.0, length + 1)
    found = texts(target, draft, length, sample)
    return max(abs(found[text] - expected[text]) for text in {*found, *expected})


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_the_tokens_have_the_target_s_distribution(length: int, zeros: bool) -> None:
    for seed in range(3):
        assert error(length, seed, zeros, rejection_sample) < 1e-12


def wrong_bonus(p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: float) -> list[int]:
    """Draws the recovered token from p instead of (p - q)+."""
    emitted = rejection_sample(p, q, tokens, coins, last)
    row = p[len(emitted) - 1].cumsum(0)
    return [*emitted[:-1], int(torch.searchsorted(row, last))]


def greedy_coins(p: Tensor, q: Tensor, tokens: Tensor, coins: Tensor, last: float) -> list[int]:
    """Accepts whatever the target would write at all."""
    return rejection_sample(p, q, tokens, coins * 0, last)


@pytest.mark.parametrize("wrong", [wrong_bonus, greedy_coins])
def test_wrong_variants_are_found(wrong: Callable[..., list[int]]) -> None:
    assert error(2, 0, False, wrong) > 1e-3


def test_no_draft_is_plain_sampling() -> None:
    p, empty = torch.tensor([[0.25, 0.5, 0.25]]), torch.empty(0)
    for last, token in ((0.1, 0), (0.3, 1), (0.7, 1), (0.8, 2)):
        assert rejection_sample(p, empty.reshape(0, 3), empty.long(), empty, last) == [token]


def test_the_example_of_the_docstring_runs() -> None:
    parsed = doctest.DocTestFinder().find(rejection_sample, globs={"rejection_sample": rejection_sample, "torch": torch})
    (example,) = parsed
    assert len(example.examples) >= 5
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_example_of_the_docs_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "rejection_sample" in block)
    names: dict[str, Tensor] = {}
    exec(code, names)
    assert torch.allclose(names["shares"], names["p"][0], atol=0.02)
