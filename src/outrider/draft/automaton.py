"""A suffix automaton: every substring of a growing text, and what followed it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["Following", "Match", "Searched", "SuffixAutomaton", "latest_after", "until_separator"]


class Match(NamedTuple):
    """A substring of a text: the state that knows it, and its length."""

    state: int
    length: int


class Following(NamedTuple):
    """A token that followed a substring; compares by how often, then by how lately."""

    times: int
    latest: int
    token: int


def until_separator(tokens: list[int]) -> list[int]:
    """Tokens of one text: ids below 0 separate texts."""
    return next((tokens[:i] for i, token in enumerate(tokens) if token < 0), tokens)


class Searched(Protocol):
    """A text whose substrings can be looked up."""

    owner: str | None
    readers: set[str | None]

    def find(self, tokens: Iterable[int]) -> Match: ...

    def latest(self, tokens: Iterable[int]) -> tuple[int, int]: ...

    def after(self, match: Match) -> list[Following]: ...

    def step(self, match: Match, token: int) -> Match: ...

    def shorter(self, match: Match) -> Match: ...

    def read(self, place: int, count: int) -> list[int]: ...


def latest_after(text: Searched, tokens: Iterable[int]) -> tuple[int, int]:
    """Of the longest suffix of the tokens that occurs and goes on: where what followed it last stands, and its length."""
    match = text.find(tokens)
    while match.length and not (following := text.after(match)):
        match = text.shorter(match)
    return (max(one.latest for one in following), match.length) if match.length else (0, 0)


class SuffixAutomaton:
    """All substrings of a growing text, each with what followed it.

    One state stands for all substrings that end at the same places. Places are counted for
    substrings of up to `reach` tokens: the suffixes of the text that short lie on the links above
    one state, the tail, and each new token counts them once.
    """

    def __init__(self, reach: int, owner: str | None = None) -> None:
        self.owner = owner  # whose text it is, where it is kept for several requests
        self.readers: set[str | None] = set()  # owners of the sequences that it has drafted for
        self.tokens: list[int] = []
        self._reach = reach
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest substring
        self._count = [0]
        self._latest = [-1]  # position of the last token at the last place
        self._whole = 0  # state of the whole text
        self._tail = Match(0, 0)  # the longest suffix of up to `reach` tokens

    @property
    def size(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._push(token)

    def match(self) -> Match:
        """The longest suffix of the text that occurred before, up to what can be followed."""
        state, length = self._tail
        while state > 0 and self._count[state] < 2:
            state = self._link[state]
            length = self._length[state]
        return self._cut(state, length, self._reach - 1)

    def find(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of the tokens that occurs in this text."""
        state = length = 0
        for token in tokens:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return self._cut(state, length, self._reach - 1)

    def latest(self, tokens: Iterable[int]) -> tuple[int, int]:
        """Of the longest suffix of the tokens that occurs and goes on: where what followed it last stands, and its length."""
        return latest_after(self, tokens)

    def read(self, place: int, count: int) -> list[int]:
        """At most so many tokens from a place on, of one text."""
        return until_separator(self.tokens[place : place + count])

    def after(self, match: Match) -> list[Following]:
        """What followed the substring, in no order. Ids below 0 separate texts and are left out."""
        count, latest = self._count, self._latest
        return [Following(count[to], latest[to], token) for token, to in self._next[match.state].items() if token >= 0]

    def step(self, match: Match, token: int) -> Match:
        """The substring with a token that followed it, without its head where that makes it too long to count."""
        return self._cut(self._next[match.state][token], match.length + 1, self._reach - 1)

    def shorter(self, match: Match) -> Match:
        """The longest suffix of the substring that occurs at more places."""
        state = self._link[match.state]
        return Match(state, self._length[state])

    def _cut(self, state: int, length: int, limit: int) -> Match:
        """The last `limit` tokens of a substring."""
        while length > limit and self._length[self._link[state]] >= limit:
            state = self._link[state]
        return Match(state, min(length, limit))

    def _push(self, token: int) -> None:
        self._whole = self._grown(token)
        # where the tail's state was split, its next is a longer suffix of the text, and the cut finds ours
        self._tail = self._cut(self._next[self._tail.state][token], self._tail.length + 1, self._reach)
        state = self._tail.state
        while state > 0:
            self._count[state] += 1
            self._latest[state] = self.size
            state = self._link[state]
        self.tokens.append(token)

    def _grown(self, token: int) -> int:
        """Blumer's construction: the state of the whole text with one more token."""
        new = self._state({}, 0, self._length[self._whole] + 1)
        at = self._whole
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at >= 0:
            self._link[new] = self._split(at, token)
        return new

    def _split(self, at: int, token: int) -> int:
        """The state of exactly the longest substring of `at` and then the token."""
        old, length = self._next[at][token], self._length[at] + 1
        if self._length[old] == length:
            return old
        part = self._state(dict(self._next[old]), self._link[old], length, self._count[old], self._latest[old])
        self._link[old] = part
        while at >= 0 and self._next[at].get(token) == old:
            self._next[at][token] = part
            at = self._link[at]
        return part

    def _state(self, after: dict[int, int], link: int, length: int, count: int = 0, latest: int = -1) -> int:
        self._next.append(after)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._link) - 1
