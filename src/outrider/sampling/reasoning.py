"""Where a model's reasoning begins and ends in its output: the markers, and a pure function that places each token.

Markers are matched by the bytes of tokens, so that a marker which is one control token and a marker which is spelled by
several tokens are treated alike, and exactly as a parser of the text treats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from outrider import checks
from outrider.errors import InvalidParameter

__all__ = ["Markers", "Phase", "Place", "Reasoning"]

_MAX_MARKER = 256


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer.

    `begin` is the marker that opens it. Without it the output starts inside the reasoning, because the prompt opened it.
    Output that does not start with `begin` has no reasoning. `end` is the marker after which the answer follows.
    After `budget` tokens of reasoning `end` is forced.
    """

    end: str
    begin: str = ""
    budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            marker = getattr(self, name)
            if not isinstance(marker, str) or len(marker) > _MAX_MARKER:
                raise InvalidParameter("reasoning", f"{name} must be a text of at most {_MAX_MARKER} characters")
            checks.text("reasoning", marker)
        if not self.end:
            raise InvalidParameter("reasoning", "needs the marker that ends it")
        if self.budget is not None:
            checks.integer("thinking_token_budget", self.budget, 0)


class Phase(Enum):
    """The part of the output that a position belongs to."""

    BEFORE = 0  # the text so far may become the marker that opens the reasoning
    INSIDE = 1
    ANSWER = 2


class Place(NamedTuple):
    """What the tokens of an output so far say about its next one."""

    phase: Phase
    matched: int = 0  # bytes of the marker that is awaited, at the end of the text so far
    used: int = 0  # tokens since the reasoning began
    tokens: int = 0  # tokens of the output so far; in the answer, those before the answer
    reasoned: bool = False  # in the answer: there was reasoning before it


class Markers:
    """Follows the markers of one `Reasoning` through tokens of one tokenizer."""

    def __init__(self, reasoning: Reasoning, bytes_of: Callable[[int], bytes]) -> None:
        self.budget = reasoning.budget
        self.begin, self.end = reasoning.begin.encode(), reasoning.end.encode()
        self._bytes_of = bytes_of
        self._fallback = _fallback(self.end)

    @property
    def start(self) -> Place:
        """The place before the first token of the output."""
        return Place(Phase.BEFORE if self.begin else Phase.INSIDE)

    def after(self, place: Place, tokens: Sequence[int]) -> Place:
        """The place after more tokens."""
        for token in tokens:
            if place.phase is Phase.ANSWER:
                break
            place = self._next(place, self._bytes_of(token))
        return place

    def exhausted(self, place: Place) -> bool:
        """Whether the budget is used up, so that the rest of the marker must follow."""
        return place.phase is Phase.INSIDE and self.budget is not None and place.used >= self.budget

    def overshoots(self, matched: int, spelled: bytes) -> bool:
        """Whether a token completes the end marker before its own last byte."""
        return self.end_in(matched, spelled[:-1])[1] > 0

    def count(self, tokens: Sequence[int]) -> int:
        """The tokens of an output that are reasoning, without those of the markers."""
        place, began, inside = self.start, 0, 0
        for number, token in enumerate(tokens, 1):
            before, place = place, self._next(place, self._bytes_of(token))
            if place.phase is Phase.INSIDE:
                began = number if before.phase is Phase.BEFORE else began
                inside = number if not place.matched else inside
            elif place.phase is Phase.ANSWER:
                return max(inside - began, 0) if place.reasoned else 0
        return max(len(tokens) - began, 0) if place.phase is Phase.INSIDE else 0

    def end_in(self, matched: int, spelled: bytes) -> tuple[int, int]:
        """Bytes of the end marker that are matched after more bytes, and how many bytes complete it; 0 if they do not."""
        for consumed, byte in enumerate(spelled, 1):
            while matched and self.end[matched] != byte:
                matched = self._fallback[matched - 1]
            matched += self.end[matched] == byte
            if matched == len(self.end):
                return 0, consumed
        return matched, 0

    def _next(self, place: Place, spelled: bytes) -> Place:
        tokens = place.tokens + 1
        if place.phase is Phase.INSIDE:
            matched, completed = self.end_in(place.matched, spelled)
            if completed:
                return Place(Phase.ANSWER, tokens=tokens, reasoned=True)
            return Place(Phase.INSIDE, matched, place.used + 1, tokens)
        text = self.begin[: place.matched] + spelled if place.matched else spelled.lstrip()
        if text.startswith(self.begin):
            opened = self._next(Place(Phase.INSIDE, used=-1, tokens=place.tokens), text[len(self.begin) :])
            return opened if opened.phase is Phase.INSIDE else Place(Phase.ANSWER, tokens=tokens, reasoned=True)
        return Place(Phase.BEFORE, len(text), 0, tokens) if self.begin.startswith(text) else Place(Phase.ANSWER)


@lru_cache(maxsize=64)
def _fallback(marker: bytes) -> Mapping[int, int]:
    """For every matched length, the longest shorter one that its bytes also match (Knuth, Morris and Pratt, 1977)."""
    table, matched = {0: 0}, 0
    for place in range(1, len(marker)):
        while matched and marker[place] != marker[matched]:
            matched = table[matched - 1]
        matched += marker[place] == marker[matched]
        table[place] = matched
    return table
