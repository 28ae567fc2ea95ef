"""What drafts have been worth: from a drafter's claims and the verdicts on them to chances. No torch.

A node is judged when its parent came true. For every arm a table says how often nodes with such a claim
came true; every sequence adds how much easier or harder its text is than others'. From the chances
follow gains: the accepted tokens to expect from the best node, the second best, ...
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
_PLACES = np.arange(1, MOST + 1)
_PRIOR = 0.6**_PLACES
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

    gains: Floats = field(default_factory=lambda: np.array(_PRIOR, dtype=np.float64))
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

    gains: Floats
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
    gains: list[float]  # as expected, best first
    parents: list[int]
    claims: list[float]  # log odds of every node after its parent, as the drafter says
    chances: list[float]  # the same as the arm's record has it
    kept: Seq[int] | None = None  # nodes that were verified; None: all


class Record:
    """Acceptance of several arms, over all sequences and for each."""

    def as_dict(self, names: Seq[str]) -> dict[str, Any]:
        """What is known about each arm, as plain data."""
        return {
            name: {"rounds": own.rounds, "gains": [round(float(tokens), 5) for tokens in own.gains],
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
            try:
                kept = data[name]
                gains = np.array(kept["gains"], dtype=np.float64)
                judged = {int(claim): [float(seen), float(true)] for claim, (seen, true) in kept["judged"].items()}
                rounds = min(float(kept["rounds"]), _RECALLED)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # of another version, or spoilt: it learns anew
            if gains.shape == (MOST,) and np.isfinite(gains).all():
                own.gains, own.rounds, own.judged = gains, rounds, judged

    def __init__(self, arms: int) -> None:
        self._arms = [_Arm() for _ in range(arms)]
        self._own: dict[Hashable, list[_Own]] = {}
        self._pending: dict[Hashable, _Pending] = {}

    def curves(self, keys: Seq[Hashable]) -> Floats:
        """(keys, arms, nodes): accepted tokens to expect from the best 1, 2, ... nodes.

        A sequence's own record, and at first the others'.
        """
        shared = np.stack([arm.gains for arm in self._arms])
        out = np.empty((len(keys), *shared.shape))
        for place, key in zip(out, keys, strict=True):
            place[:] = shared
            for arm, own in enumerate(self._own.get(key, ())):
                if own.rounds:
                    place[arm] += own.rounds / (own.rounds + _TRUST) * (own.gains - shared[arm])
        return np.asarray(out.cumsum(2))

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
        self._pending[key] = _Pending(arm, min(asked, MOST), sorted(survival, reverse=True)[:MOST], parents, claims, chances)
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
            self._own[key] = [_Own(own.gains.copy()) for own in self._arms]
        return self._own[key][arm]


def _follow(record: _Arm | _Own, pending: _Pending, memory: float) -> None:
    """Move gains towards what was just proposed.

    What more nodes would have added is not known: it moves slowly towards going on as the last nodes did,
    so that longer drafts are tried again some time after shorter ones turned out well.
    """
    record.rounds = min(record.rounds + 1.0, memory)
    asked, gains, rate = pending.asked, pending.gains, 1.0 / record.rounds
    known = np.zeros(asked)
    known[: len(gains)] = gains[:asked]
    last, before = float(known[-1]), float(known[-2]) if asked > 1 else 1.0
    ratio = min(last / before, _GOING_ON) if before > 0 else 0.0
    record.gains[:asked] += (known - record.gains[:asked]) * rate
    record.gains[asked:] += (last * ratio ** _PLACES[: MOST - asked] - record.gains[asked:]) * (rate * _SLOWLY)


def _log_odds(chance: float) -> float:
    bounded = min(max(chance, 1e-6), 1 - 1e-6)
    return max(-_BOUND, min(_BOUND, math.log(bounded / (1 - bounded))))


def _chance(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
