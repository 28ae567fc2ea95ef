"""Copies inside JSON strings, as tool calls write files: what comes next in one, from the lines of the prompt.

A string writes line ends and quotes with a backslash, so its tokens are not the file's; here lines are compared, not tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from outrider.draft.patches import Words, guessed_bytes, lines_of

__all__ = ["QuotedCursor"]

_OPENING = re.compile(rb'"[\w.$-]{1,64}"\s*:\s*"')  # of a string that is the value of a property
_PIECE = re.compile(rb'[^"\\\n]+|\\u[0-9a-fA-F]{4}|\\[^u]|["\n]')
_OUTSIDE = 96  # bytes that an opening may have
_CANDIDATES = 64  # lines with the same beginning that are compared
_MOST_LINE = 2000  # bytes of a line, its last ones; a longer one is in no file
_SURE = 3  # letters of a line before it is looked for anywhere
_ANCHOR = 4  # bytes behind a change that must agree before the rest of its line is taken
_WORD = re.compile(rb"\w{1,48}")
_LONGEST = 48  # bytes of a replacement that is remembered
_REPLACEMENTS = 32
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}


class QuotedCursor:
    """Reads an output, and knows which line of the prompt a JSON string in it has come to.

    A string that begins after one with lines of the prompt is expected to begin as that did, because edits name a text and
    then what replaces it.
    """

    def __init__(self, prompt: Seq[int], spellings: Mapping[int, tuple[bool, bytes]]) -> None:
        self._prompt = prompt
        self._spellings = spellings
        self._read = len(prompt)
        self._held = b""  # outside: what may become an opening; inside: an escape that is not complete
        self._is_open = False
        self._line = b""  # of the string, which is being written
        self._first: int | None = None  # line of the prompt that the string began with
        self._next: int | None = None  # line of the prompt that comes next
        self._again: int | None = None  # line of the prompt with which the next string may begin
        self._lines: list[bytes] = []  # of the prompt, once they are needed
        self._sorted: list[tuple[bytes, int]] = []
        self._made: dict[bytes, bytes] = {}  # words of the prompt, and what the output has in their place
        self._pattern: re.Pattern[bytes] | None = None  # of these words
        self._replaces = False  # whether the string has them, too: the text that an edit names has none

    def advance(self, text: Seq[int]) -> None:
        """Read new tokens of the output."""
        data = b"".join([self._spellings.get(token, (False, b""))[1] for token in text[self._read :]])
        self._read = len(text)
        while data:
            data = self._inside(self._held + data) if self._is_open else self._outside(self._held + data)

    def guess(self, tokens: int) -> Words | None:
        """Text that should come next in a string."""
        if not self._is_open:
            return None
        begun, kind = self._line, "line"
        if not begun:
            kind = "next" if self._first is not None else "begins"
        place = self._place()
        if place is not None:
            rest = self._changed(place)[len(begun) :]
        elif (found := self._behind_a_change()) is not None:
            rest, place, kind = found, self._next, "changed"
        if place is None:
            return None
        words = self._quoted(rest, place + 1, guessed_bytes(tokens))
        held = self._held.decode()
        return Words(words[len(held) :], f"quoted {kind}") if words.startswith(held) and words != held else None

    def _outside(self, data: bytes) -> bytes:
        """Look for the next string; returns what stands in it."""
        opening = _OPENING.search(data)
        before = data if opening is None else data[: opening.start()]
        if b"}" in before:
            self._again = None
        if opening is None:
            self._held = data[-_OUTSIDE:]
            return b""
        if not self._lines:
            self._lines = lines_of(self._prompt, self._spellings)
            self._sorted = sorted((line, i) for i, line in enumerate(self._lines))
        self._is_open, self._held, self._line, self._first, self._next = True, b"", b"", None, self._again
        self._replaces = self._again is not None
        return data[opening.end() :]

    def _inside(self, data: bytes) -> bytes:
        """Read a string; returns what stands behind it."""
        at = 0
        while (piece := _PIECE.match(data, at)) is not None:
            at, found = piece.end(), piece[0]
            if found in (b'"', b"\n"):
                self._is_open, self._held, self._again = False, b"", self._first
                return data[at:]
            if found == b"\\n":
                self._end_line()
            else:
                self._line = (self._line + (found if found[:1] != b"\\" else _unescaped(found)))[-_MOST_LINE:]
        self._held = data[at:]
        return b""

    def _end_line(self) -> None:
        line, self._line, expected = self._line, b"", self._next
        if expected is not None and expected < len(self._lines):
            old = self._lines[expected]
            if line == self._changed(expected):
                self._next = expected + 1
                return
            if line == old:
                self._made, self._pattern = {}, None  # they are not made everywhere
            elif _is_changed(old, line):
                self._note_replacement(old, line)
                self._next = expected + 1
                return
        place = self._find(line, is_whole=True)
        if place is not None:
            self._first, self._next = place if self._first is None else self._first, place + 1

    def _place(self) -> int | None:
        """The prompt's line that the string has come to: the expected one, the next that begins so, or else the last of all."""
        if self._next is not None and self._next < len(self._lines) and self._changed(self._next).startswith(self._line):
            return self._next
        is_sure = len(self._line.strip()) >= (1 if self._next is not None else _SURE)
        return self._find(self._line) if is_sure else None

    def _find(self, body: bytes, is_whole: bool = False) -> int | None:
        at = bisect_left(self._sorted, (body, -1))
        places = []
        for line, i in self._sorted[at : at + _CANDIDATES]:
            if not (line == body if is_whole else line.startswith(body)):
                break
            places.append(i)
        if self._next is not None and (later := [i for i in places if i >= self._next]):
            return min(later)
        return max(places, default=None) if body.strip() else None

    def _behind_a_change(self) -> bytes | None:
        """The rest of the expected line, where the latest bytes stand in it."""
        anchor = self._line[-_ANCHOR:]
        if self._next is None or self._next >= len(self._lines) or len(anchor) < _ANCHOR:
            return None
        line = self._changed(self._next)
        at = line.rfind(anchor)
        return None if at < 0 else line[at + _ANCHOR :]

    def _changed(self, place: int) -> bytes:
        """A line of the prompt with the replacements that were made before, as when a name is changed throughout."""
        line = self._lines[place]
        if self._pattern is None or not self._replaces:
            return line
        return self._pattern.sub(lambda found: self._made[found[0]], line)

    def _note_replacement(self, old: bytes, new: bytes) -> None:
        """Remember the words of a line that the string has in place of others."""
        start = _common(old, new)
        end = _common(old[start:][::-1], new[start:][::-1])
        while start and old[start - 1 : start].isalnum() | (old[start - 1 : start] == b"_"):
            start -= 1
        while end and old[len(old) - end : len(old) - end + 1].isalnum() | (old[len(old) - end : len(old) - end + 1] == b"_"):
            end -= 1
        words, others = old[start : len(old) - end], new[start : len(new) - end]
        if not _WORD.fullmatch(words) or not others or len(others) > _LONGEST:
            return
        if len(self._made) >= _REPLACEMENTS:
            self._made.clear()
        self._made[words], self._replaces = others, True
        self._pattern = re.compile(rb"\b(?:" + b"|".join(map(re.escape, self._made)) + rb")\b")

    def _quoted(self, rest: bytes, following: int, room: int) -> str:
        """The rest of a line and the lines behind it, as a JSON string writes them."""
        out = rest
        for place in range(following, len(self._lines)):
            if len(out) > room:
                break
            out += b"\n" + self._changed(place)
        return json.dumps(out[:room].decode(errors="ignore"), ensure_ascii=False)[1:-1]


def _unescaped(piece: bytes) -> bytes:
    if piece[1:2] == b"u":
        return chr(int(b"0x" + piece[2:], 0)).encode(errors="replace")
    return _ESCAPED.get(piece[1:], piece[1:])


def _is_changed(old: bytes, new: bytes) -> bool:
    """Whether a line stands in another's place: both begin or end alike."""
    return old.lstrip()[:_ANCHOR] == new.lstrip()[:_ANCHOR] or old[-_ANCHOR:] == new[-_ANCHOR:]


def _common(a: bytes, b: bytes) -> int:
    """The length of the longest common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
