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
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from outrider.core import ROOT, Arm

__all__ = ["LENGTHS", "Record"]

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # of drafts, in nodes; from one to the next is a step
_SPANS = [slice(*ends) for ends in pairwise((0, *LENGTHS))]  # nodes of each step, the likeliest first
_WIDTHS = [own.stop - own.start for own in _SPANS]
_PRIOR = [sum(0.6**place for place in range(own.start + 1, own.stop + 1)) for own in _SPANS]
_OWN, _SHARED = 16.0, 64.0  # rounds a sequence's and an arm's curve remember
_RECALLED, _FADED = 8.0, 0.5  # rounds that another process's record counts for, and what is left of its judgements
_TRIED = 4.0  # rounds after which an arm is no stranger
_SURE, _LUCK = 16.0, 0.8  # rounds after which an arm is known, and how far off one of them may be, in what is expected at first
_TRUST = 4.0  # rounds after which a sequence's own experience says as much as others' about how easy its text is,
_APART = 4.0  # and about which arm suits it
_STALE = 0.96  # what is left of a sequence's experience with an arm after a round without it
_ALIKE = 0.5  # how much of a text's being hard for one arm holds for others, in powers
_SEEN = 0.1  # share of what came true against what was expected to
_NEAR = 6  # steps by which texts are compared
_HARDEST, _EASIEST = 0.1, 2.0  # what is accepted against other texts, at least and at most
_JUDGED = 200.0  # nodes that a class of claims remembers
_FADE = 1 - 1 / 48  # and how those of a sequence fade
_DOUBT = 4.0  # judged nodes that the claim itself counts for
_CAUTION = 6.0  # judged nodes that a sequence's being like all others counts for
_GOING_ON, _SLOWLY = 0.9, 0.15  # how nodes beyond those asked for are imagined, and how readily
_READINESS = [[1.0] * asked + [_SLOWLY] * (len(LENGTHS) - asked) for asked in range(len(LENGTHS) + 1)]
_BOUND = 6  # log odds beyond which claims are alike
_EDGES = [1 / (1 + math.exp(0.5 - odds)) for odds in range(1 - _BOUND, _BOUND + 1)]  # chances between whole log odds
_UNSEEN = (0.0, 0.0)
_NOTHING = 1e-4  # tokens
_KINDS = ("0", "1", "2", "3", "4")  # of requests, by temperature, as a file spells them


@dataclass(slots=True)
class _Arm:
    """What is known about an arm from all sequences."""

    gains: list[float] = field(default_factory=_PRIOR.copy)  # accepted tokens that every step adds
    nodes: list[float] = field(default_factory=lambda: list(map(float, _WIDTHS)))  # proposed in every step
    rounds: float = 0.0
    judged: dict[int, list[float]] = field(default_factory=dict)  # by claimed log odds: [nodes judged, nodes accepted]

    def recalled(self, rounds: float) -> _Arm:
        """The same, not so sure any more."""
        judged = {claim: [n * _FADED for n in counts] for claim, counts in self.judged.items()}
        return _Arm(self.gains.copy(), self.nodes.copy(), min(self.rounds, rounds), judged)

    def as_dict(self) -> dict[str, Any]:
        judged = {str(claim): [round(n, 3) for n in counts] for claim, counts in self.judged.items()}
        gains, nodes = ([round(value, 5) for value in own] for own in (self.gains, self.nodes))
        return {"rounds": self.rounds, "gains": gains, "nodes": nodes, "judged": judged}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> _Arm:
        gains, nodes = (list(map(float, data[name])) for name in ("gains", "nodes"))
        if len(gains) != len(LENGTHS) or len(nodes) != len(LENGTHS):
            raise ValueError("of other steps")
        judged = {int(claim): [float(seen), float(true)] for claim, (seen, true) in data["judged"].items()}
        rounds, counts = float(data["rounds"]), [count for pair in judged.values() for count in pair]
        if not all(0.0 <= value < math.inf for value in (rounds, *gains, *nodes, *counts)):
            raise ValueError("counts are finite, and not negative")
        if any(abs(claim) > _BOUND or true > seen for claim, (seen, true) in judged.items()):
            raise ValueError("of other claims")
        return cls(gains, nodes, rounds, judged).recalled(_RECALLED)


