"""The draft temperature: the estimate it rests on, what it learns, and that it changes nothing at temperature 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core import Scores, Verdict
from outrider.draft.draft_temperature import TEMPERATURES, DraftLogits, DraftTemperature, hits, likelihood
from outrider.sampling import Row, SamplingParams, choose, rank

VOCAB = 50


def matching(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that two argmaxes with common noise agree (Daliri et al.)."""
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)))


def laws(seed: int, sharper: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of a target and of a draft that knows it roughly."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(VOCAB, generator=generator)
    draft = logits + 0.7 * torch.randn(VOCAB, generator=generator)
    return torch.log_softmax(sharper * logits.double(), -1).numpy(), torch.log_softmax(draft.double(), -1).numpy()


def row(temperature: float, position: int = 0) -> Row:
    return Row(SamplingParams(temperature=temperature), 7, 0, position, 0, (), frozenset())


def taught(draft_temperature: DraftTemperature, temperature: float, sharper: float, positions: int = 900, depth: int = 0) -> None:
    """Rounds in which the first `depth` guesses were right, all with the same pair of laws."""
    for position in range(positions):
        logp, logq = laws(position, sharper)
        drafted = DraftLogits(torch.from_numpy(logq).float() * (temperature or 1.0), row(temperature, position))
        logits = torch.from_numpy(logp).float()[None].repeat(depth + 1, 1) * temperature
        verdict = Verdict(list(range(depth)), list(range(depth + 1)))
        draft_temperature.learn(
            drafted.row.params, {tuple(range(d)): drafted for d in range(depth + 1)}.get, verdict, Scores(logits, [0]), 0
        )


def test_the_estimate_is_the_chance_of_matching() -> None:
    """Averaged over positions, against the closed form."""
    estimated, exact = [], []
    for seed in range(300):
        logp, logq = laws(seed)
        estimated.append(hits(logq, logp)[TEMPERATURES.index(1.0)])
        exact.append(matching(np.exp(logp), np.exp(logq)))
    assert np.mean(estimated) == pytest.approx(np.mean(exact), abs=0.015)


def test_tokens_the_draft_left_out_count_against_every_temperature() -> None:
    """Over many positions no temperature is right more often than the tokens at hand are the choice."""
    right, inside = [], []
    for seed in range(200):
        logp, logq = laws(seed)
        kept = np.argsort(-logq)[:5]
        right.append(hits(logq[kept], logp[kept]))
        inside.append(np.exp(logp[kept]).sum())
    assert np.mean(inside) < 0.8
    assert np.mean(right, 0).max() < np.mean(inside)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_estimates_are_of_what_is_served(temperature: float) -> None:
    """The choice's rank and chance under real noise, averaged over positions, against both estimates."""
    right, chances, estimated = [], [], []
    for position in range(400):
        logp, logq = laws(position)
        at = [row(1.0, position)]
        choice = choose(torch.from_numpy(logp).float()[None], at)[0]
        ranked = rank(torch.from_numpy(logq).float()[None], at, VOCAB, [temperature])
        right.append(ranked.tokens[0, 0] == choice)
        chances.append(max(np.log(ranked.chances[0][ranked.tokens[0] == choice][0]), -7.0))
        index = TEMPERATURES.index(temperature)
        estimated.append((hits(logq, logp)[index], likelihood(logq, logp)[index]))
    assert np.mean(right) == pytest.approx(np.mean(estimated, 0)[0], abs=0.04)
    assert np.mean(chances) == pytest.approx(np.mean(estimated, 0)[1], abs=0.1)


@pytest.mark.parametrize(("sharper", "lower"), [(2.0, True), (1.0, False), (0.7, False)])
def test_it_finds_how_much_sharper_the_target_is(sharper: float, lower: bool) -> None:
    draft_temperature = DraftTemperature()
    assert draft_temperature.temperature(SamplingParams(temperature=0.8)) == 1.0
    taught(draft_temperature, 0.8, sharper)
    found = draft_temperature.temperature(SamplingParams(temperature=0.8))
    assert (found < 0.75) if lower else (found >= 0.8)
    assert draft_temperature.temperature(SamplingParams(temperature=1.0)) == 1.0, "classes learn apart"
    exact = {t: np.mean([_at(seed, sharper, t) for seed in range(300)]) for t in TEMPERATURES}
    assert exact[found] >= max(exact.values()) - 0.015


def _at(seed: int, sharper: float, temperature: float) -> float:
    logp, logq = laws(seed, sharper)
    q = np.exp(logq / temperature)
    return matching(np.exp(logp), q / q.sum())


def test_the_same_past_gives_the_same_temperature() -> None:
    found = []
    for _ in range(2):
        draft_temperature = DraftTemperature()
        taught(draft_temperature, 1.0, 1.7)
        found.append(draft_temperature.temperature(SamplingParams(temperature=1.0)))
    assert found[0] == found[1] != 1.0


def test_logits_are_read_before_they_are_written_over() -> None:
    """A runner's buffers belong to the next round, and positions wait to be looked at together."""
    kept, reused = DraftTemperature(), DraftTemperature()
    taught(kept, 1.0, 2.0)
    p, q = torch.zeros(1, VOCAB), torch.zeros(VOCAB)
    for position in range(900):
        logp, logq = laws(position, 2.0)
        p[0], q[:] = torch.from_numpy(logp), torch.from_numpy(logq)
        drafted = DraftLogits(q, row(1.0, position))
        reused.learn(drafted.row.params, {(): drafted}.get, Verdict([], [0]), Scores(p, [0]), 0)
        p.zero_(), q.zero_()
    (first,), (second,) = kept._records.values(), reused._records.values()
    assert first.right.tolist() == second.right.tolist()


def test_what_brings_nothing_is_left_alone() -> None:
    """Where the draft's law is the target's, every temperature but 1 loses, and nothing moves."""
    draft_temperature = DraftTemperature()
    for position in range(900):
        logp, _ = laws(position)
        drafted = DraftLogits(torch.from_numpy(logp).float(), row(1.0, position))
        draft_temperature.learn(
            drafted.row.params, {(): drafted}.get, Verdict([], [0]), Scores(torch.from_numpy(logp).float()[None], [0]), 0
        )
    assert draft_temperature.temperature(SamplingParams(temperature=1.0)) == 1.0


def test_depths_learn_apart_where_asked() -> None:
    apart, together = DraftTemperature(by_depth=True), DraftTemperature()
    taught(apart, 1.0, 2.0, 60, depth=1)
    taught(together, 1.0, 2.0, 60, depth=1)
    assert sorted(apart._records) == [(1.0, 0), (1.0, 1)]
    assert sorted(together._records) == [(1.0, 0)]


def test_nothing_changes_at_temperature_0() -> None:
    draft_temperature = DraftTemperature()
    taught(draft_temperature, 0.0, 2.0)
    assert draft_temperature.temperature(SamplingParams(temperature=0.0)) == 1.0
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    plain, sharp = (rank(logits, [row(0.0)] * 3, 4, t) for t in (None, [0.4] * 3))
    assert (plain.tokens == sharp.tokens).all()
    assert (plain.chances == sharp.chances).all()


def test_sharpened_guesses_keep_the_targets_noise() -> None:
    """Dividing log q leaves the noise alone: the limit is the most probable token, and 1 changes nothing."""
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row(1.0, position) for position in range(40)]
    plain = rank(logits, rows, 1)
    assert (rank(logits, rows, 1, [1.0] * 40).tokens == plain.tokens).all()
    assert (rank(logits, rows, 1, [1e-7] * 40).tokens[:, 0] == logits.argmax(-1).numpy()).all()
    assert (plain.tokens[:, 0] != logits.argmax(-1).numpy()).any()
    assert plain.tokens[:, 0].tolist() == choose(logits, rows)


def test_a_winner_beyond_the_most_probable_tokens_is_found() -> None:
    """Over a flat law of many tokens the choice is mostly outside the ones looked at."""
    logits = 0.01 * torch.randn(30, 5000, generator=torch.Generator().manual_seed(0))
    rows = [row(1.0, position) for position in range(30)]
    assert rank(logits, rows, 1).tokens[:, 0].tolist() == choose(logits, rows)
    two = rank(logits, rows, 2).tokens
    assert (two[:, 0] != two[:, 1]).all()
