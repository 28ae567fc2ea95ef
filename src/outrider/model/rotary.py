"""Rotary position embedding as data: which dimensions turn, at which frequencies, and which table a request uses.

A head's dimensions are held so that dimension i turns with i + head_dim / 2. Checkpoints that pair dimensions in another way, or
turn only some of them, are reordered when they are loaded (`Rope.order`): the scores of queries and keys do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ROPE_KINDS", "Rope", "RotaryVariant"]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RotaryVariant(NamedTuple):
    """A table for requests of at most `limit` tokens."""

    limit: int
    frequencies: list[float]  # of the pairs that turn; the other pairs stay as they are
    scale: float  # of cosines and sines


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary settings. Kinds that depend on the length of the text have several variants; the others have one.

    Transformers changes the table in the middle of a text that grows past a limit. Here a request keeps the table that fits its
    maximum length, so its tokens do not depend on how the text was computed.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None  # leading dimensions of a head that turn; None: all
    interleaved: bool = False  # the checkpoint pairs dimension 2i with 2i + 1
    context: int = 2**24  # positions in all
    original_context: int = 8192  # positions before stretching
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # None: what the method's paper says
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_growth: tuple[float, int] | None = None  # (beta, n): queries grow by 1 + beta * log(1 + floor(position / n))

    @property
    def has_variants(self) -> bool:
        """Whether the table depends on the maximum length of a request."""
        return self.kind in ("dynamic", "longrope") and self.context > self.original_context

    def width(self, head_dim: int) -> int:
        """Dimensions that turn."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def order(self, head_dim: int) -> list[int] | None:
        """The stored dimension of each dimension of a head; None where they are in order."""
        width = self.width(head_dim)
        turned = list(range(width))
        first, second = (turned[::2], turned[1::2]) if self.interleaved else (turned[: width // 2], turned[width // 2 :])
        middle = width + (head_dim - width) // 2
        order = [*first, *range(width, middle), *second, *range(middle, head_dim)]
        return None if order == list(range(head_dim)) else order

    def variants(self, head_dim: int) -> tuple[RotaryVariant, ...]:
        """The tables, by the longest request that uses each."""
        width = self.width(head_dim)
        plain = _frequencies(self.theta, width)
        if self.kind == "longrope":
            short = [f / by for f, by in zip(plain, self.short_factor, strict=False)]
            long = [f / by for f, by in zip(plain, self.long_factor, strict=False)]
            scale = self._longrope_scale()
            variants = (RotaryVariant(self.original_context, short, scale), RotaryVariant(self.context, long, scale))
            return variants if self.context > self.original_context else variants[:1]
        if self.kind == "dynamic":
            return tuple(RotaryVariant(n, _frequencies(self._dynamic_theta(n, width), width), 1.0) for n in self._lengths())
        if self.kind == "linear":
            plain = [f / self.factor for f in plain]
        elif self.kind == "llama3":
            plain = [self._llama3(f) for f in plain]
        elif self.kind == "yarn":
            plain = self._yarn(plain, width)
        return (RotaryVariant(self.context, plain, self._yarn_scale() if self.kind == "yarn" else 1.0),)

    def _lengths(self) -> list[int]:
        """Limits of the dynamic tables: the original context, doubled until it holds all positions."""
        lengths = [min(self.original_context, self.context)]
        while lengths[-1] < self.context:
            lengths.append(min(2 * lengths[-1], self.context))
        return lengths

    def _dynamic_theta(self, length: int, width: int) -> float:
        stretch = self.factor * length / self.original_context - (self.factor - 1)
        return self.theta * math.pow(max(stretch, 1.0), width / (width - 2))

    def _llama3(self, frequency: float) -> float:
        """Stretch long wavelengths by the factor, keep short ones, blend in between."""
        turns = self.original_context * frequency / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        return (1 - blend) * frequency / self.factor + blend * frequency

    def _yarn(self, plain: Sequence[float], width: int) -> list[float]:
        """YaRN (arXiv 2309.00071), equations 17 to 20: a ramp over the pairs from many turns in the original context to few."""

        def pair_with(turns: float) -> float:
            return width * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low or 0.001
        kept = (1 - min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain)))
        return [f / self.factor * (1 - keep) + f * keep for f, keep in zip(plain, kept, strict=True)]

    def _yarn_scale(self) -> float:
        def growth(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return growth(self.mscale) / growth(self.mscale_all_dim)
        return growth(1.0)

    def _longrope_scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


def _frequencies(theta: float, width: int) -> list[float]:
    return [theta ** (-2.0 * i / width) for i in range(width // 2)]
