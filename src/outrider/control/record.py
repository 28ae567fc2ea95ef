"""What drafts have been worth: from a drafter's claims and the verdicts on them to chances. No torch.

A node is judged when its parent came true. For every arm a table says how often nodes with such a claim
came true; every sequence adds how much easier or harder its text is than others'. From the chances
follow gains: the accepted tokens to expect from the best node, the second best, ...
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core import ROOT, Arm

__all__ = ["MOST", "Floats", "Record"]

Floats = npt.NDArray[np.float64]

MOST = 32  # nodes a curve covers
_PLACES = np.arange(1, MOST + 1)
_PRIOR = 0.6**_PLACES
_OWN, _SHARED = 16.0, 64.0  # rounds a sequence's and an arm's curve remember
_RECALLED, _FADED = 8.0, 0.5  # rounds that another process's record counts for, and what is left of its judgements
_TRIED = 4.0  # rounds after which an arm is no stranger
_TRUST = 4.0  # rounds after which a sequence's own experience says as much as others' about how easy its text is,
_APART = 4.0  # and about which arm suits it
_STALE = 0.96  # what is left of a sequence's experience with an arm after a round without it
_ALIKE = 0.5  # how much of a text's being hard for one arm holds for others, in powers
_SEEN = 0.1  # share of what came true against what was expected to
_NEAR = 6  # nodes by which texts are compared
_HARDEST, _EASIEST = 0.1, 2.0  # what is accepted against other texts, at least and at most
_JUDGED = 200.0  # nodes that a class of claims remembers
_OWN_JUDGED = 48.0  # and a sequence
_DOUBT = 4.0  # judged nodes that the claim itself counts for
_CAUTION = 6.0  # judged nodes that a sequence's being like all others counts for
_GOING_ON, _SLOWLY = 0.9, 0.15  # how nodes beyond those asked for are imagined, and how readily
_BOUND = 6  # log odds beyond which claims are alike
_EDGES = [1 / (1 + math.exp(0.5 - odds)) for odds in range(1 - _BOUND, _BOUND + 1)]  # chances between whole log odds
_UNSEEN = (0.0, 0.0)


@dataclass(slots=True)
class _Arm:
    """What is known about an arm from all sequences."""

    gains: Floats = field(default_factory=lambda: np.array(_PRIOR, dtype=np.float64))
    rounds: float = 0.0
    judged: dict[int, list[float]] = field(default_factory=dict)  # by claimed log odds: [nodes judged, nodes accepted]

    def recalled(self, rounds: float) -> _Arm:
        """The same, not so sure any more."""
        judged = {claim: [n * _FADED for n in counts] for claim, counts in self.judged.items()}
        return _Arm(self.gains.copy(), min(self.rounds, rounds), judged)

    def as_dict(self) -> dict[str, Any]:
        judged = {str(claim): [round(n, 3) for n in counts] for claim, counts in self.judged.items()}
        return {"rounds": self.rounds, "gains": [round(float(tokens), 5) for tokens in self.gains], "judged": judged}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> _Arm:
        gains = np.array(data["gains"], dtype=np.float64)
        if gains.shape != (MOST,) or not np.isfinite(gains).all():
            raise ValueError("gains of another length")
        judged = {int(claim): [float(seen), float(true)] for claim, (seen, true) in data["judged"].items()}
        return cls(gains, float(data["rounds"]), judged).recalled(_RECALLED)

    def judge(self, claim: int, true: bool) -> None:
        own = self.judged.setdefault(claim, [0.0, 0.0])
        if own[0] >= _JUDGED:
            own[:] = (value * (1 - 1 / _JUDGED) for value in own)
        own[0] += 1.0
        own[1] += true


@dataclass(slots=True)
class _Ease:
    """By how much a sequence's nodes come true more often than an arm's record has it."""

    expected: float = 0.0  # of the nodes judged, those expected to come true and those that did; fading
    true: float = 0.0
    seen: float = 0.0

    @property
    def odds(self) -> float:
        """By how much every node's odds are larger."""
        if self.seen == 0.0:
            return 1.0
        mean = self.expected / self.seen
        return _odds((self.true + _CAUTION * mean) / (self.seen + _CAUTION)) / _odds(mean)

    def judge(self, expected: float, true: bool) -> None:
        fade = 1.0 - 1.0 / _OWN_JUDGED
        self.seen = self.seen * fade + 1.0
        self.expected = self.expected * fade + expected
        self.true = self.true * fade + true