@dataclass(slots=True, eq=False)
class _Own:
    """What one sequence showed of an arm."""

    gains: list[float]
    rounds: float = 0.0
    at: int = 0  # when it was used last
    expected: float = 0.0  # of the nodes judged, those expected to come true and those that did; fading
    true: float = 0.0
    seen: float = 0.0

    @property
    def ease(self) -> float:
        """By how much the odds of every node are larger than the arm's record has it."""
        if self.seen == 0.0:
            return 1.0
        mean = self.expected / self.seen
        return _odds((self.true + _CAUTION * mean) / (self.seen + _CAUTION)) / _odds(mean)


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence this round, until its verdict is known."""

    shared: _Arm
    own: _Own
    asked: int  # nodes
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
        self._own: dict[Hashable, dict[int, _Own]] = {}  # by arm, of those tried
        self._pending: dict[Hashable, _Pending] = {}
        self._heard: list[tuple[_Pending, Seq[int]]] = []  # verdicts not thought over yet
        self.now = 0  # rounds so far

    def meet(self, keys: Iterable[Hashable], kinds: Iterable[int]) -> None:
        """Sequences and their kinds."""
        self._kinds.update(zip(keys, kinds, strict=True))

    @property
    def known(self) -> float:
        """The share of what should be seen of every arm that has been seen."""
        seen = [max((own[arm].rounds for own in self._shared.values()), default=0.0) for arm in range(len(self._names))]
        return sum(min(rounds / _TRIED, 1.0) for rounds in seen) / len(seen) if seen else 1.0

    def curves(self, key: Hashable) -> list[list[float]]:
        """By arm: accepted tokens to expect from drafts of each length. A sequence's own record, and at first the others'.

        A text that is easier or harder than others for one arm is taken to be a little so for those that it did not try
        lately: otherwise whatever was not tried looks better as soon as the text gets hard.
        """
        arms = self._arms_of(key)
        owns = self._own.get(key)
        if not owns:
            return [list(accumulate(arm.gains)) for arm in arms]
        weights = {a: own.rounds * _STALE ** (self.now - own.at) for a, own in owns.items()}
        there = sum(weight * sum(arms[a].gains[:_NEAR]) for a, weight in weights.items())
        here = sum(weight * sum(owns[a].gains[:_NEAR]) for a, weight in weights.items())
        trust = _TRUST / (sum(weights.values()) + _TRUST)
        ease = trust + (1.0 - trust) * min(max(here / max(there, 1e-9), _HARDEST), _EASIEST) ** _ALIKE
        curves: list[list[float]] = []
        for a, arm in enumerate(arms):
            gains = [min(usual * ease, width) for usual, width in zip(arm.gains, _WIDTHS, strict=True)]
            if weight := weights.get(a, 0.0):
                part = weight / (weight + _APART)
                gains = [lent + part * (own - lent) for lent, own in zip(gains, owns[a].gains, strict=True)]
            curves.append(list(accumulate(gains)))
        return curves

    def hopes(self, key: Hashable) -> list[Seq[float]]:
        """By arm, the same if what was seen of it was bad luck: all of it, at first, and nothing where enough was seen."""
        found: list[Seq[float]] = []
        for arm in self._arms_of(key):
            luck = _LUCK / math.sqrt(arm.rounds + 1.0)
            steps = zip(arm.gains, _PRIOR, _WIDTHS, strict=True)
            likely = accumulate(min(seen + luck * usual, width) for seen, usual, width in steps)
            found.append(LENGTHS if arm.rounds < _TRIED else () if arm.rounds >= _SURE else list(likely))
        return found

    def nodes(self, key: Hashable, arm: int) -> list[float]:
        """Nodes to expect where drafts of each length are asked for: a drafter may know of fewer, or stop."""
        return list(accumulate(self._arms_of(key)[arm].nodes))

    def is_strange(self, key: Hashable, arm: int) -> bool:
        """Whether an arm has hardly been tried on such sequences."""
        own = self._own.get(key, {}).get(arm)
        return self._arms_of(key)[arm].rounds + (own.rounds if own else 0.0) < _TRIED

    def expect(
        self, key: Hashable, arm: int, asked: int, parents: list[int], says: Seq[float], heard: bool = True
    ) -> list[float]:
        """The survival of every node of a proposal, given what the drafter says it is; `heard`: its verdict will be."""
        shared = self._arms_of(key)[arm]
        own = self._own_of(key, arm)
        judged, ease = shared.judged, own.ease
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
            self._pending[key] = _Pending(shared, own, asked, survival, parents, claims, chances)
        return survival

    def keep(self, key: Hashable, nodes: Seq[int]) -> None:
        """Only these of the proposed nodes go on to be verified."""
        if key in self._pending:
            self._pending[key].kept = nodes

    def learn(self, key: Hashable, path: Seq[int]) -> None:
        """The verdict: which of the verified nodes came true. It is thought over later, many at once: that is quicker."""
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._heard.append((pending, path))

    def think(self) -> None:
        """Go through what was heard."""
        alike: dict[tuple[_Own, int], list[tuple[_Pending, list[float]]]] = {}  # by whose it was and how far it went
        for pending, path in self._heard:
            alike.setdefault((pending.own, pending.asked), []).append((pending, _judged(pending, path)))
        for (own, asked), rounds in alike.items():
            own.rounds *= _STALE ** (self.now - own.at)
            own.at = self.now
            steps = _imagined([gains for _, gains in rounds], min(asked, LENGTHS[-1]))
            readiness = _READINESS[bisect(LENGTHS, asked)]
            shared = rounds[0][0].shared
            for known, most in ((own, _OWN), (shared, _SHARED)):
                known.rounds = min(known.rounds + len(rounds), most)
                share = min(len(rounds) / known.rounds, 1.0)
                known.gains = _moved(known.gains, steps, readiness, share)
            shown = _counted([len(gains) for _, gains in rounds], min(asked, LENGTHS[-1]))
            shared.nodes = _moved(shared.nodes, shown, readiness, len(rounds) / shared.rounds)
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
            if kind not in _KINDS:
                continue
            for arm, name in enumerate(self._names):
                # Where it is of another version, or spoilt, the arm learns anew.
                with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
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

    def _own_of(self, key: Hashable, arm: int) -> _Own:
        owns = self._own.setdefault(key, {})
        if arm not in owns:
            owns[arm] = _Own(self._arms_of(key)[arm].gains.copy())
        return owns[arm]


def _judged(pending: _Pending, path: Seq[int]) -> list[float]:
    """Enter a verdict on each node in the arm's record and in the sequence's own; what the best node brought, the next, ..."""
    survival, parents, claims, chances = pending.survival, pending.parents, pending.claims, pending.chances
    nodes = range(len(parents)) if pending.kept is None else pending.kept
    alive = {ROOT, *(nodes[i] for i in path)}
    own, judged = pending.own, pending.shared.judged
    expected, came, seen = own.expected, own.true, own.seen
    for node in nodes:
        if parents[node] in alive:
            true = node in alive
            seen, expected, came = seen * _FADE + 1.0, expected * _FADE + chances[node], came * _FADE + true
            counts = judged.setdefault(claims[node], [0.0, 0.0])
            if counts[0] >= _JUDGED:
                counts[:] = (count * (1 - 1 / _JUDGED) for count in counts)
            counts[0] += 1.0
            counts[1] += true
    own.expected, own.true, own.seen = expected, came, seen
    if pending.kept is not None:
        return sorted(survival, reverse=True)
    best = sorted(nodes, key=survival.__getitem__, reverse=True)  # what came true says as much as what was expected to:
    return [survival[node] + ((node in alive) - survival[node]) * _SEEN for node in best]  # claims may have changed their meaning


def _imagined(rounds: Seq[list[float]], asked: int) -> list[float]:
    """What proposals show every step to add.

    What more nodes would have added is not known: it moves slowly towards going on as the last nodes did,
    so that longer drafts are tried again some time after shorter ones turned out well.
    """
    gains = rounds[0] if len(rounds) == 1 else [sum(own) / len(rounds) for own in zip_longest(*rounds, fillvalue=0.0)]
    nodes = gains[:asked]
    if len(nodes) == asked:
        last, before = nodes[-1], nodes[-2] if asked > 1 else 1.0
        ratio = min(last / before, _GOING_ON) if before > 0 else 0.0
        while len(nodes) < LENGTHS[-1] and last > _NOTHING:
            last *= ratio
            nodes.append(last)
    return [sum(nodes[span]) for span in _SPANS]


def _counted(counts: Seq[int], asked: int) -> list[float]:
    """Nodes in every step, of proposals of so many nodes. Beyond those asked for it would go on as at the last of them."""
    last = sum(count >= asked for count in counts) / len(counts)
    return [
        sum(min(max(count - own.start, 0), own.stop - own.start) for count in counts) / len(counts)
        if own.stop <= asked
        else last * (own.stop - own.start)
        for own in _SPANS
    ]


def _moved(old: list[float], new: list[float], readiness: list[float], share: float) -> list[float]:
    return [was + (now - was) * ready * share for was, now, ready in zip(old, new, readiness, strict=True)]


def _odds(chance: float) -> float:
    bounded = min(max(chance, 1e-6), 1 - 1e-6)
    return bounded / (1 - bounded)
