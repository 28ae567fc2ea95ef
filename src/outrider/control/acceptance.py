"""What drafts have brought: from a drafter's confidence and the verdicts on it to expected tokens. No torch.

Per drafter and temperature bucket a table says how often nodes of some confidence are accepted once their parent is, and a
curve how many tokens drafts of each length bring. A sequence has one number for each drafter, its difficulty: the odds of its
nodes against those of the table.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from outrider.control.ladder import LENGTHS, Ladder, ladder
from outrider.core import ROOT, Arm

__all__ = ["LENGTHS", "Acceptance"]

_BOUND = 6  # log odds beyond which confidences are alike
_EDGES = [1 / (1 + math.exp(0.5 - odds)) for odds in range(1 - _BOUND, _BOUND + 1)]  # chances between whole log odds
_BUCKETS = ("0", "1", "2", "3", "4")  # of temperatures, as a file spells them

MEMORY = 64.0  # rounds that a curve remembers; three times as many nodes for a class of confidence
PSEUDO_COUNT = 4.0  # nodes that the drafter's word counts for in the table
_USUAL = 10.0  # nodes that the mean of all texts counts for in a sequence's difficulty
_KEPT = 1 - 1 / MEMORY  # of what a sequence showed, after another node
_OTHERS = 0.25  # what evidence from another drafter counts for a sequence's difficulty
_FINEST = 4  # difficulties that are told apart, to a factor of e
_STALE = 0.99  # what is left of an arm's count of rounds after a round without it
_BEYOND = 0.15  # how readily the curve moves at lengths that were not drafted


@dataclass(slots=True)
class _Estimate:
    """What is known about an arm at one temperature, from all sequences."""

    ladder: Ladder
    gains: list[float] = field(default_factory=list)  # accepted tokens that every step adds
    nodes: list[float] = field(default_factory=list)  # proposed in every step
    rounds: float = 0.0
    judged: dict[int, list[float]] = field(default_factory=dict)  # by confidence, in log odds: [nodes judged, nodes accepted]
    at: int = 0  # the round it was used in last
    curves: dict[int, list[float]] = field(default_factory=dict)  # by difficulty, until something is learnt

    def __post_init__(self) -> None:
        self.gains = self.gains or list(self.ladder.prior)
        self.nodes = self.nodes or list(map(float, self.ladder.widths))

    def curve(self, difficulty: int) -> list[float]:
        """Accepted tokens to expect from drafts of each length, for texts of this difficulty."""
        if difficulty not in self.curves:
            self.curves[difficulty] = list(accumulate(_shifted(self.ladder, self.gains, math.exp(difficulty / _FINEST))))
        return self.curves[difficulty]

    def fade(self, share: float) -> None:
        """What was seen long ago counts for less."""
        self.rounds *= share
        for counts in self.judged.values():
            counts[:] = (count * share for count in counts)

    def recalled(self, rounds: float) -> _Estimate:
        """A copy that counts for at most so many rounds."""
        judged = {confidence: [count / 2 for count in counts] for confidence, counts in self.judged.items()}
        return _Estimate(self.ladder, self.gains.copy(), self.nodes.copy(), min(self.rounds, rounds), judged, self.at)

    def as_dict(self) -> dict[str, Any]:
        judged = {str(confidence): [round(n, 3) for n in counts] for confidence, counts in self.judged.items()}
        gains, nodes = ([round(value, 5) for value in values] for values in (self.gains, self.nodes))
        of_trees = {} if self.ladder.unit == 1 else {"unit": self.ladder.unit}
        return {"rounds": self.rounds, "gains": gains, "nodes": nodes, "judged": judged} | of_trees

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], steps: Ladder) -> _Estimate:
        gains, nodes = (list(map(float, data[name])) for name in ("gains", "nodes"))
        if len(gains) != len(LENGTHS) or len(nodes) != len(LENGTHS) or data.get("unit", 1) != steps.unit:
            raise ValueError("of other steps")
        judged = {int(confidence): [float(seen), float(true)] for confidence, (seen, true) in data["judged"].items()}
        rounds, counts = float(data["rounds"]), [count for pair in judged.values() for count in pair]
        if not all(0.0 <= value < math.inf for value in (rounds, *gains, *nodes, *counts)):
            raise ValueError("counts are finite, and not negative")
        if any(abs(confidence) > _BOUND or true > seen for confidence, (seen, true) in judged.items()):
            raise ValueError("of other confidences")
        return cls(steps, gains, nodes, rounds, judged).recalled(MEMORY / 8)


@dataclass(slots=True)
class _Evidence:
    """What one sequence showed of an arm: nodes judged, those expected to be accepted and those that were; fading."""

    seen: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0
    at: int = 0  # the round of the last of them


@dataclass(slots=True)
class _Pending:
    """What was proposed for a sequence this round, until its verdict is known."""

    estimate: _Estimate
    evidence: dict[int, _Evidence]
    arm: int
    asked: int  # nodes
    parents: list[int]
    confidences: list[int]  # log odds of every node after its parent, as the drafter says, in whole numbers
    chances: list[float]  # the same as the table has it
    usual: list[float]  # survival of every node in a text of usual difficulty
    kept: Seq[int] | None = None  # nodes that were verified; None: all
    path: Seq[int] = ()


class Acceptance:
    """Expected tokens of several arms, by temperature bucket and for each sequence."""

    def __init__(self, arms: Seq[Arm]) -> None:
        self._names = [arm.name for arm in arms]
        self._ladders = [ladder(arm.unit) for arm in arms]
        self._estimates: dict[int, list[_Estimate]] = {}  # by temperature bucket
        self._buckets: dict[Hashable, int] = {}
        self._evidence: dict[Hashable, dict[int, _Evidence]] = {}
        self._pending: dict[Hashable, _Pending] = {}
        self._heard: list[_Pending] = []  # verdicts that nothing was learnt from yet
        self.now = 0  # rounds so far

    def meet(self, keys: Iterable[Hashable], buckets: Iterable[int]) -> None:
        """Sequences and their temperature buckets."""
        self._buckets.update(zip(keys, buckets, strict=True))

    def curve(self, key: Hashable, arm: int) -> list[float]:
        """Accepted tokens to expect from drafts of each length."""
        return self._of(key)[arm].curve(self._difficulty(key, arm))

    def upper(self, key: Hashable, arm: int, bonus: float) -> list[float]:
        """The upper confidence bound of the curve: `bonus` standard deviations above it, as few rounds as it was seen in."""
        estimate = self._of(key)[arm]
        bonus /= math.sqrt(self.rounds(key, arm) + 1.0)
        gains = [gain + bonus * usual for gain, usual in zip(estimate.gains, estimate.ladder.prior, strict=True)]
        return list(accumulate(_shifted(estimate.ladder, gains, math.exp(self._difficulty(key, arm) / _FINEST))))

    def rounds(self, key: Hashable, arm: int) -> float:
        """In which an arm was seen at such a temperature; long ago counts for less."""
        estimate = self._of(key)[arm]
        return float(estimate.rounds * _STALE ** (self.now - estimate.at))

    def is_unseen(self, key: Hashable, arm: int) -> bool:
        """Whether an arm was hardly ever seen at such a temperature."""
        return self._of(key)[arm].rounds < 2.0

    def nodes(self, key: Hashable, arm: int) -> list[float]:
        """Nodes to expect where drafts of each length are planned: a drafter may know of fewer, or stop."""
        return list(accumulate(self._of(key)[arm].nodes))

    def predict(self, key: Hashable, arm: int, asked: int, tree: tuple[list[int], Seq[float]], learn: bool = True) -> list[float]:
        """The survival of every node of a proposal (parents, confidences); `learn`: its verdict will be told."""
        estimate, odds = self._of(key)[arm], math.exp(self._difficulty(key, arm) / _FINEST)
        parents, says = tree
        confidences: list[int] = []
        chances: list[float] = []
        usual: list[float] = []
        survival: list[float] = []
        for said, parent in zip(says, parents, strict=False):  # what is said of fewer nodes is padded
            before, above, above_usual = (says[parent], survival[parent], usual[parent]) if parent >= 0 else (1.0, 1.0, 1.0)
            confidence = min(said / before, 1.0) if before > 0 else 0.0
            confidences.append(bisect(_EDGES, confidence) - _BOUND)
            seen, true = estimate.judged.get(confidences[-1], (0.0, 0.0))
            chance = (true + PSEUDO_COUNT * confidence) / (seen + PSEUDO_COUNT)
            chances.append(chance)
            usual.append(chance * above_usual)
            survival.append(chance * odds / (1.0 - chance + chance * odds) * above)
        if learn:
            evidence = self._evidence.setdefault(key, {})
            self._pending[key] = _Pending(estimate, evidence, arm, asked, parents, confidences, chances, usual)
        return survival

    def keep(self, key: Hashable, nodes: Seq[int]) -> None:
        """Only these of the proposed nodes go on to be verified."""
        if key in self._pending:
            self._pending[key].kept = nodes

    def observe(self, key: Hashable, path: Seq[int]) -> None:
        """The verdict: which of the verified nodes were accepted. It is learnt from later, many at once: that is quicker."""
        pending = self._pending.pop(key, None)
        if pending is not None:
            pending.path = path
            self._heard.append(pending)

    def learn(self) -> None:
        """From the verdicts observed so far."""
        for pending in self._heard:
            estimate, steps = pending.estimate, pending.estimate.ladder
            asked = min(pending.asked, steps.longest)
            if self.now > estimate.at:
                estimate.fade(_STALE ** (self.now - estimate.at))
            _count(pending)
            pending.evidence[pending.arm].at = self.now
            estimate.rounds = min(estimate.rounds + 1.0, MEMORY)
            estimate.at = self.now
            gains = sorted(pending.usual, reverse=True)[:asked]
            drafted, share = bisect(steps.lengths, asked), 1.0 / estimate.rounds
            _move(steps, estimate.gains, _extended(gains, asked, steps.longest), drafted, share)
            whole = len(pending.parents) >= asked  # beyond what was asked for it would go on as before it
            _move(steps, estimate.nodes, [1.0] * (steps.longest if whole else len(pending.parents)), drafted, share)
            estimate.curves.clear()
        self._heard.clear()

    def forget(self, key: Hashable) -> None:
        for known in (self._evidence, self._pending, self._buckets):
            known.pop(key, None)

    def as_dict(self) -> dict[str, Any]:
        """What is known about each arm, by temperature bucket, as plain data."""
        self.learn()
        return {
            str(bucket): {name: one.as_dict() for name, one in zip(self._names, estimates, strict=True) if one.rounds}
            for bucket, estimates in self._estimates.items()
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Begin with what an earlier process knew, as if it had been seen a short while ago."""
        for bucket, kept in data.items() if isinstance(data, Mapping) else ():
            for arm, name in enumerate(self._names) if bucket in _BUCKETS else ():
                # Where it is of another version, or damaged, the arm learns anew.
                with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    self._bucket(int(bucket))[arm] = _Estimate.from_dict(kept[name], self._ladders[arm])

    def _of(self, key: Hashable) -> list[_Estimate]:
        return self._bucket(self._buckets.get(key, 0))

    def _bucket(self, bucket: int) -> list[_Estimate]:
        """The estimates at a temperature. A new one begins as the nearest lower one, where more is accepted: who expects too
        much soon knows better, who expects too little does not draft.
        """
        if bucket not in self._estimates:
            like = max((other for other in self._estimates if other < bucket), default=None)
            lower = [_Estimate(steps) for steps in self._ladders] if like is None else self._estimates[like]
            self._estimates[bucket] = [estimate.recalled(0.0) for estimate in lower]
        return self._estimates[bucket]

    def _difficulty(self, key: Hashable, arm: int) -> int:
        """The log of the odds ratio of a sequence's nodes, in steps. What another arm showed counts for a part."""
        seen = expected = accepted = 0.0
        for other, evidence in self._evidence.get(key, {}).items():
            weight = (1.0 if other == arm else _OTHERS) * _STALE ** (self.now - evidence.at)
            seen += weight * evidence.seen
            expected += weight * evidence.expected
            accepted += weight * evidence.accepted
        if seen == 0.0:
            return 0
        mean = expected / seen
        ratio = _odds((accepted + _USUAL * mean) / (seen + _USUAL)) / _odds(mean)
        return round(_FINEST * math.log(ratio))


