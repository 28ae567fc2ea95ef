"""Prompt lookup: the text so far predicts its own continuation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Verdict
from outrider.draft.calibration import Calibration, came_true
from outrider.draft.protocol import Guess
from outrider.errors import InvalidParameter

__all__ = ["NGramDrafter"]

_FIRST, _LATER = 0.7, 0.9  # chances of a copy's first token and of each further one, before anything was seen


class _Found(NamedTuple):
    """Where a copy starts, and how many tokens before it agree with the text."""

    position: int
    matched: int


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    after: list[dict[tuple[int, ...], int]]  # per n: n-gram -> position of the token after it
    indexed: int = 0  # tokens whose preceding n-grams are in
    by_n: range = field(default_factory=lambda: range(0))

    def extend(self, tokens: list[int]) -> None:
        """Take in new tokens: O(longest - shortest) per token, whatever the context's length."""
        for position in range(max(self.indexed, 1), len(tokens)):
            for table, n in zip(self.after, self.by_n, strict=True):
                if n <= position:
                    table[tuple(tokens[position - n : position])] = position
        self.indexed = len(tokens)

    def lookup(self, recent: Seq[int]) -> _Found | None:
        """The latest earlier occurrence of the longest matching suffix."""
        for table, n in zip(reversed(self.after), reversed(self.by_n), strict=True):
            if n <= len(recent):
                position = table.get(tuple(recent[len(recent) - n :]))
                if position is not None:
                    return _Found(position, n)
        return None


class _Last(NamedTuple):
    """The latest draft of a sequence, kept until it is known what came of it."""

    base: int  # tokens of the text it followed
    tokens: list[int]
    matched: int


class NGramDrafter:
    """Copies what followed the last occurrence of the current suffix.

    What it does: finds the longest suffix of ngram_min to ngram_max tokens that occurred before
        in prompt or output and drafts the tokens that followed it; a copy that reaches the end of
        the text goes on into its own draft, so loops are drafted whole. Survival is estimated from
        how often copies after a match of that length came true.
    When it helps: editing, summarising, code: wherever the output repeats the input or itself.
    Cost: a few dictionary look-ups per token, independent of the context's length.
    Needs: nothing from the target.
    Reference: Saxena, Prompt Lookup Decoding, 2023.
    """

    needs = Needs(follows=True)

    def __init__(self, ngram_min: int = 2, ngram_max: int = 4) -> None:
        if not 1 <= ngram_min <= ngram_max <= 32:
            raise InvalidParameter("ngram_min", f"need 1 <= ngram_min <= ngram_max <= 32, got {ngram_min} and {ngram_max}")
        self._lengths = range(ngram_min, ngram_max + 1)
        self._indexes: dict[Sequence, _Index] = {}
        self._last: dict[Sequence, _Last] = {}
        self._calibration = Calibration()

    def begin(self, seq: Sequence) -> None:
        self._indexes[seq] = _Index([{} for _ in self._lengths], by_n=self._lengths)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self._last.clear()
        none = Guess([], [], [])
        guesses = [self._asked(seq, n) if n else none for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        return Drafts.chains([guess.tokens for guess in guesses], survival=[guess.survival for guess in guesses])

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Note which tokens of the latest copies came true; the text says so, whoever's draft was judged."""
        for seq, last in self._last.items():
            chain = range(-1, len(last.tokens) - 1)
            for node, true in came_true(last.tokens, chain, seq.tokens[last.base :]):
                self._calibration.record((seq.request.params.greedy, last.matched, node == 0), true)
        self._last.clear()

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)
        self._last.pop(seq, None)

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Guess:
        found = self._find(seq, path)
        return Guess([], [], []) if found is None else self._copied(seq, path, found, nodes)

    def _asked(self, seq: Sequence, length: int) -> Guess:
        """A draft, remembered until it is known what came of it."""
        found = self._find(seq, ())
        if found is None:
            return Guess([], [], [])
        guess = self._copied(seq, (), found, length)
        self._last[seq] = _Last(len(seq.tokens), guess.tokens, found.matched)
        return guess

    def _find(self, seq: Sequence, path: Seq[int]) -> _Found | None:
        index = self._indexes[seq]
        index.extend(seq.tokens)
        return index.lookup([*seq.tokens[-self._lengths[-1] :], *path])

    def _copied(self, seq: Sequence, path: Seq[int], found: _Found, length: int) -> Guess:
        copy: list[int] = [*seq.tokens[found.position : found.position + length], *path][:length]
        known = len(seq.tokens) - found.position + len(path)
        while len(copy) < length:
            copy.append(copy[len(copy) - known])
        return Guess(copy, list(range(-1, length - 1)), self._survival(seq, found.matched, length))

    def _survival(self, seq: Sequence, matched: int, length: int) -> list[float]:
        greedy = seq.request.params.greedy
        chance = self._calibration.chance((greedy, matched, True), _FIRST)
        later = self._calibration.chance((greedy, matched, False), _LATER)
        return [chance * later**i for i in range(length)]
