"""Copies with edits: where in an earlier text the output goes on after a line was changed, inserted or left out."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.draft.automaton import until_separator

__all__ = ["Copied", "CopyCursor"]

_BEFORE, _AFTER = 96, 256  # tokens around the place of an edit in which the copy may go on
_CANDIDATES = 24  # places of one token that are compared
_LONGEST = 16  # tokens of a match that are counted
_SURE = 4  # tokens that must agree before an edit is taken to be over
_MAX_EDIT = 192  # tokens of an edit after which its place in the source is given up
_SKIPS = 3  # tokens that a replacement is taken to have, before anything shows where it ends
_REPLACED = 6  # tokens of a replacement that is remembered
_MAX_REPLACEMENTS = 32


class Copied(NamedTuple):
    """What a copy would bring next, and a kind by which its chances are learnt."""

    tokens: list[int]
    kind: Hashable
    first: float  # chance of its first token, and of each further one, before any was seen
    later: float


class _Replacement(NamedTuple):
    """Tokens of the source, and what the output has in their place."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class CopyCursor:
    """The place in a source that the output copies from.

    While the output follows the source, the cursor moves with it. Where it leaves the source, an edit has
    begun, and the place is kept: the copy goes on near it, where the latest tokens of the output stand in
    the source. When several agree, the edit is over. A short replacement is remembered and made
    again where the same tokens come, as when a name is changed throughout.
    """

    def __init__(self, prompt_len: int = 0) -> None:
        self._prompt_len = prompt_len
        self.source: list[int] | None = None
        self.place = 0  # in the source, of the token expected next
        self.matched = 0  # tokens that followed the source since the last edit
        self._read = 0  # tokens of the output that have been looked at
        self._left = -1  # size of the output where the edit began; -1: it follows the source
        self._pending: list[int] = []  # rest of a replacement that is under way
        self._replacements: dict[int, list[_Replacement]] = {}  # by the first old token
        self._known = 0

    @property
    def follows(self) -> bool:
        """Whether the output follows the source at this moment."""
        return self.source is not None and self._left < 0

    def jump(self, source: list[int], place: int, matched: int, text: Seq[int]) -> None:
        """Follow a source from a place on, after that many tokens that agree with it."""
        self.source, self.place, self.matched = source, place, matched
        self._read, self._left, self._pending = len(text), -1, []

    def advance(self, text: Seq[int]) -> None:
        """Read the new tokens of the output."""
        if self.source is None:
            self._read = len(text)
            return
        while self._left < 0 and self._read < len(text):
            if not self._takes(text[self._read]):
                self._left = self._read
            self._read += 1
        self._read = len(text)
        if self._left >= 0 and len(text) - self._left > _MAX_EDIT:
            self.source = None

    def _takes(self, token: int) -> bool:
        """Move past one token, where it is the next of the source or of a replacement."""
        assert self.source is not None
        if self._pending:
            is_next = self._pending.pop(0) == token
            if not is_next:
                self._pending = []
            return is_next
        made = self._replacement()
        if made is not None and made.new[0] == token:
            self._pending, self.place = list(made.new[1:]), self.place + len(made.old)
        elif self.place < len(self.source) and self.source[self.place] == token:
            self.place += 1
            if made is not None:  # it is not made everywhere
                self._replacements[made.old[0]].remove(made)
        else:
            return False
        self.matched += 1
        return True

    def guess(self, text: Seq[int], nodes: int) -> Copied | None:
        """The next tokens of the copy, after `advance`; None where nothing shows where it goes on."""
        if self.source is None:
            return None
        if self._left < 0:
            kind = min(self.matched, 8)
            return Copied(self._copy(self.place, nodes), ("follows", kind), 0.5 + kind / 20, 0.85 + kind / 64)
        place, matched = self._resumed(text)
        if matched >= _SURE:
            self._note_replacement(text, place, matched)
            self.place, self.matched, self._left = place, matched, -1
            return Copied(self._copy(place, nodes), ("resumed", min(matched, 8)), 0.75, 0.92)
        if matched:
            return Copied(self._copy(place, nodes), ("near", matched), 0.3 + matched / 8, 0.85)
        skipped = len(text) - self._left
        if skipped > _SKIPS:
            return None
        return Copied(self._copy(self.place + skipped, nodes), ("skips", skipped), 0.25, 0.8)

    def _copy(self, place: int, nodes: int) -> list[int]:
        """Tokens of the source from a place on, with the replacements that were made before."""
        assert self.source is not None
        out = list(self._pending)
        if not self._replacements:
            out += self.source[place : place + nodes - len(out)]
            place = len(self.source)
        while len(out) < nodes and place < len(self.source):
            made = self._replacement(place)
            if made is None:
                out.append(self.source[place])
                place += 1
            else:
                out += made.new
                place += len(made.old)
        return until_separator(out[:nodes])

    def _resumed(self, text: Seq[int]) -> tuple[int, int]:
        """Where the copy goes on, and how many tokens agree there: the longest agreement near the edit, then the nearest."""
        assert self.source is not None
        source, token = self.source, text[-1]
        at, end = max(self.place - _BEFORE, 0), min(self.place + _AFTER, len(source))
        if source is text:  # a copy of the prompt does not go on in the output
            end = min(end, self._prompt_len if self.place <= self._prompt_len else len(text) - 1)
        best = (0, False, 0)
        for _ in range(_CANDIDATES):
            try:
                at = source.index(token, at, end) + 1
            except ValueError:
                break
            matched = 1
            while matched < min(_LONGEST, at, len(text)) and source[at - 1 - matched] == text[-1 - matched]:
                matched += 1
            best = max(best, (matched, at >= self.place, -abs(at - self.place)))
        matched, is_after, distance = best
        return self.place - distance if is_after else self.place + distance, matched

    def _note_replacement(self, text: Seq[int], place: int, matched: int) -> None:
        """Remember what the output had in place of a few tokens of the source."""
        source = self.source
        assert source is not None
        most = min(len(text) - self._left, place - self.place)
        agreed = next((n for n in range(min(matched, most), most) if source[place - 1 - n] != text[-1 - n]), most)
        old, new = source[self.place : place - agreed], text[self._left : len(text) - agreed]
        if not 0 < len(old) <= _REPLACED or not 0 < len(new) <= _REPLACED:
            return
        if self._known >= _MAX_REPLACEMENTS:
            self._replacements.clear()
            self._known = 0
        known = self._replacements.setdefault(old[0], [])
        known[:] = [other for other in known if other.old != tuple(old)]
        known.insert(0, _Replacement(tuple(old), tuple(new)))
        self._known += 1

    def _replacement(self, place: int | None = None) -> _Replacement | None:
        """A replacement that was made of the tokens at a place (the cursor's) before."""
        source, place = self.source, self.place if place is None else place
        assert source is not None
        if not self._replacements or place >= len(source):
            return None
        for one in self._replacements.get(source[place], ()):
            if tuple(source[place : place + len(one.old)]) == one.old:
                return one
        return None
