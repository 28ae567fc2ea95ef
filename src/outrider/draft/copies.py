"""Drafts that go on with a copy behind an edit: in the tokens of an earlier text, or in the lines of a diff."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core import Sequence, Tree
from outrider.draft.automaton import Match, SuffixAutomaton
from outrider.draft.edits import Copied, CopyCursor
from outrider.draft.lookup import AcceptanceRates, verified_nodes
from outrider.draft.patches import PatchCursor, Words
from outrider.draft.quoted import QuotedCursor
from outrider.draft.retokenized import cut_after
from outrider.text import Tokenizer

__all__ = ["Copying", "Speller"]

_FIRST_MATCH = 4  # tokens that must agree before a source is followed
_OTHER_MATCH = 16  # before another one is, while the place in the first is only lost


class Speller:
    """What turns tokens into lines and lines into tokens, and how often copies were accepted: one for all sequences."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.spellings: Mapping[int, tuple[bool, bytes]] = {} if tokenizer is None else tokenizer.spellings()
        self.rates = AcceptanceRates()


class _Guess(NamedTuple):
    """The latest copy, until it is known what became text."""

    size: int  # of the text that it followed
    tokens: list[int]
    kind: tuple[Hashable, ...]


@dataclass(slots=True)
class Copying:
    """What one sequence copies from. Its chances are learnt by how the copy was found."""

    seq: Sequence
    speller: Speller
    _cursor: CopyCursor = field(init=False)
    _patch: PatchCursor | None = field(init=False)
    _quoted: QuotedCursor | None = field(init=False)
    _source: SuffixAutomaton | None = None  # where it differs from the sequence's text
    _last: _Guess | None = None

    def __post_init__(self) -> None:
        self._cursor = CopyCursor(self.seq.prompt_len)
        spellings = self.speller.spellings
        self._patch = PatchCursor(self.seq.request.prompt_ids, spellings) if spellings else None
        self._quoted = QuotedCursor(self.seq.request.prompt_ids, spellings) if spellings else None

    def expect(self, source: SuffixAutomaton) -> None:
        """The output is likely to begin as this text does."""
        self._cursor.jump(source.tokens, 0, 0, self.seq.tokens)

    def guess(self, matches: Seq[tuple[SuffixAutomaton, Match]], nodes: int) -> Tree:
        """The next tokens of the copy; the first match is that of the sequence's text in itself."""
        text = matches[0][0].tokens
        self._learn(text)
        copied = self._copied(text, matches, nodes)
        if copied is None or not copied.tokens:
            return Tree([], [], [])
        if self._source is not None and self._source.owner is not None:
            self._source.readers.add(self.seq.request.owner)
        kind = (self.seq.request.params.greedy, copied.kind)
        first = self.speller.rates.rate((*kind, True), copied.first)
        later = self.speller.rates.rate((*kind, False), copied.later)
        self._last = _Guess(len(text), copied.tokens, kind)
        return Tree.chain(copied.tokens, [first * later**i for i in range(len(copied.tokens))])

    def _learn(self, text: Seq[int]) -> None:
        """Which tokens of the latest copy became text, whether or not it was drafted."""
        if self._last is None:
            return
        size, tokens, kind = self._last
        for node, is_accepted in verified_nodes(tokens, range(-1, len(tokens) - 1), text[size:]):
            self.speller.rates.record((*kind, node == 0), is_accepted)
        self._last = None

    def _copied(self, text: list[int], matches: Seq[tuple[SuffixAutomaton, Match]], nodes: int) -> Copied | None:
        cursor = self._cursor
        cursor.advance(text)
        words = self._words(text, nodes)
        if words is not None:
            assert self.speller.tokenizer is not None
            tokens = cut_after(self.speller.tokenizer, text, words.text)[:nodes]
            return Copied(tokens, ("patch", words.kind), 0.6, 0.9)
        copied = cursor.guess(text, nodes)
        if not cursor.follows and self._finds_another(text, matches):
            copied = cursor.guess(text, nodes)
        return copied

    def _words(self, text: list[int], nodes: int) -> Words | None:
        """What comes next in a diff or in a JSON string, after reading the new tokens."""
        if self._patch is None or self._quoted is None:
            return None
        self._quoted.advance(text)
        if self._patch.advance(text):
            self._source = None
            self._cursor.jump(text, self._patch.search_start, 0, text)
        return self._patch.guess(nodes) or self._quoted.guess(nodes)

    def _finds_another(self, text: list[int], matches: Seq[tuple[SuffixAutomaton, Match]]) -> bool:
        """Follow the text in which the longest suffix occurred, where it is long enough."""
        source, match = max(matches, key=lambda one: one[1].length)
        if match.length < (_FIRST_MATCH if self._cursor.source is None else _OTHER_MATCH):
            return False
        following = source.after(match)
        if not following:
            return False
        self._source = source
        self._cursor.jump(source.tokens, max(following).latest, match.length, text)
        return True
