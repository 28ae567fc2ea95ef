"""What drafts of recorded texts come to: for every arm and position, a tree whose right nodes are known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from outrider.bench.plan.fleet.load import ANSWER_TOKEN
from outrider.bench.plan.trace import DraftRecord, Trace
from outrider.control.acceptance import LENGTHS
from outrider.core import Tree

__all__ = ["Texts", "made_up_texts"]

_WRONG_TOKEN = ANSWER_TOKEN + 1
_NOTHING = Tree([], [], [])
_TEXTS, _TOKENS = 16, 256  # made up where none were recorded
_STEADY = 0.4  # standard deviation of the log odds between made-up texts


class Texts:
    """Recorded texts, each drafted for by every arm. Requests take turns with them.

    A drafter that is asked in the middle of what it drafted in the record guesses the remainder right, as it did there.
    """

    def __init__(self, texts: Sequence[Mapping[str, Trace]], arms: Sequence[str]) -> None:
        self._texts = [[_Guesses(text[arm]) for arm in arms] for text in texts]
        self._trees: dict[tuple[int, int, int, int], Tree] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def draft(self, text: int, arm: int, position: int, nodes: int) -> Tree:
        """What an arm drafts after `position` tokens of an answer, up to so many nodes."""
        key = (text % len(self._texts), arm, position, nodes)
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = self._texts[key[0]][arm].tree(position, nodes)
        return tree


class _Guesses:
    """One arm's drafts of one text, by position."""

    def __init__(self, trace: Trace) -> None:
        self._longest = trace.max_length
        self._chains = all(record.parents == list(range(-1, len(record.parents) - 1)) for record in trace.drafts)
        self._places: list[tuple[DraftRecord, int]] = []  # by position: the record that covers it, and tokens since its root
        for record, after in zip(trace.drafts, [*trace.drafts[1:], None], strict=True):
            length = len(record.path) + 1 if after is None else max(after.at - record.at, 1)
            self._places += [(record, i) for i in range(length)]

    def tree(self, position: int, nodes: int) -> Tree:
        if not self._places or nodes == 0:
            return _NOTHING
        position %= len(self._places)
        if self._chains:
            confidences, right = self._chain(position, nodes)
            tokens = [ANSWER_TOKEN] * right + [_WRONG_TOKEN] * (len(confidences) - right)
            return Tree(tokens, list(range(-1, len(tokens) - 1)), list(accumulate(confidences, mul)))
        record, consumed = self._places[position]
        kept, parents, survival = record.likeliest(nodes)
        path = record.path[: max(len(record.path) - consumed, 0)]
        return Tree([ANSWER_TOKEN if node in path else _WRONG_TOKEN for node in kept], parents, survival)

    def _chain(self, position: int, nodes: int) -> tuple[list[float], int]:
        """The confidence in every node after its parent, and how many of them are right: drafts that were right to their
        last node go on with the next record.
        """
        confidences: list[float] = []
        while len(confidences) < nodes and position < len(self._places):
            record, consumed = self._places[position]
            steps = _steps(record)
            confidences += steps[consumed:]
            if len(record.path) < len(steps) or not steps:
                right = min(len(confidences) - len(steps) + max(len(record.path), consumed), len(confidences))
                if 0 < len(steps) >= min(self._longest, record.room):  # it was cut there, and would have gone on
                    confidences += [steps[-1]] * (nodes - len(confidences))
                return confidences[:nodes], min(right, nodes)
            confidences.append(steps[-1])  # the token after the draft, which nobody drafted
            position += max(len(steps) - consumed, 0) + 1
        return confidences[:nodes], min(len(confidences), nodes)


def _steps(record: DraftRecord) -> list[float]:
    """Of a chain, the confidence in every node once its parent is right."""
    before = [1.0, *record.survival]
    return [min(chance / last, 1.0) if last > 0 else 0.0 for chance, last in zip(record.survival, before, strict=False)]


def made_up_texts(accepted: Mapping[str, Any], arms: Mapping[str, int], seed: int = 0) -> list[dict[str, Trace]]:
    """Texts whose drafts are accepted as often as the controller found, some easier and some harder; `arms` are its longest.

    `accepted` is what the controller's file holds for one temperature bucket.
    """
    draw = random.Random(seed)
    texts = []
    for _ in range(_TEXTS):
        odds = draw.lognormvariate(0.0, _STEADY)
        texts.append({name: _made_up(name, longest, accepted[name]["gains"], odds, draw) for name, longest in arms.items()})
    return texts


def _made_up(name: str, longest: int, gains: Sequence[float], odds: float, draw: random.Random) -> Trace:
    """A chain whose survival is that of the gains by step."""
    widths = [b - a for a, b in zip((0, *LENGTHS), LENGTHS, strict=False)]
    survival = [min(gain / width, 1.0) for gain, width in zip(gains, widths, strict=True) for _ in range(width)][:longest]
    survival = list(accumulate(survival, min))
    before = [1.0, *survival]
    chances = [min(one / max(last, 1e-9), 1.0) for last, one in zip(before, survival, strict=False)]
    chances = [chance * odds / (1.0 - chance + chance * odds) for chance in chances]
    trace, at = Trace(name, 0, longest), 0
    while at < _TOKENS:
        right = 0
        while right < longest and draw.random() < chances[right]:
            right += 1
        trace.drafts.append(DraftRecord(list(range(-1, longest - 1)), survival, list(range(right)), at, longest + 1))
        at += right + 1
    return trace
