"""The tests of an audit pass sound engines and catch faults, at the size an audit has, over many seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.bench.audit.cases import STANDARD, build_cases
from outrider.bench.audit.sampled import SIGNIFICANCE, SampledPrompt, _continuing, sampling_result
from outrider.bench.audit.statistics import ChiSquare, estimate_temperature, goodness_of_fit, homogeneity
from tests.support.chi_square import p_value

SEEDS = 100


def model(rng: np.random.Generator, size: int = 400) -> np.ndarray:
    """A distribution as language models have them: a few likely tokens and a long tail."""
    logits = np.sort(rng.normal(0, 1, size) * 2)[::-1]
    return np.asarray(np.exp(logits) / np.exp(logits).sum())


def drawn(rng: np.random.Generator, temperature: float) -> list[SampledPrompt]:
    """Four prompts; the speculative side samples at another temperature."""
    prompts = []
    for _ in range(STANDARD.sampled_prompts):
        probs = model(rng)
        warm = probs ** (1 / temperature) / (probs ** (1 / temperature)).sum()
        rows = [[(str(i),) for i in rng.choice(len(p), STANDARD.samples, p=p)] for p in (probs, warm)]
        reference = {str(i): math.log(probs[i]) for i in range(20)}
        prompts.append(SampledPrompt(reference, *rows))
    return prompts


def p_values(temperature: float) -> list[dict[str, float]]:
    out = []
    for seed in range(SEEDS):
        result = sampling_result(drawn(np.random.default_rng(seed), temperature))
        out.append({name: test["p_value"] for name, test in result.items() if isinstance(test, dict)})
    return out


def test_sound_engines_pass() -> None:
    values = p_values(1.0)
    assert all(value > SIGNIFICANCE for row in values for value in row.values())
    for name in values[0]:  # p-values of a right hypothesis are uniform: not all of them close to 1 either
        assert 0.4 < np.mean([row[name] for row in values]) < 0.6, name


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_another_temperature_is_caught_every_time(temperature: float) -> None:
    rows = p_values(temperature)
    assert all(row["first_tokens_speculative"] < SIGNIFICANCE for row in rows)
    assert all(row["first_tokens_plain"] > SIGNIFICANCE for row in rows)
    assert sum(row["temperature_speculative"] < SIGNIFICANCE for row in rows) > 0.8 * SEEDS


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_the_temperature_is_estimated(temperature: float) -> None:
    rng = np.random.default_rng(0)
    prompts = [(row.speculative, row.reference) for _ in range(10) for row in drawn(rng, temperature)]
    estimate = estimate_temperature([([token for (token,) in rows], reference) for rows, reference in prompts])
    assert estimate is not None
    assert abs(estimate.value - temperature) < 4 * estimate.error < 0.1


def test_a_greedy_side_is_no_sample() -> None:
    assert estimate_temperature([([], {"a": -0.1, "b": -3.0})]) is None
    cold = estimate_temperature([(["a"] * 500, {"a": math.log(0.6), "b": math.log(0.4)})])
    assert cold is not None
    assert cold.p_value < SIGNIFICANCE


def test_goodness_of_fit_is_pearson_s() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    counts = [60, 25, 10, 5]
    samples = [str(i) for i, count in enumerate(counts) for _ in range(count)]
    test = goodness_of_fit(samples, {str(i): math.log(p) for i, p in enumerate(probs)})
    assert test.p_value == pytest.approx(p_value(counts, probs), rel=1e-6)
    assert goodness_of_fit(["x"] * 50, {"a": math.log(0.9), "b": math.log(0.1)}).p_value < 1e-12


def test_texts_that_end_at_once_are_left_out_of_both() -> None:
    table = {"a": math.log(0.6), "<|end|>": math.log(0.2), "": math.log(0.1), "b": math.log(0.1)}
    assert _continuing(table) == {"a": pytest.approx(math.log(6 / 7)), "b": pytest.approx(math.log(1 / 7))}


def test_two_samples() -> None:
    a, b = ["x"] * 80 + ["y"] * 20, ["x"] * 50 + ["y"] * 50
    expected = sum((seen - e) ** 2 / e for seen, e in ((80, 65), (20, 35), (50, 65), (50, 35)))
    assert homogeneity(a, b) == ChiSquare(pytest.approx(expected), 1)
    assert homogeneity(a, a).statistic == 0.0
    assert homogeneity([], b) == ChiSquare()
    assert homogeneity([str(i) for i in range(30)], [str(i) for i in range(30, 60)]).df == 0  # all rare: no test


def test_the_standard_size_catches_one_wrong_token_in_a_thousand() -> None:
    tokens = sum(case.request.max_tokens for case in build_cases(["prompt"], STANDARD, 0) if case.greedy)
    assert 1 - 0.999**tokens > 0.9998