@dataclass(slots=True)
class _Own:
    """What one sequence adds to that, for all arms."""

    gains: Floats  # (arms, nodes)
    rounds: Floats  # (arms,)
    at: Floats  # (arms,) when each was used last
    eases: list[_Ease]


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence this round, until its verdict is known."""

    shared: _Arm
    own: _Own
    arm: int
    asked: int  # nodes
    best: list[int]  # nodes, the likeliest first
    survival: list[float]  # as expected
    parents: list[int]
    claims: list[int]  # log odds of every node after its parent, as the drafter says, in whole numbers
    chances: list[float]  # the same as the arm's record has it
    kept: Seq[int] | None = None  # nodes that were verified; None: all


class Record:
    """Acceptance of several arms, over all sequences of a kind and for each."""

    def __init__(self, arms: Seq[Arm]) -> None:
        self._names = [arm.name for arm in arms]
        self._shared: dict[int, list[_Arm]] = {}  # by kind
        self._kinds: dict[Hashable, int] = {}
        self._own: dict[Hashable, _Own] = {}
        self._pending: dict[Hashable, _Pending] = {}
        self._heard: list[tuple[_Pending, Seq[int], int]] = []  # verdicts not thought over yet
        self.now = 0  # rounds so far

    def meet(self, keys: Iterable[Hashable], kinds: Iterable[int]) -> None:
        """Sequences and their kinds."""
        self._kinds.update(zip(keys, kinds, strict=True))

    @property
    def known(self) -> float:
        """The share of what should be seen of every arm that has been seen."""
        seen = [max((own[arm].rounds for own in self._shared.values()), default=0.0) for arm in range(len(self._names))]
        return sum(min(rounds / _TRIED, 1.0) for rounds in seen) / len(seen) if seen else 1.0

    def curves(self, keys: Seq[Hashable]) -> Floats:
        """(keys, arms, nodes): accepted tokens to expect from the best 1, 2, ... nodes.

        A sequence's own record, and at first the others'.
        """
        kinds = [self._kinds.get(key, 0) for key in keys]
        usual = {kind: np.stack([arm.gains for arm in self._of_kind(kind)]) for kind in set(kinds)}
        out = np.stack([usual[kind] for kind in kinds])
        if known := [i for i, key in enumerate(keys) if key in self._own]:
            out[known] = self._adapted(out[known], [self._own[keys[i]] for i in known])
        return np.asarray(out.cumsum(2))

    def _adapted(self, usual: Floats, owns: Seq[_Own]) -> Floats:
        """From all sequences' gains to those of some: (sequences, arms, nodes).

        A text that is easier or harder than others for one arm is taken to be a little so for those that did not try it
        lately: otherwise whatever was not tried looks better as soon as the text gets hard.
        """
        gains = np.stack([own.gains for own in owns])
        rounds = np.stack([own.rounds for own in owns]) * _STALE ** (self.now - np.stack([own.at for own in owns]))
        there = (rounds * usual[:, :, :_NEAR].sum(2)).sum(1)
        here = (rounds * gains[:, :, :_NEAR].sum(2)).sum(1)
        trust = rounds.sum(1) / (rounds.sum(1) + _TRUST)
        ease = np.clip(here / np.maximum(there, 1e-9), _HARDEST, _EASIEST) ** _ALIKE
        out = np.minimum(usual * (1 + trust * (ease - 1))[:, None, None], 1.0)
        out += (rounds / (rounds + _APART))[:, :, None] * (gains - out)
        return np.asarray(out)

    def strange(self, keys: Seq[Hashable]) -> npt.NDArray[np.bool_]:
        """(keys, arms): which arms have hardly been tried on such sequences."""
        tried = np.array([[arm.rounds for arm in self._arms_of(key)] for key in keys])
        for place, key in zip(tried, keys, strict=True):
            if key in self._own:
                place += self._own[key].rounds
        return np.asarray(tried < _TRIED)

    def expect(
        self, key: Hashable, arm: int, asked: int, parents: list[int], says: Seq[float], heard: bool = True
    ) -> list[float]:
        """The survival of every node of a proposal, given what the drafter says it is; `heard`: its verdict will be."""
        shared, own = self._arms_of(key)[arm], self._of(key)
        judged, ease = shared.judged, own.eases[arm].odds
        claims: list[int] = []
        chances: list[float] = []
        survival: list[float] = []
        for said, parent in zip(says, parents, strict=False):  # what is said of fewer nodes is padded
            before, above = (says[parent], survival[parent]) if parent >= 0 else (1.0, 1.0)
            claim = said / before if before > 0 else 0.0
            claims.append(bisect(_EDGES, claim) - _BOUND)
            seen, true = judged.get(claims[-1], _UNSEEN)
            chance = (true + _DOUBT * min(claim, 1.0)) / (seen + _DOUBT)
            chances.append(chance)
            survival.append(chance * ease / (1.0 - chance + chance * ease) * above)
        if heard:
            best = sorted(range(len(survival)), key=survival.__getitem__, reverse=True)[:MOST]
            self._pending[key] = _Pending(shared, own, arm, min(asked, MOST), best, survival, parents, claims, chances)
        return survival

    def keep(self, key: Hashable, nodes: Seq[int]) -> None:
        """Only these of the proposed nodes go on to be verified."""
        if key in self._pending:
            self._pending[key].kept = nodes

    def learn(self, key: Hashable, path: Seq[int]) -> None:
        """The verdict: which of the verified nodes came true. It is thought over later, many at once: that is quicker."""
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._heard.append((pending, path, self.now))

    def think(self) -> None:
        """Go through what was heard."""
        for heard in self._heard:
            _judge(*heard)
        self._heard.clear()

    def forget(self, key: Hashable) -> None:
        for known in (self._own, self._pending, self._kinds):
            known.pop(key, None)

    def as_dict(self) -> dict[str, Any]:
        """What is known about each arm, by kind, as plain data."""
        self.think()
        return {
            str(kind): {name: own.as_dict() for name, own in zip(self._names, arms, strict=True) if own.rounds}
            for kind, arms in self._shared.items()
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Begin with what an earlier process knew, as if it had been seen a short while ago."""
        for kind, kept in data.items() if isinstance(data, Mapping) else ():
            for arm, name in enumerate(self._names):
                with suppress(KeyError, TypeError, ValueError, AttributeError):  # of another version, or spoilt: it learns anew
                    self._of_kind(int(kind))[arm] = _Arm.from_dict(kept[name])

    def _arms_of(self, key: Hashable) -> list[_Arm]:
        return self._of_kind(self._kinds.get(key, 0))

    def _of_kind(self, kind: int) -> list[_Arm]:
        """What all sequences of a kind showed. A new kind begins as the nearest one sampled less freely, where more is guessed:
        who expects too much soon knows better, who expects too little does not try.
        """
        if kind not in self._shared:
            like = max((own for own in self._shared if own < kind), default=None)
            arms = [_Arm() for _ in self._names] if like is None else [own.recalled(0.0) for own in self._shared[like]]
            self._shared[kind] = arms
        return self._shared[kind]

    def _of(self, key: Hashable) -> _Own:
        if key not in self._own:
            arms = self._arms_of(key)
            none = np.zeros(len(arms))
            self._own[key] = _Own(np.stack([arm.gains for arm in arms]), none, none.copy(), [_Ease() for _ in arms])
        return self._own[key]


