"""The generator: equal bits everywhere, uniform, independent along every part of its key, exact tails."""

import functools
import math

import numpy as np
import pytest
import torch

from outrider.sampling.noise import Key, Stream, bits, gumbel, keys_of, token_words, uniform
from tests.support.chi_square import UNLIKELY, p_value

COUNT = 40_000


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 151_936])
def test_bits_are_those_of_plain_integers(vocab):
    rows = 40 if vocab < 2000 else 3
    words = keys_of([Key(seed * 977 - 5, seed, seed % 3, seed % 4, seed % 5) for seed in range(rows)])
    words = np.concatenate([words, np.array([[0, 0], [2**32 - 1, 2**32 - 1], [0, 2**32 - 1]], dtype=np.uint32)])
    keys = torch.from_numpy(words.astype(np.int64))
    wanted = torch.from_numpy(token_words(vocab).astype(np.int64)) ^ keys[:, :1]
    wanted = (wanted * (keys[:, 1:] | 1)) & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        wanted = ((wanted ^ (wanted >> shift)) * multiplier) & 0xFFFFFFFF
    assert np.array_equal(bits(words, vocab).astype(np.int64), wanted.numpy())


def test_a_token_s_noise_does_not_depend_on_the_vocabulary_s_size():
    words = keys_of([Key(3, 14), Key(15, 92)])
    assert np.array_equal(bits(words, 5000)[:, :33], bits(words, 33))


def test_no_two_tokens_share_their_noise():
    row = bits(keys_of([Key(1, 2)]), 300_000)[0]
    assert len(np.unique(row)) == 300_000


PARTS = {  # the i-th key along each part of it
    "seed": lambda i: Key(i, 5),
    "position": lambda i: Key(5, i),
    "sample": lambda i: Key(5, 5, i),
    "round": lambda i: Key(5, 5, 0, Stream.COIN, i),
    "negative seed": lambda i: Key(-i, 1),
    "token": None,
}


@functools.cache
def stream(part):
    """One token's bits along a part of the key, or one key's bits along the tokens."""
    if part == "token":
        return bits(keys_of([Key(7, 7)]), COUNT)[0]
    return bits(keys_of([PARTS[part](i) for i in range(COUNT)]), 3)[:, 1]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shift", [0, 13, 26])
def test_bits_are_uniform_along_every_part_of_the_key(part, shift):
    cells = (stream(part) >> np.uint32(shift)) & np.uint32(63)
    assert p_value(np.bincount(cells, minlength=64), np.full(64, 1 / 64)) > UNLIKELY


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("lag", [1, 2, 256])
def test_neighbours_along_every_part_of_the_key_are_independent(part, lag):
    assert _independence(stream(part)[:-lag], stream(part)[lag:]) > UNLIKELY


def _independence(a, b):
    """p value of a joint table, finer towards the large Gumbel values that decide a choice."""
    edges = (np.array([1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2]) * 2.0**32).astype(np.uint32)
    widths = np.diff([0, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1])
    cells = np.searchsorted(edges, a, side="right") * len(widths) + np.searchsorted(edges, b, side="right")
    return p_value(np.bincount(cells, minlength=len(widths) ** 2), np.outer(widths, widths))


def test_streams_of_one_key_are_independent():
    streams = [Stream.CHOICE, Stream.DRAFT, Stream.COIN, Stream.RESIDUAL]
    assert len(set(streams)) == 4
    words = [bits(keys_of([Key(i, 9, 0, stream) for i in range(COUNT)]), 2)[:, 0] for stream in streams]
    for i, a in enumerate(words):
        for b in words[i + 1 :]:
            assert _independence(a, b) > UNLIKELY


def test_tokens_are_independent_over_keys():
    words = bits(keys_of([Key(i, 3) for i in range(COUNT)]), 130)
    for first, second in ((0, 1), (0, 2), (1, 3), (0, 64), (5, 128), (128, 129)):
        assert _independence(words[:, first], words[:, second]) > UNLIKELY


def test_gumbel_ends_and_direction():
    ends = gumbel(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert ends[0] == pytest.approx(22.874, abs=1e-3)
    assert ends[1] == pytest.approx(-2.812, abs=1e-3)
    ladder = gumbel(np.linspace(0, 2**32 - 1, 100_001).astype(np.uint32))
    assert np.isfinite(ladder).all()
    assert (np.diff(ladder) <= 0).all()


def test_gumbel_is_minus_log_minus_log1p():
    words = np.array([0, 1, 2**16, 2**31, 2**32 - 300], dtype=np.uint32)
    want = [-math.log(-math.log1p(-(int(w) + 0.5) / 2**32)) for w in words]
    assert gumbel(words) == pytest.approx(want, rel=1e-12)


def test_gumbel_has_its_mean_and_variance():
    noise = gumbel(bits(keys_of([Key(i, 0) for i in range(500)]), 2000)).ravel()
    deviation = math.pi / math.sqrt(6)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=5 * deviation / math.sqrt(noise.size))
    assert noise.std() == pytest.approx(deviation, rel=0.01)


def test_the_tail_has_its_mass():
    """Chances of 2^-15 to 2^-20 decide at a large vocabulary."""
    words = keys_of([Key(i, 0) for i in range(120)])
    observed = np.zeros(3)
    levels = 2.0 ** np.array([17, 14, 12])
    for row in words:
        drawn = bits(row[None], 200_000)
        observed += [(drawn < level).sum() for level in levels]
    expected = 120 * 200_000 * levels / 2.0**32
    assert (np.abs(observed - expected) < 5 * np.sqrt(expected)).all()


def test_coins_are_uniform_and_inside_the_open_interval():
    coins = np.array([uniform(Key(3, i, 0, Stream.COIN, 2)) for i in range(COUNT)])
    assert coins.min() > 0
    assert coins.max() < 1
    assert p_value(np.histogram(coins, bins=100, range=(0, 1))[0], np.full(100, 0.01)) > UNLIKELY
    assert abs(np.corrcoef(coins[:-1], coins[1:])[0, 1]) < 5 / math.sqrt(COUNT)


def test_coins_do_not_follow_the_residual_s_noise():
    coins = np.array([uniform(Key(3, i, 0, Stream.COIN, 2)) for i in range(COUNT)])
    for token in range(2):
        noise = gumbel(bits(keys_of([Key(3, i, 0, Stream.RESIDUAL, 2) for i in range(COUNT)]), 2)[:, token])
        assert abs(np.corrcoef(coins, noise)[0, 1]) < 5 / math.sqrt(COUNT)


def test_seeds_differ_by_sign_and_by_high_bits():
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]
    assert len({tuple(row) for row in keys_of([Key(seed, 0) for seed in seeds])}) == len(seeds)
