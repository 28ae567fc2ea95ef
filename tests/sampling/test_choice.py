"""The choice is exactly the dense argmax and follows the softmax distribution, row by row."""

import numpy as np
import pytest
import torch

from outrider.sampling import CORRUPTED, Key, Row, SamplingParams, choice, choose, draw, process, rank
from outrider.sampling.noise import bits, gumbel, keys_of
from tests.support.chi_square import UNLIKELY, p_value

INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True, params=["core", "numpy"])
def path(request, monkeypatch):
    """Every test runs with the native core and with numpy."""
    if request.param == "numpy":
        monkeypatch.setattr(choice, "native_core", lambda: None)
    elif choice.native_core() is None:
        pytest.skip("the native core is not in use here")
    return request.param


def dense(logits, keys):
    """The definition: argmax of processed logit + noise over the whole row, in float64."""
    noise = gumbel(bits(keys_of(keys), logits.shape[1]))
    return (logits.double().numpy() + noise).argmax(axis=1).tolist()


def _holes(logits):
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.98] = -INF
    logits[:, logits.shape[1] // 2] = 0.0
    return logits


def _dominant(logits):
    logits[:, logits.shape[1] // 3] += 15.0
    return logits


ROWS = {
    "normal": lambda logits: logits,
    "peaked": lambda logits: logits * 6,
    "flat": lambda logits: logits * 0,
    "nearly flat": lambda logits: logits * 1e-6,
    "ties": lambda logits: logits.round(),
    "mostly removed": _holes,
    "one dominant": _dominant,
    "large": lambda logits: logits * 0.5 + 3e5,
    "large negative": lambda logits: logits * 0.5 - 2e6,
    "wide": lambda logits: logits * 1e4,
    "huge": lambda logits: logits * 1e37,
}


@pytest.mark.grid
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("vocab", [1, 2, 37, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_is_the_dense_argmax(kind, vocab, dtype):
    rows = 400 if vocab < 100 else 60
    noise = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab))
    logits = ROWS[kind](noise).to(dtype)
    keys = [Key(seed=i, position=2 * i, sample=i % 2) for i in range(rows)]
    assert draw(logits, keys) == dense(logits, keys)


def test_draw_without_noise_takes_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-INF, -INF, -5.0, -5.0]])
    assert draw(logits, None) == [1, 0, 2]


def test_draw_of_no_rows():
    assert draw(torch.empty((0, 5)), []) == []
    assert draw(torch.empty((0, 5)), None) == []


BROKEN = {
    "nan": [0.0, NAN, 1.0],
    "all nan": [NAN, NAN, NAN],
    "nothing left": [-INF, -INF, -INF],
    "nan and inf": [INF, NAN, -INF],
    "infinite": [INF, 0.0, 1.0],
}


@pytest.mark.grid
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("places", [[0], [2], [4], [0, 1, 2, 3, 4], [1, 3], [0, 4]])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_rows_are_marked_and_leave_the_others_alone(kind, places, noisy):
    logits = torch.randn((5, 3), generator=torch.Generator().manual_seed(3))
    keys = [Key(8, i) for i in range(5)] if noisy else None
    want = draw(logits, keys)
    for place in places:
        logits[place] = torch.tensor(BROKEN[kind])
        want[place] = CORRUPTED
    assert draw(logits, keys) == want


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=5, top_p=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(presence_penalty=1.0, top_p=0.9),
]


@pytest.mark.parametrize("vocab", [20, 1000])
@pytest.mark.parametrize("params", FILTERS)
def test_nan_survives_every_filter(params, vocab):
    logits = torch.randn((1, vocab), generator=torch.Generator().manual_seed(0))
    logits[0, 11] = NAN
    assert choose(logits, [row_of(params)]) == [CORRUPTED]


@pytest.mark.parametrize("vocab", [20, 1000])
@pytest.mark.parametrize("params", FILTERS)
def test_a_row_without_tokens_survives_every_filter(params, vocab):
    assert choose(torch.full((1, vocab), -INF), [row_of(params)]) == [CORRUPTED]


def row_of(params, seed=1, position=4, sample=0, history=(3, 1, 2, 1)):
    return Row(params, seed, sample, position, 2, history, frozenset({0}))


@pytest.mark.parametrize("vocab", [5, 300])
def test_draw_follows_the_softmax_distribution(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * 2
    logits[1::4] = -INF
    keys = [Key(seed=s, position=s % 7) for s in range(30_000)]
    counts = np.zeros(vocab)
    for start in range(0, len(keys), 5000):
        part = keys[start : start + 5000]
        counts += np.bincount(draw(logits.expand(len(part), -1), part), minlength=vocab)
    assert p_value(counts, torch.softmax(logits.double(), 0).numpy()) > UNLIKELY


def test_pairs_of_positions_follow_the_product_distribution():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    drawn = draw(logits.expand(30_000, -1), [Key(seed=42, position=i) for i in range(30_000)])
    pairs = np.bincount(np.array(drawn[::2]) * 4 + np.array(drawn[1::2]), minlength=16)
    assert p_value(pairs, np.outer(logits.exp(), logits.exp())) > UNLIKELY


def test_a_dominant_token_of_a_huge_vocabulary_loses_as_often_as_it_should():
    vocab, rows, lead = 65_536, 1200, 12.0
    logits = torch.zeros((40, vocab))
    logits[:, 777] = lead
    others = (vocab - 1) * np.exp(-lead)
    chance = others / (1 + others)
    lost = 0
    for start in range(0, rows, 40):
        lost += sum(token != 777 for token in draw(logits, [Key(start + i, 6) for i in range(40)]))
    assert abs(lost - rows * chance) < 5 * np.sqrt(rows * chance * (1 - chance))


def test_nothing_beats_a_lead_of_27_nats():
    logits = torch.zeros((20, 100_000))
    logits[:, 99_999] = 27.0
    for start in range(0, 200, 20):
        assert set(draw(logits, [Key(start + i, 0) for i in range(20)])) == {99_999}


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.3, top_k=7, min_p=0.02),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0}, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, min_tokens=9),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=1e-30),
]


