"""Which tokens may follow in a sequence that reasons before its answer.

Tokens before the marker that ends the reasoning are free. From the marker on the answer's grammar applies, in the text and
on every path of a draft, whether the marker stands in the text or in the path. The answers are a function of the tokens
alone, as those of `Guide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.sampling.guide import Guide
from outrider.sampling.reasoning import Markers, Phase, Place, Reasoning
from outrider.sampling.vocabulary import Vocabulary

__all__ = ["ReasoningGuide"]


class _Question(NamedTuple):
    """A question to the guide of the answer: where its text starts, and the part of a path that belongs to it."""

    guide: Guide
    start: int
    path: Sequence[int]


class ReasoningGuide:
    """Guides the reasoning of one sequence, and asks another guide about its answer.

    Without a grammar only the budget is kept. With one, no end token may come inside the reasoning, because the text would
    not match the grammar, and no token may spell the end of the marker and the beginning of the answer at once.
    """

    def __init__(
        self,
        reasoning: Reasoning,
        vocabulary: Vocabulary,
        size: int,
        ends: frozenset[int],
        answer: Callable[[], Guide] | None,  # makes the guide of an answer; None: the answer is free
    ) -> None:
        self.nothing = torch.zeros(size, dtype=torch.bool)  # (V,)
        self._markers = Markers(reasoning, vocabulary.bytes_of)
        self._vocabulary = vocabulary
        self._ends = [token for token in ends if token < size]
        self._after = answer() if answer is not None else None  # of an answer after reasoning
        self._instead = answer() if answer is not None and reasoning.begin else None  # of an answer without reasoning
        self._latest = (0, self._markers.start)  # tokens of the output, and the place after them
        self._masks: dict[tuple[Phase, int], Tensor] = {}
        self._everything = torch.ones(size, dtype=torch.bool)

    @property
    def slow(self) -> bool:
        """Whether a sandbox computes the masks that the text needs."""
        return any(guide.slow for guide in self._active())

    @property
    def too_slow(self) -> bool:
        return any(guide.too_slow for guide in self._active())

    @property
    def fault(self) -> str | None:
        return next((guide.fault for guide in self._active() if guide.fault is not None), None)

    def ready(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the sequence can take part in a round. Inside the reasoning it always can."""
        question = self._question(tokens, start)
        return question is None or question.guide.ready(tokens, question.start)

    def allowed(self, tokens: Sequence[int], start: int, path: Sequence[int] = ()) -> Tensor | None:
        """Which tokens may follow the sequence and a path of drafted ones: (V,) bool, or None where that is unknown."""
        place = self._markers.after(self._text(tokens, start), path)
        question = self._question(tokens, start, path)
        mask = None if question is None else question.guide.allowed(tokens, question.start, question.path)
        if question is None:
            return self._inside(place)
        if mask is None or place.phase is Phase.ANSWER:
            return mask
        return mask | self._opening(place)

    def forced(self, tokens: Sequence[int], start: int) -> list[int]:
        """Tokens that must follow, as far as is known in time."""
        place, question = self._text(tokens, start), self._question(tokens, start)
        if self._markers.exhausted(place):
            return self._rest(place)
        if question is None or place.phase is not Phase.ANSWER:
            return []
        return question.guide.forced(tokens, question.start)

    def complete(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the output so far matches the whole grammar."""
        question = self._question(tokens, start)
        return question is not None and question.guide.complete(tokens, question.start)

    def prefetch(self, tokens: Sequence[int], start: int, paths: Sequence[Sequence[int]]) -> None:
        """Start computing the masks of the answer after these drafted paths."""
        for path in paths:
            question = self._question(tokens, start, path)
            if question is not None:
                question.guide.prefetch(tokens, question.start, [question.path])

    def end(self) -> None:
        """Drop queued work: the sequence has ended."""
        for guide in self._guides():
            guide.end()

    def _guides(self) -> Iterable[Guide]:
        return (guide for guide in (self._after, self._instead) if guide is not None)

    def _active(self) -> Iterable[Guide]:
        """The guide that the text needs, if it needs one."""
        guide = self._guide_at(self._latest[1])
        return () if guide is None else (guide,)

    def _guide_at(self, place: Place) -> Guide | None:
        if place.phase is Phase.INSIDE:
            return None
        return self._after if place.reasoned else self._instead

    def _text(self, tokens: Sequence[int], start: int) -> Place:
        """The place after the sequence's tokens. They mostly grow."""
        known, place = self._latest
        length = len(tokens) - start
        if length < known:
            known, place = 0, self._markers.start
        place = self._markers.after(place, tokens[start + known : start + length])
        self._latest = (length, place)
        return place

    def _question(self, tokens: Sequence[int], start: int, path: Sequence[int] = ()) -> _Question | None:
        """What the guide of the answer is to be asked; None where the position is inside the reasoning, or the answer free."""
        text = self._text(tokens, start)
        place = self._markers.after(text, path)
        guide = self._guide_at(place)
        if guide is None:
            return None
        if not place.reasoned or text.phase is Phase.ANSWER:
            return _Question(guide, start + place.tokens if place.reasoned else start, path)
        return _Question(guide, len(tokens), path[place.tokens - text.tokens :])  # the marker stands in the path

    def _inside(self, place: Place) -> Tensor:
        """The mask before the answer, or in an answer that follows no grammar."""
        if self._markers.exhausted(place):
            mask = self.nothing.clone()
            mask[self._rest(place)[:1]] = True
            return mask
        if self._after is None or place.phase is not Phase.INSIDE:
            return self._everything
        key = (place.phase, place.matched)
        if key not in self._masks:
            mask = self._everything.clone()
            mask[[*self._ends, *self._vocabulary.overshooting(self._markers, place.matched)]] = False
            self._masks[key] = mask
        return self._masks[key]

    def _opening(self, place: Place) -> Tensor:
        """Tokens that go on with the marker that opens the reasoning."""
        key = (place.phase, place.matched)
        if key not in self._masks:
            mask = self.nothing.clone()
            mask[self._vocabulary.beginnings(self._markers.begin[place.matched :])] = True
            self._masks[key] = mask
        return self._masks[key]

    def _rest(self, place: Place) -> list[int]:
        """The tokens that spell what is missing of the end marker."""
        return self._vocabulary.spell(self._markers.end[place.matched :])
