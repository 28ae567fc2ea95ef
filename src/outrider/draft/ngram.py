"""Prompt lookup: the text so far predicts its own continuation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core import Batch, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.draft.calibration import Calibration, verified_nodes
from outrider.draft.context import DraftContext
from outrider.draft.options import option
from outrider.errors import InvalidParameter

__all__ = ["NGramDrafter", "NGramOptions"]

_FIRST, _LATER = 0.7, 0.9  # chances of a copy's first token and of each further one, before anything was seen


@dataclass(frozen=True, slots=True)
class NGramOptions:
    """Lengths of the suffixes that are looked up."""

    ngram_min: int = option(2, "shortest suffix looked up", 1, 32)
    ngram_max: int = option(4, "longest suffix looked up", 1, 32)

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_min <= self.ngram_max <= 32:
            shown = f"{self.ngram_min} and {self.ngram_max}"
            raise InvalidParameter("ngram_min", f"need 1 <= ngram_min <= ngram_max <= 32, got {shown}")


class _Match(NamedTuple):
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

    def lookup(self, recent: Seq[int]) -> _Match | None:
        """The latest earlier occurrence of the longest matching suffix."""
        for table, n in zip(reversed(self.after), reversed(self.by_n), strict=True):
            if n <= len(recent):
                position = table.get(tuple(recent[len(recent) - n :]))
                if position is not None:
                    return _Match(position, n)
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

    Options = NGramOptions
    needs = Needs(follows=True)

    def __init__(self, options: NGramOptions = NGramOptions()) -> None:
        self._lengths = range(options.ngram_min, options.ngram_max + 1)
        self._indexes: dict[Sequence, _Index] = {}
        self._last: dict[Sequence, _Last] = {}
        self._calibration = Calibration()

    @classmethod
    def build(cls, context: DraftContext) -> NGramDrafter:
        return cls(context.options(NGramOptions))

    def begin(self, seq: Sequence) -> None:
        self._indexes[seq] = _Index([{} for _ in self._lengths], by_n=self._lengths)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        self._last.clear()
        none = Tree([], [], [])
        guesses = [self._draft(seq, n) if n else none for seq, n in zip(batch.sequences, plan.lengths, strict=True)]
        return Drafts(guesses)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:
        """Count which tokens of the latest copies became text, whoever's draft was verified."""
        for seq, last in self._last.items():
            chain = range(-1, len(last.tokens) - 1)
            for node, true in verified_nodes(last.tokens, chain, seq.tokens[last.base :]):
                self._calibration.record((seq.request.params.greedy, last.matched, node == 0), true)
        self._last.clear()

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)
        self._last.pop(seq, None)

    def follow(self, seq: Sequence, path: Seq[int], nodes: int) -> Tree:
        match = self._find(seq, path)
        return Tree([], [], []) if match is None else self._copied(seq, path, match, nodes)

    def _draft(self, seq: Sequence, length: int) -> Tree:
        """A draft, remembered until it is known what came of it."""
        match = self._find(seq, ())
        if match is None:
            return Tree([], [], [])
        guess = self._copied(seq, (), match, length)
        self._last[seq] = _Last(len(seq.tokens), guess.tokens, match.matched)
        return guess

    def _find(self, seq: Sequence, path: Seq[int]) -> _Match | None:
        index = self._indexes[seq]
        index.extend(seq.tokens)
        return index.lookup([*seq.tokens[-self._lengths[-1] :], *path])

    def _copied(self, seq: Sequence, path: Seq[int], match: _Match, length: int) -> Tree:
        copy: list[int] = [*seq.tokens[match.position : match.position + length], *path][:length]
        known = len(seq.tokens) - match.position + len(path)
        while len(copy) < length:
            copy.append(copy[len(copy) - known])
        return Tree(copy, list(range(-1, length - 1)), self._survival(seq, match.matched, length))

    def _survival(self, seq: Sequence, matched: int, length: int) -> list[float]:
        greedy = seq.request.params.greedy
        chance = self._calibration.chance((greedy, matched, True), _FIRST)
        later = self._calibration.chance((greedy, matched, False), _LATER)
        return [chance * later**i for i in range(length)]
