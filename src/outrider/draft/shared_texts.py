"""Texts of finished requests, kept for the next requests of the same owner and for nobody else."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import count
from typing import NamedTuple

import numpy as np

from outrider.core import Sequence
from outrider.draft.automaton import SuffixAutomaton

__all__ = ["Kept", "SharedTexts"]

_STEP = 512  # tokens that one look-up takes into an index: a long text is indexed over several rounds
_HEADS = 4  # latest requests of an owner that a new one is compared with


class Kept(NamedTuple):
    """How much text is kept for an owner."""

    texts: int = 0
    tokens: int = 0

    def __add__(self, other: object) -> Kept:
        assert isinstance(other, Kept)
        return Kept(self.texts + other.texts, self.tokens + other.tokens)


class _Generation:
    """Some texts of one owner: those in the index, and those that wait to be indexed."""

    def __init__(self, owner: str, reach: int) -> None:
        self.owner = owner
        self.size = self.texts = 0
        self._index = SuffixAutomaton(reach, owner)
        self._waiting: list[int] = []

    def add(self, tokens: Seq[int]) -> None:
        self._waiting += tokens
        self.size += len(tokens)
        self.texts += 1

    def indexed(self) -> SuffixAutomaton:
        """The index, with some more of what waits."""
        if self._waiting:
            self._index.extend(self._waiting[:_STEP])
            del self._waiting[:_STEP]
        return self._index


class SharedTexts:
    """Earlier texts by owner, at most `limit` tokens of at most `owners` owners in all.

    An automaton cannot forget, so texts fill generations of at most half the limit, and the oldest
    generation of all goes when room is needed. No owner's search touches another's generations.
    """

    def __init__(self, limit: int, reach: int, owners: int = 16) -> None:
        self._limit = limit
        self._reach = reach
        self._owners = owners
        self._generations: deque[_Generation] = deque()  # oldest first
        self._by_tenant: dict[str, deque[_Generation]] = {}  # likewise
        self._heads: dict[str, deque[array[int]]] = {}  # the latest requests, prompts included, to see what is new in the next
        self._ids = count(1)
        self.size = 0

    def of(self, owner: str | None) -> Iterator[SuffixAutomaton]:
        """The texts that may draft for an owner's sequences."""
        for generation in self._by_tenant.get(owner, ()) if owner is not None else ():
            yield generation.indexed()

    def keep(self, seq: Sequence, with_prompt: bool) -> None:
        """Take in a finished request: its output, and what its prompt says that the owner's latest requests did not."""
        owner = seq.request.owner
        if owner is None or self._limit < 4:
            return
        if not with_prompt:
            self.add(owner, seq.tokens[seq.prompt_len :])
            return
        tokens = array("i", seq.tokens)
        heads = self._heads.setdefault(owner, deque(maxlen=_HEADS))
        known = max((_common(tokens, head) for head in heads), default=0)
        heads.append(tokens)
        self.add(owner, seq.tokens[known:])

    def add(self, owner: str, tokens: Seq[int]) -> None:
        """Take in a finished text, or its end where it is longer than half the limit."""
        room = self._limit // 2
        kept = tokens[max(len(tokens) + 1 - room, 0) :]
        if room < 2 or not kept:
            return
        piece = [-next(self._ids), *kept]  # a number below 0 goes first: no match runs across texts
        while self.size + len(piece) > self._limit or (owner not in self._by_tenant and len(self._by_tenant) >= self._owners):
            self._drop_oldest()
        generations = self._by_tenant.setdefault(owner, deque())
        if not generations or generations[-1].size + len(piece) > room:
            generations.append(_Generation(owner, self._reach))
            self._generations.append(generations[-1])
        generations[-1].add(piece)
        self.size += len(piece)

    def drop(self, owner: str) -> Kept:
        """Forget an owner's texts, and say how much that was."""
        dropped = self.kept(owner)
        self._heads.pop(owner, None)
        self._by_tenant.pop(owner, None)
        self._generations = deque(generation for generation in self._generations if generation.owner != owner)
        self.size -= dropped.tokens
        return dropped

    def kept(self, owner: str) -> Kept:
        generations = self._by_tenant.get(owner, ())
        return Kept(sum(one.texts for one in generations), sum(one.size for one in generations))

    def sources(self) -> set[tuple[str, str | None]]:
        """Whose texts have drafted for whose sequences, among the texts that are kept."""
        return {(one.owner, reader) for one in self._generations for reader in one.indexed().readers}

    def _drop_oldest(self) -> None:
        oldest = self._generations.popleft()
        generations = self._by_tenant[oldest.owner]
        generations.popleft()
        if not generations:
            del self._by_tenant[oldest.owner]
            self._heads.pop(oldest.owner, None)
        self.size -= oldest.size


def _common(a: array[int], b: array[int]) -> int:
    """The length of the longest common start."""
    size = min(len(a), len(b))
    differs = np.frombuffer(a, np.int32, size) != np.frombuffer(b, np.int32, size) if size else np.zeros(0, bool)
    return int(differs.argmax()) if differs.any() else size
