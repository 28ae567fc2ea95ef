"""A suffix array: every substring of a finished text, and what followed it, in eight bytes a token.

It answers what a SuffixAutomaton answers, for texts that are too long for one and do not grow. Both arrays may be mapped from a
file (`draft/corpus.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.draft.automaton import Following, Match, latest_after

__all__ = ["SEPARATOR", "CorpusReader", "SuffixArray", "suffix_order"]

Ids = NDArray[np.int32]
SEPARATOR = -1  # stands before each document and after the last: no match runs across documents
_SAMPLE = 4096  # places of a frequent substring that are looked at
_FEW = 8  # places that are counted without numpy
_WIDTH = 32  # bits of an end of an interval


def suffix_order(tokens: Ids, reach: int, step: Callable[[], object] = lambda: None) -> Ids:
    """The places of a text, ordered by the `reach` tokens from each on.

    Prefix doubling (Manber and Myers 1990): an order by h tokens gives the order by 2h. Places that are alone in their group are
    left out of further rounds (Larsson and Sadakane 2007). `step` is called after each round.
    """
    size = len(tokens)
    rank = np.zeros(size + 2 * reach, np.int64)  # 0 where the text has ended
    rank[:size] = tokens.astype(np.int64) - (int(tokens.min(initial=0)) - 1)
    keys = (rank[:size] << _WIDTH) | rank[1 : size + 1]
    order = np.argsort(keys).astype(np.int32)
    slots = np.arange(size)  # of the order, that are not settled
    keys, h = keys[order], 2
    while True:
        is_first = np.concatenate(([True], keys[1:] != keys[:-1]))
        firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
        rank[order[slots]] = slots[firsts] + 1
        is_alone = is_first & np.concatenate((is_first[1:], [True]))
        slots = slots[~is_alone]
        step()
        if h >= reach or not len(slots):
            return order
        places = order[slots]
        keys = (rank[places] << _WIDTH) | rank[places + h]
        by_key = np.argsort(keys)
        order[slots] = places[by_key]
        keys, h = keys[by_key], 2 * h


class SuffixArray:
    """All substrings of a text of up to `reach` tokens, each with what followed it.

    The places of a substring are an interval of the order, and a match's state is that interval. A substring of very many
    places is judged by a sample of them that is spread evenly over what followed.
    """

    def __init__(self, tokens: Ids, order: Ids, reach: int) -> None:
        self.owner: str | None = None  # the operator's: it may draft for everybody
        self.readers: set[str | None] = set()
        self.reach = reach
        self._ids, self._order_ids = tokens, order
        self._tokens: Any = tokens.data  # elements are read as plain integers
        self._order: Any = order.data

    @classmethod
    def of(cls, tokens: Iterable[int], reach: int) -> SuffixArray:
        """The suffix array of one small text."""
        ids = np.array([SEPARATOR, *tokens, SEPARATOR], np.int32)
        return cls(ids, suffix_order(ids, reach), reach)

    @property
    def size(self) -> int:
        return len(self._tokens)

    def reader(self) -> CorpusReader:
        """The same text for one sequence, whose searches go on from one to the next."""
        return CorpusReader(self)

    def find(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of the tokens that occurs in this text."""
        recent = [*tokens][1 - self.reach :]
        return self.longest(recent, len(recent))

    def longest(self, recent: list[int], most: int) -> Match:
        """The longest suffix that occurs, of at most so many tokens: that length is tried first, then 1, 2, 4, ..."""
        if most and self._occurs(recent, most):
            return self._match(recent[len(recent) - most :])
        known, absent, length = 0, most, 1
        while length < absent:  # `known` tokens occur, and `absent` ones do not
            if self._occurs(recent, length):
                known, length = length, 2 * length
            else:
                absent = length
        while absent - known > 1:
            length = (known + absent) // 2
            if self._occurs(recent, length):
                known = length
            else:
                absent = length
        return self._match(recent[len(recent) - known :])

    def after(self, match: Match) -> list[Following]:
        """What followed the substring, in no order. Ends of documents are left out."""
        first, end = _interval(match.state)
        if end - first > _FEW:
            return self._counted(first, end, match.length)
        following: dict[int, Following] = {}
        for place in self._order[first:end].tolist():
            at = place + match.length
            if at < self.size and (token := self._tokens[at]) >= 0:
                times, latest, _ = following.get(token, Following(0, -1, token))
                following[token] = Following(times + 1, max(latest, at), token)
        return list(following.values())

    def step(self, match: Match, token: int) -> Match:
        """The substring with a token that followed it, without its head where that makes it too long."""
        first, end = _interval(match.state)
        if match.length + 1 >= self.reach:
            return self._match([*self._read(self._order[first] + 1, match.length - 1), token])
        if end - first == 1:
            return Match(match.state, match.length + 1)
        return Match(self._narrowed(first, end, match.length, token), match.length + 1)

    def shorter(self, match: Match) -> Match:
        """The longest suffix of the substring that occurs at more places."""
        first, end = _interval(match.state)
        part = self._read(self._order[first], match.length)
        best, low, high = self._match([]), 1, match.length  # shorter suffixes occur at no fewer places
        while low < high:
            length = (low + high) // 2
            other = self._match(part[len(part) - length :])
            start, stop = _interval(other.state)
            if stop - start > end - first:
                best, low = other, length + 1
            else:
                high = length
        return best

    def latest(self, tokens: Iterable[int]) -> tuple[int, int]:
        """Of the longest suffix of the tokens that occurs and goes on: where what followed it last stands, and its length."""
        return latest_after(self, tokens)

    def read(self, place: int, count: int) -> list[int]:
        """At most so many tokens from a place on, of one document."""
        tokens = self._read(place, count)
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _read(self, place: int, count: int) -> list[int]:
        return self._tokens[place : place + count].tolist()  # type: ignore[no-any-return]

    def _occurs(self, recent: list[int], length: int) -> bool:
        part = recent[len(recent) - length :]
        slot = bisect_left(self._order, part, key=self._reading(length))
        return slot < self.size and self._read(self._order[slot], length) == part

    def _match(self, part: list[int]) -> Match:
        """A substring that occurs."""
        if not part:
            return Match(_state(0, self.size), 0)
        first = bisect_left(self._order, part, key=self._reading(len(part)))
        end = bisect_right(self._order, part, first, key=self._reading(len(part)))
        return Match(_state(first, end), len(part))

    def _reading(self, length: int) -> Callable[[int], list[int]]:
        tokens = self._tokens
        return lambda place: tokens[place : place + length].tolist()

    def _narrowed(self, first: int, end: int, length: int, token: int) -> int:
        """The part of an interval in which a token comes next."""
        tokens, size = self._tokens, self.size

        def following(place: int) -> int:
            at = place + length
            return tokens[at] if at < size else SEPARATOR - 1

        start = bisect_left(self._order, token, first, end, key=following)
        return _state(start, bisect_right(self._order, token, start, end, key=following))

    def _counted(self, first: int, end: int, length: int) -> list[Following]:
        """The places of an interval by what comes next, by which they are ordered."""
        stride = -(-(end - first) // _SAMPLE)
        at = self._order_ids[first + (end - first) % stride : end : stride] + length
        tokens = self._ids[np.minimum(at, self.size - 1)]  # the last is a separator
        starts = np.flatnonzero(np.concatenate(([True], tokens[1:] != tokens[:-1])))
        times = np.diff(np.append(starts, len(tokens))) * stride
        latest = np.maximum.reduceat(at, starts)
        columns = zip(times.tolist(), latest.tolist(), tokens[starts].tolist(), strict=True)
        return [Following(*one) for one in columns if one[2] >= 0]


class CorpusReader:
    """A suffix array as one sequence searches it: a longest match grows by no more than the tokens that are new."""

    def __init__(self, text: SuffixArray) -> None:
        self.owner, self.readers = text.owner, text.readers
        self.after, self.step, self.shorter, self.read = text.after, text.step, text.shorter, text.read
        self._text = text
        self._recent: list[int] = []
        self._length = 0  # of the longest suffix of them that occurs

    def find(self, tokens: Iterable[int]) -> Match:
        recent = [*tokens][1 - self._text.reach :]
        match = self._text.longest(recent, min(self._length + self._new(recent), len(recent)))
        self._recent, self._length = recent, match.length
        return match

    def latest(self, tokens: Iterable[int]) -> tuple[int, int]:
        return latest_after(self, tokens)

    def _new(self, recent: Seq[int]) -> int:
        """How many of the tokens come after those of the last search, so far as both are seen."""
        before = self._recent
        for new in range(len(recent)):
            known = len(recent) - new
            if known <= len(before) and before[len(before) - known :] == recent[:known]:
                return new
        return len(recent)


def _state(first: int, end: int) -> int:
    return first << _WIDTH | end


def _interval(state: int) -> tuple[int, int]:
    return state >> _WIDTH, state & (2**_WIDTH - 1)
