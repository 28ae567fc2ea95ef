"""Counter-based noise: a pure function of (seed, stream, sample, position, token).

Nothing here has state, so any token of any output can be drawn again. The bits are equal on every device: the native core
and the CUDA kernels compute those of `bits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Key",
    "Stream",
    "bits",
    "gumbel",
    "keys_of",
    "prefix_of",
    "token_words",
    "token_words_at",
    "uniform",
    "words_of",
]

Words = npt.NDArray[np.uint32]

_MASK = 0xFFFFFFFF
# Two rounds of a low-bias 32-bit finaliser, after a multiplication by the key. The finaliser's last xor-shift is left out:
# it would only change the low bits, which two rounds have mixed already.
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B))


class Stream:
    """Independent streams of one request. Rejection sampling needs three beside the coupled one."""

    CHOICE = 0  # shared by target and drafter on purpose: it couples their draws
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


class Key(NamedTuple):
    """What a row of noise depends on, beside the token."""

    seed: int
    position: int
    sample: int = 0
    stream: int = Stream.CHOICE
    round: int = 0


def keys_of(keys: Sequence[Key]) -> Words:
    """Two well-mixed 32-bit words per key, (rows, 2)."""
    return np.array([words_of(key) for key in keys], dtype=np.uint32).reshape(len(keys), 2)


def bits(keys: Words, vocab: int) -> Words:
    """32 random bits for every (key, token), (rows, vocab)."""
    x = np.bitwise_xor(keys[:, :1], token_words(vocab))
    x *= keys[:, 1:] | np.uint32(1)
    scratch = np.empty_like(x)
    for shift, multiplier in _MIXING:
        np.right_shift(x, np.uint32(shift), out=scratch)
        x ^= scratch
        x *= np.uint32(multiplier)
    return x


def gumbel(words: Words) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log1p(-v)) with v = min((bits + 1/2) 2^-32, 1 - 2^-24)."""
    v = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -np.log(-np.log1p(-v))


def uniform(key: Key) -> float:
    """One number in (0, 1), for acceptance coins."""
    return (words_of(key)[0] + 0.5) * 2.0**-32


@cache
def token_words(vocab: int) -> Words:
    """A fixed hash word per token id, so that keys need not decorrelate neighbouring ids.

    Every step is one-to-one. Two tokens with equal words would always share their noise, and the less probable of them
    could never be chosen.
    """
    words = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(0x85EBCA6B)
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        words ^= words >> np.uint32(shift)
        words *= np.uint32(multiplier)
    words ^= words >> np.uint32(15)
    words.setflags(write=False)
    return words


@cache
def token_words_at(vocab: int) -> int:
    """The address of `token_words`, which are never freed."""
    return int(token_words(vocab).ctypes.data)


_M64 = 0xFFFFFFFFFFFFFFFF


def words_of(key: Key) -> tuple[int, int]:
    """A key as two well-mixed 32-bit words."""
    h = _mix64(_prefix(key.seed, key.sample, key.stream, key.round) ^ (key.position & _M64))
    return h & _MASK, h >> 32


def prefix_of(seed: int, sample: int) -> int:
    """The 64 bits that `words_of` mixes with a position to key the stream shared by target and drafter."""
    return _prefix(seed, sample, Stream.CHOICE, 0)


@lru_cache(maxsize=4096)
def _prefix(*parts: int) -> int:
    h = 0x2545F4914F6CDD1D
    for part in parts:
        h = _mix64((h ^ (part & _M64)) + 0x9E3779B97F4A7C15)
    return h


def _mix64(x: int) -> int:
    x &= _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)