@pytest.mark.parametrize("vocab", [31, 1031])
def test_a_choice_does_not_depend_on_neighbouring_rows(vocab):
    rows = [row_of(MIXED[i % len(MIXED)], seed=i % 5, position=4 + i % 3, sample=i % 2) for i in range(60)]
    logits = torch.randn((len(rows), vocab), generator=torch.Generator().manual_seed(9)) * 3
    before = logits.clone()
    together = choose(logits, rows)
    assert torch.equal(logits, before)
    assert together == [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).tolist()
    assert choose(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("params", MIXED)
def test_the_choice_is_the_dense_argmax_of_the_processed_row(params):
    rows = [row_of(params, seed=i, position=4 + i) for i in range(50)]
    logits = torch.randn((50, 301), generator=torch.Generator().manual_seed(4)) * 3
    processed = torch.stack([process(raw, row) for raw, row in zip(logits, rows, strict=True)])
    keys = [Key(row.seed, row.position, row.sample) for row in rows]
    want = processed.argmax(1).tolist() if params.greedy else dense(processed, keys)
    assert choose(logits, rows) == want


def test_seed_position_and_sample_each_change_the_text():
    logits = torch.zeros((40, 1000))
    params = SamplingParams()

    def text(seed=1, sample=0, position=0):
        return choose(logits, [row_of(params, seed, position + i, sample) for i in range(40)])

    base = text()
    assert text() == base
    for change in ({"seed": 2}, {"sample": 1}, {"position": 100}):
        assert sum(a == b for a, b in zip(text(**change), base, strict=True)) < 5
    assert text(position=1)[:-1] == base[1:]


def test_a_temperature_too_small_for_float32_is_greedy():
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(0)) * 20
    best = int(logits.argmax())
    for temperature in (1e-5, 1e-6, 1e-30, 1e-50, 5e-324):
        assert choose(logits, [row_of(SamplingParams(temperature=temperature))]) == [best]


@pytest.mark.parametrize("vocab", [3, 17, 700])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.4])
def test_ranks_are_those_of_the_noisy_scores(vocab, temperature):
    """Compares with the definition: the largest of log q / draft temperature + noise, and their softmax."""
    logits = 3 * torch.randn((40, vocab), generator=torch.Generator().manual_seed(vocab))
    rows = [row_of(SamplingParams(temperature=temperature), position=i) for i in range(40)]
    divisor = temperature * 0.7 or 1.0
    scores = logits.double().numpy() / divisor
    if temperature:
        scores += gumbel(bits(keys_of([Key(row.seed, row.position, row.sample) for row in rows]), vocab))
    ranked = rank(logits, rows, 3, [0.7] * 40)
    order = np.argsort(-scores, axis=1)[:, :3]
    assert (ranked.tokens == order).mean() > 0.99, "ties of the last digit aside"
    weights = np.exp(scores - scores.max(1, keepdims=True))
    chances = np.take_along_axis(weights / weights.sum(1, keepdims=True), order, 1)
    np.testing.assert_allclose(ranked.chances, chances, rtol=0.02, atol=2e-3)


def test_a_row_without_tokens_has_no_ranks():
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(0))
    logits[1, 7] = NAN
    for temperature in (0.0, 1.0):
        tokens = rank(logits, [row_of(SamplingParams(temperature=temperature))] * 3, 2).tokens
        assert (tokens[1] == CORRUPTED).all()
        assert (tokens[[0, 2]] >= 0).all()


@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "ties", "mostly removed", "one dominant", "wide"])
@pytest.mark.parametrize("vocab", [5, 300, 3001])
def test_filters_keep_what_the_definition_keeps(kind, vocab):
    """Compares min_p, top_k and top_p of all strengths with `process` and the dense argmax of its result."""
    rng = np.random.default_rng(vocab)
    logits = ROWS[kind](torch.randn((120, vocab), generator=torch.Generator().manual_seed(vocab)))
    rows = []
    for i in range(120):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
            top_k=int(rng.choice([0, 1, 2, 20, 299, 5000])),
            top_p=float(rng.choice([1.0, 0.99, 0.9, 0.5, 0.05, 1e-6])),
            min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
        )
        rows.append(row_of(params, seed=i, position=3 * i))
    chosen = choose(logits, rows)
    for i, row in enumerate(rows):
        processed = process(logits[i], row)[None]
        want = processed.argmax().item() if row.params.greedy else dense(processed, [Key(row.seed, row.position, row.sample)])[0]
        assert chosen[i] == want, (i, row.params)