def _judge(pending: _Pending, path: Seq[int], now: int) -> None:
    """Enter a verdict in the arm's record and in the sequence's own."""
    arm, own, shared = pending.arm, pending.own, pending.shared
    nodes = range(len(pending.parents)) if pending.kept is None else pending.kept
    alive = {ROOT, *(nodes[i] for i in path)}
    for node in nodes:
        if pending.parents[node] in alive:
            shared.judge(pending.claims[node], node in alive)
            own.eases[arm].judge(pending.chances[node], node in alive)
    gains = list(map(pending.survival.__getitem__, pending.best))
    if pending.kept is None:  # what came true says as much as what was expected to: claims may have changed their meaning
        gains = [chance + ((node in alive) - chance) * _SEEN for chance, node in zip(gains, pending.best, strict=True)]
    target, weights = _imagined(gains, pending.asked)
    rounds = own.rounds[arm] = min(own.rounds[arm] * _STALE ** (now - own.at[arm]) + 1.0, _OWN)
    own.gains[arm] += (target - own.gains[arm]) * (weights / rounds)
    own.at[arm] = now
    shared.rounds = min(shared.rounds + 1.0, _SHARED)
    shared.gains += (target - shared.gains) * (weights / shared.rounds)


def _imagined(gains: list[float], asked: int) -> tuple[Floats, Floats]:
    """The gains that a proposal shows, and how much each counts.

    What more nodes would have added is not known: it moves slowly towards going on as the last nodes did,
    so that longer drafts are tried again some time after shorter ones turned out well.
    """
    target = [*gains[:asked], *(0.0,) * (asked - len(gains))]
    last, before = target[-1], target[-2] if asked > 1 else 1.0
    ratio = min(last / before, _GOING_ON) if before > 0 else 0.0
    for _ in range(MOST - asked):
        last *= ratio
        target.append(last)
    return np.array(target), _weights(asked)


@lru_cache(maxsize=MOST)
def _weights(asked: int) -> Floats:
    return np.where(asked >= _PLACES, 1.0, _SLOWLY)


def _odds(chance: float) -> float:
    bounded = min(max(chance, 1e-6), 1 - 1e-6)
    return bounded / (1 - bounded)
