"""Unified diffs and search-and-replace blocks: what comes next in one, from the lines of the file that it edits.

A diff writes a file's lines with a letter before each, so its tokens are not the file's; here lines are compared, not tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from typing import NamedTuple

__all__ = ["PatchCursor", "Words", "guessed_bytes", "lines_of"]

_HEADER = re.compile(rb"@@ -(\d+)")
_NEAR = 200  # lines after the expected one in which an edit may go on
_MOST_TOKENS = 65536  # of a prompt that are read for its lines, the last ones
_MOST_LINES = 5000  # of a prompt that are searched for a line, the last ones
_NUMBERED = re.compile(rb" *(\d+)(?:\t|\xe2\x86\x92)")  # a line as `cat -n` shows it, or with an arrow
_BYTES_PER_TOKEN = 6  # more than most tokens have
_MOST_BYTES = 4096  # of a guess


class _Mode(Enum):
    TEXT = 0
    DIFF = 1
    SEARCH = 2
    REPLACE = 3


class Words(NamedTuple):
    """Text that should come next, and a kind by which its chances are learnt."""

    text: str
    kind: str


def guessed_bytes(tokens: int) -> int:
    """Room for a guess of so many tokens."""
    return min(tokens * _BYTES_PER_TOKEN, _MOST_BYTES)


def lines_of(prompt: Seq[int], spellings: Mapping[int, tuple[bool, bytes]]) -> list[bytes]:
    """The last lines of a prompt, those of files without the numbers that agents show before them."""
    spelled = b"".join([spellings.get(token, (False, b""))[1] for token in prompt[-_MOST_TOKENS:]])
    lines = spelled.split(b"\n")[-_MOST_LINES:]
    marks = [_NUMBERED.match(line) for line in lines]
    numbers = [-1 if mark is None else int(mark[1]) for mark in marks]
    for i, mark in enumerate(marks):
        if mark is not None and (numbers[i] - 1 in numbers[max(i - 1, 0) : i] or numbers[i] + 1 in numbers[i + 1 : i + 2]):
            lines[i] = lines[i][mark.end() :]
    return lines


class PatchCursor:
    """Reads an output line by line, and knows where in the prompt's lines its edits are."""

    def __init__(self, prompt: Seq[int], spellings: Mapping[int, tuple[bool, bytes]]) -> None:
        self.search_start = 0  # size of the text where the last search block began
        self._prompt = prompt
        self._spellings = spellings
        self._read = len(prompt)
        self._mode = _Mode.TEXT
        self._partial = b""  # the line that is being written
        self._file: list[bytes] = []  # lines of the prompt, once they are needed
        self._path = b""  # of the file that a diff changes
        self._first: int | None = None  # line of the prompt with which that file begins
        self._next: int | None = None  # line of the prompt that the next line of the diff should be
        self._removed: list[bytes] = []  # lines taken out where the diff stands
        self._added = 0  # lines put in there

    def advance(self, text: Seq[int]) -> bool:
        """Read new tokens of the output; True where a search block has just ended, and what replaces it comes next."""
        replaces = False
        for size, token in enumerate(text[self._read :], self._read + 1):
            self._partial += self._spellings.get(token, (False, b""))[1]
            while b"\n" in self._partial:
                line, _, self._partial = self._partial.partition(b"\n")
                replaces = self._take(line, size)
        self._read = len(text)
        return replaces and not self._partial

    def guess(self, tokens: int) -> Words | None:
        """Text that should come next in a diff."""
        if self._mode is not _Mode.DIFF:
            return None
        room = guessed_bytes(tokens)
        sign, body = self._partial[:1], self._partial[1:]
        if sign in (b"", b"+") and self._added < len(self._removed):
            words = self._replacing(sign, body)
        elif sign == b"":
            words = self._context(self._next, room), "context"
        elif sign in (b" ", b"-"):
            words = self._rest(sign, body, room)
        else:
            return None
        text = words[0][:room].decode(errors="ignore")
        return Words(text, words[1]) if text else None

    def _take(self, line: bytes, size: int) -> bool:
        """Read a whole line; True where a search block ends with it."""
        if self._mode is _Mode.DIFF and self._take_diff(line):
            return False
        if line.startswith(b"--- "):
            self._path = line[4:].split(b"\t")[0].strip().removeprefix(b"a/")
        elif line.startswith(b"@@"):
            self._start_diff(line)
        elif line.startswith(b"<<<<<<<"):
            self._mode, self.search_start = _Mode.SEARCH, size
        elif line.startswith(b"=======") and self._mode is _Mode.SEARCH:
            self._mode = _Mode.REPLACE
            return True
        elif line.startswith(b">>>>>>>") and self._mode is _Mode.REPLACE:
            self._mode = _Mode.TEXT
        return False

    def _take_diff(self, line: bytes) -> bool:
        """Read a line of a diff; False where it is none."""
        sign, body = line[:1], line[1:]
        if line.startswith((b"--- ", b"+++ ", b"@@", b"diff ", b"index ", b"```")):
            self._mode = _Mode.TEXT
            return False
        if sign == b"+":
            self._added += 1
        elif sign in (b" ", b"-", b""):
            place = self._find(body, is_whole=True)
            self._next = None if place is None else place + 1
            if sign == b"-":
                self._removed = [body] if self._added else [*self._removed, body]
            else:
                self._removed = []
            self._added = 0
        return True

    def _start_diff(self, line: bytes) -> None:
        if not self._file:
            self._file = lines_of(self._prompt, self._spellings)
        self._mode, self._removed, self._added = _Mode.DIFF, [], 0
        header = _HEADER.match(line)
        if self._path:
            name = self._path.rpartition(b"/")[2]
            self._first = next((i + 1 for i in range(len(self._file) - 1, -1, -1) if name in self._file[i]), None)
            if self._first is not None and self._file[self._first : self._first + 1] and self._file[self._first][:3] == b"```":
                self._first += 1
            self._path = b""
        if header is not None and self._first is not None:
            self._next = self._first + max(int(header[1]) - 1, 0)

    def _find(self, body: bytes, is_whole: bool = False) -> int | None:
        """The prompt's line that this is, or begins with this: the next after the expected one, or else the last of all."""
        lines, start = self._file, self._next
        if start is not None:
            for i in range(start, min(start + _NEAR, len(lines))):
                if lines[i] == body if is_whole else lines[i].startswith(body):
                    return i
        if not body.strip():
            return start if is_whole else None
        return next(
            (i for i in range(len(lines) - 1, -1, -1) if (lines[i] == body if is_whole else lines[i].startswith(body))), None
        )

    def _rest(self, sign: bytes, body: bytes, room: int) -> tuple[bytes, str]:
        """The rest of a line that stays or goes, and what follows it."""
        place = self._find(body)
        if place is None:
            return b"", "rest"
        line = self._file[place]
        if sign == b"-":  # a line that goes is likely to come again, changed
            return line[len(body) :] + b"\n+" + line, "removed"
        return line[len(body) :] + b"\n" + self._context(place + 1, room), "kept"

    def _replacing(self, sign: bytes, body: bytes) -> tuple[bytes, str]:
        """The line that was taken out, as far as what comes in its place is the same."""
        line = self._removed[self._added]
        if not line.startswith(body):
            return b"", "added"
        return (line[len(body) :] if sign else b"+" + line), "added"

    def _context(self, place: int | None, room: int) -> bytes:
        """Lines of the prompt from a place on, as a diff keeps them."""
        if place is None:
            return b""
        out = b""
        for line in self._file[place:]:
            if len(out) > room:
                break
            out += b" " + line + b"\n"
        return out