def _count(pending: _Pending) -> None:
    """Enter a verdict on each judged node in the arm's table and in the sequence's evidence."""
    parents, judged = pending.parents, pending.estimate.judged
    nodes = range(len(parents)) if pending.kept is None else pending.kept
    alive = {ROOT, *(nodes[i] for i in pending.path)}
    evidence = pending.evidence.setdefault(pending.arm, _Evidence())
    for node in nodes:
        if parents[node] in alive:
            true = node in alive
            for one in pending.evidence.values():
                one.seen, one.expected, one.accepted = one.seen * _KEPT, one.expected * _KEPT, one.accepted * _KEPT
            counts = judged.setdefault(pending.confidences[node], [0.0, 0.0])
            weight = counts[0] / (counts[0] + PSEUDO_COUNT)  # where the table knows little, it is what was wrong
            evidence.seen += weight
            evidence.expected += weight * pending.chances[node]
            evidence.accepted += weight * true
            if counts[0] >= 3 * MEMORY:
                counts[:] = (count * (1 - 1 / (3 * MEMORY)) for count in counts)
            counts[0] += 1.0
            counts[1] += true


def _extended(gains: list[float], asked: int, longest: int) -> list[float]:
    """Gains by node, going on beyond those asked for as the last ones did, so that longer drafts are tried some time."""
    if len(gains) == asked:
        last, before = gains[-1], gains[-2] if asked > 1 else 1.0
        ratio = min(last / before, 0.9) if before > 0 else 0.0
        gains = gains + [last * ratio**place for place in range(1, longest - asked + 1)]
    return gains


def _move(steps: Ladder, values: list[float], nodes: list[float], drafted: int, share: float) -> None:
    """Move the value of every step towards what the nodes show; readily up to the steps that were drafted."""
    for i, span in enumerate(steps.spans):
        values[i] += (sum(nodes[span]) - values[i]) * (share if i < drafted else share * _BEYOND)


def _shifted(steps: Ladder, gains: Seq[float], odds: float) -> list[float]:
    """Gains by step where the odds of every node, given those before it, are multiplied."""
    if odds == 1.0:
        return [min(gain, width) for gain, width in zip(gains, steps.widths, strict=True)]
    shifted: list[float] = []
    before = survival = 1.0
    for gain, width, distance in zip(gains, steps.widths, steps.distances, strict=True):
        mean = min(gain / width, before)
        chance = (mean / before) ** (1.0 / distance) if before > 0.0 else 0.0
        chance = chance * odds / (1.0 - chance + chance * odds)
        before, survival = mean, survival * chance**distance
        shifted.append(survival * width)
    return shifted


def _odds(chance: float) -> float:
    bounded = min(max(chance, 1e-4), 1 - 1e-4)
    return bounded / (1 - bounded)
