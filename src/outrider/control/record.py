"""What drafts have been worth: from a drafter's claims and the verdicts on them to chances. No torch.

A node is judged when its parent came true. For every arm a table says how often nodes with such a claim
came true; every sequence adds how much easier or harder its text is than others'. From the chances
follows a curve: the accepted tokens to expect from the best 1, 2, ... nodes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core import ROOT

__all__ = ["MOST", "Floats", "Record"]

Floats = npt.NDArray[np.float64]

MOST = 64  # nodes a curve covers
_PRIOR = np.cumsum(0.6 ** np.arange(1, MOST + 1))
_OWN, _SHARED = 8.0, 64.0  # rounds a sequence's and an arm's curve remember
_RECALLED = 16.0  # rounds that an earlier process's record counts for
_TRUST = 2.0  # rounds that others' experience counts for beside a sequence's own
_JUDGED = 200.0  # nodes that a class of claims remembers
_OWN_JUDGED = 48.0  # and a sequence
_DOUBT = 4.0  # judged nodes that the claim itself counts for
_CAUTION = 6.0  # judged nodes that a sequence's being like all others counts for
_GOING_ON, _SLOWLY = 0.9, 0.15  # how nodes beyond those asked for are imagined, and how readily
_BOUND = 6.0  # log odds beyond which claims are alike


@dataclass(slots=True)
class _Arm:
    """What is known about an arm from all sequences."""

    curve: Floats = field(default_factory=_PRIOR.copy)
    rounds: float = 0.0
    judged: dict[int, list[float]] = field(default_factory=dict)  # by claimed log odds: [nodes judged, nodes accepted]

    def chance(self, claim: float) -> float:
        """How often nodes with such a claim came true."""
        seen, true = self.judged.get(round(claim), (0.0, 0.0))
        return (true + _DOUBT * _chance(claim)) / (seen + _DOUBT)

    def judge(self, claim: float, true: bool) -> None:
        own = self.judged.setdefault(round(claim), [0.0, 0.0])
        if own[0] >= _JUDGED:
            own[:] = (value * (1 - 1 / _JUDGED) for value in own)
        own[0] += 1.0
        own[1] += true


@dataclass(slots=True)
class _Own:
    """What one sequence adds to that."""

    curve: Floats
    rounds: float = 0.0
    expected: float = 0.0  # of the nodes judged, those expected to come true and those that did; fading
    true: float = 0.0
    seen: float = 0.0

    @property
    def ease(self) -> float:
        """Log odds to add to every node's chance."""
        if self.seen == 0.0:
            return 0.0
        mean = self.expected / self.seen
        return _log_odds((self.true + _CAUTION * mean) / (self.seen + _CAUTION)) - _log_odds(mean)

    def judge(self, expected: float, true: bool) -> None:
        fade = 1.0 - 1.0 / _OWN_JUDGED
        self.seen = self.seen * fade + 1.0
        self.expected = self.expected * fade + expected
        self.true = self.true * fade + true


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence this round, until its verdict is known."""

    arm: int
    asked: int  # nodes
    curve: Floats  # as expected
    parents: list[int]
    claims: list[float]  # log odds of every node after its parent, as the drafter says
    chances: list[float]  # the same as the arm's record has it
    kept: Seq[int] | None = None  # nodes that were verified; None: all


class Record:
    """Acceptance of several arms, over all sequences and for each."""

    def as_dict(self, names: Seq[str]) -> dict[str, Any]:
        """What is known about each arm, as plain data."""
        return {
            name: {"rounds": own.rounds, "curve": [round(float(tokens), 4) for tokens in own.curve],
                   "judged": {str(claim): [round(n, 3) for n in counts] for claim, counts in own.judged.items()}}
            for name, own in zip(names, self._arms, strict=True) if own.rounds
        }  # fmt: skip

    @property
    def known(self) -> list[bool]:
        """Which arms have been seen at work."""
        return [own.rounds > 0 for own in self._arms]

    def restore(self, names: Seq[str], data: Mapping[str, Any]) -> None:
        """Begin with what an earlier process knew, as if it had been seen a short while ago."""
        for name, own in zip(names, self._arms, strict=True):
            kept = data.get(name)
            if kept and len(kept["curve"]) == MOST:
                own.curve, own.rounds = np.array(kept["curve"]), min(float(kept["rounds"]), _RECALLED)
                own.judged = {int(claim): [float(n) for n in counts] for claim, counts in kept["judged"].items()}

    def __init__(self, arms: int) -> None:
        self._arms = [_Arm() for _ in range(arms)]
        self._own: dict[Hashable, list[_Own]] = {}
        self._pending: dict[Hashable, _Pending] = {}

    def curve(self, key: Hashable, arm: int) -> Floats:
        """Accepted tokens to expect from the best 1, 2, ... nodes for this sequence: its own record, and at first the others'."""
        shared, own = self._arms[arm].curve, self._own.get(key)
        if own is None or own[arm].rounds == 0.0:
            return shared
        weight = own[arm].rounds / (own[arm].rounds + _TRUST)
        return shared + weight * (own[arm].curve - shared)

    def expect(self, key: Hashable, arm: int, asked: int, parents: list[int], says: Seq[float]) -> list[float]:
        """The survival of every node of a proposal, given what the drafter says it is."""
        shared, ease = self._arms[arm], self._of(key, arm).ease
        claims: list[float] = []
        chances: list[float] = []
        survival: list[float] = []
        for i, parent in enumerate(parents):
            before = says[parent] if parent >= 0 else 1.0
            claims.append(_log_odds(says[i] / before if before > 0 else 0.0))
            chances.append(shared.chance(claims[i]))
            own = _chance(_log_odds(chances[i]) + ease) if ease else chances[i]
            survival.append(own * (survival[parent] if parent >= 0 else 1.0))
        self._pending[key] = _Pending(arm, min(asked, MOST), _curve(survival), parents, claims, chances)
        return survival

    def keep(self, key: Hashable, nodes: Seq[int]) -> None:
        """Only these of the proposed nodes go on to be verified."""
        if key in self._pending:
            self._pending[key].kept = nodes

    def learn(self, key: Hashable, path: Seq[int]) -> None:
        """The verdict: which of the verified nodes came true."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return
        own, shared = self._of(key, pending.arm), self._arms[pending.arm]
        nodes = range(len(pending.parents)) if pending.kept is None else pending.kept
        alive = {ROOT, *(nodes[i] for i in path)}
        for node in nodes:
            if pending.parents[node] in alive:
                shared.judge(pending.claims[node], node in alive)
                own.judge(pending.chances[node], node in alive)
        _follow(own, pending, _OWN)
        _follow(shared, pending, _SHARED)

    def forget(self, key: Hashable) -> None:
        self._own.pop(key, None)
        self._pending.pop(key, None)

    def _of(self, key: Hashable, arm: int) -> _Own:
        if key not in self._own:
            self._own[key] = [_Own(own.curve) for own in self._arms]
        return self._own[key][arm]


def _follow(record: _Arm | _Own, pending: _Pending, memory: float) -> None:
    """Move a curve towards what was just proposed.

    What more nodes would have added is not known: it moves slowly towards going on as the last nodes did,
    so that longer drafts are tried again some time after shorter ones turned out well.
    """
    record.rounds = min(record.rounds + 1.0, memory)
    asked = pending.asked
    fresh, old = np.diff(pending.curve, prepend=0.0), np.diff(record.curve, prepend=0.0)
    before = fresh[asked - 2] if asked > 1 else 1.0
    ratio = min(fresh[asked - 1] / before, _GOING_ON) if before > 0 else 0.0
    fresh[asked:] = fresh[asked - 1] * ratio ** np.arange(1, MOST - asked + 1)
    rates = np.full(MOST, 1.0 / record.rounds)
    rates[asked:] *= _SLOWLY
    record.curve = np.cumsum(old + (fresh - old) * rates)


def _curve(survival: Seq[float]) -> Floats:
    best = sorted(survival, reverse=True)[:MOST]
    return np.cumsum(np.pad(np.array(best), (0, MOST - len(best))))


def _log_odds(chance: float) -> float:
    bounded = min(max(chance, 1e-6), 1 - 1e-6)
    return max(-_BOUND, min(_BOUND, math.log(bounded / (1 - bounded))))


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
