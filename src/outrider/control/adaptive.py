"""The controller: drafts only where that makes the text come sooner. No torch.

Everything is one quotient: expected tokens of a round over its expected time. Before the drafters
work it chooses who drafts and how far (`plan`); after they have, which of their nodes are worth a row
of the target's forward (`select`). Gains come from what was accepted, times from what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from operator import ge, is_
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.control.costs import Costs
from outrider.control.policy import Load, RoundStats
from outrider.control.record import Floats, Record
from outrider.core import Arm, Drafts, Plan

__all__ = ["Adaptive"]

_LENGTHS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])
_STEP = {int(length): step for step, length in enumerate(_LENGTHS)}
_SAMPLED, _SAMPLED_DRAFTS = 8, 4  # every so many plain rounds are timed, and rounds that draft
_LEARNT = 64  # rounds; before that all are timed
_REPRICE = 128  # rounds for which prices stand, when many have been seen
_WORTH = 1.04  # a draft must promise this much more than none: catching up and changing course cost too
_WORTH_TOGETHER = 0.04  # more for twice as many: they end one by one, and who is left shares its rounds with fewer
_HEARD = 8  # sequences whose verdicts a round thinks over, in turn
_THOUGHTS = 32  # rounds over which the time they take is averaged
_TRIAL, _NEARLY = 4, 0.95  # rounds in which all try what does not quite seem to pay, and how near to that it must be
_SAVED = 8.0  # plain rounds that may be saved up for probes
_PROBES = 0.002  # share of the time that may go into trying what does not seem to pay
_FIRST_PROBES = 32.0  # plain rounds of one sequence that may go into trying what is not known at all
_PROBE_LENGTHS = (8, 2)  # in turn
_REPLAN = 12  # rounds a plan stands
_LONGEST = 128  # where nothing has paid for long
_FEWER = 0.75  # of the sequences that a plan was made for: where many do not pay, few may
_FEW = 4  # sequences among which one newcomer is planned for at once, or as many in proportion
_POOR, _ENOUGH = 0.8, 4  # of the rate promised, and the rounds over which less than that calls for another plan
_SHORT = 8  # tokens left to a sequence for which drafting is not begun any more
_NEVER = (0, 0)


class _Timed(NamedTuple):
    """A round and what it took."""

    stats: RoundStats
    context: int
    many: int  # sequences
    asked: list[tuple[str, int, int]]  # arms that drafted, for how many, how far
    began: bool  # somebody had not used its arm in the round before


class Adaptive:
    """Chooses arm and length for every sequence, prunes what they propose, and learns from every round.

    A plan stands for a few rounds, and for more and more of them while drafting does not pay: what is off
    must cost nothing.
    """

    def __init__(self, arms: Seq[Arm], costs: Costs) -> None:
        self.arms = arms
        self.costs = costs
        self._record = Record(arms)
        self._record.restore(costs.accepted)
        self._standing: dict[Hashable, tuple[int, int]] = {}  # arm and length, of everyone planned for
        self._who: Seq[Hashable] = ()
        self._many = 0  # sequences that the plan was made for
        self._complete = False  # all of them are planned for
        self._age, self._every = 0, 0  # of the standing plan, in rounds, and how old it may get
        self._rate = 1.0  # tokens per second that the standing plan promises
        self._tried = False  # it is a trial of all
        self._gains: dict[Hashable, float] = {}  # seconds that the standing plan saves each sequence
        self._hopeless: set[int] = set()  # arms that could not pay if every guess came true
        self._price_lists: dict[tuple[int, int, int, int], tuple[float, Floats]] = {}
        self._priced = 0  # rounds
        self._times: dict[tuple[int, int, int], list[float]] = {}  # of a round with 0, 1, ... further rows, by load
        self._expected: dict[tuple[tuple[int, ...], ...], float] = {}  # seconds of proposals, by arms and lengths
        self._brought = [0, 0.0, 0.0]  # by the standing plan: rounds, tokens, seconds
        self._credit = 0.0  # seconds that may be lost on probes
        self._earned = 0.0  # of them, by the last round
        self._grant: float | None = None  # the same, on arms not known yet
        self._next_probe = 0.0  # what the next one would cost
        self._turn = 0  # of probes, over sequences and arms
        self._probe: tuple[Hashable, int] | None = None  # who tries which arm this round
        self._again: tuple[Hashable, int] | None = None  # a probe that brought no draft is tried once more: its arm just woke
        self._paid = 0.0  # seconds expected to be lost on it
        self._once_more = False  # what is tried is that nobody drafts: the first such round is not like others
        self._was_plain = True  # the last round
        self._pondered = False  # while its forward ran: that may have ended long before it was heard of
        self._steady = False  # thinking it over changed nothing last time
        self._timed: list[_Timed] = []  # rounds not entered in the costs yet
        self._thought: dict[tuple[int, bool], float] = {}  # seconds of deciding in a round, by sequences and whether it plans
        self._drafted: set[tuple[Hashable, int]] = set()  # who used which arm in the last round
        self._load: Load | None = None
        self._plan = Plan(())
        self._users: dict[int, list[int]] = {}  # sequences that draft by it, by arm
        self._settled = False  # it is the standing one, made for everyone, and nothing is tried
        self._resting = False  # and nobody drafts

    def keep(self, path: Path) -> None:
        """Write what was measured and what was accepted, for the next start on this machine."""
        self._think()
        self.costs.accepted = self._record.as_dict()
        self.costs.save(path)

    def arms_named(self, method: str) -> list[int]:
        """Arms a request may use that asked for one method: its own, without company."""
        return [i for i, arm in enumerate(self.arms) if arm.name == method]

    def plan(self, load: Load) -> Plan:
        """Who drafts, with what, how far."""
        self._load, self._probe = load, None
        self._age += 1
        if not self._stands(load):
            self._plan = self._anew(load)
        return self._plan if self._goes_on() else self._plan._replace(again=False)

    def _anew(self, load: Load) -> Plan:
        """The standing plan for this round, thought over where that is due, or with something tried in it."""
        due = self._is_due(load)
        if due:
            self._replan(load)
        plan = stood = self._stood(load)
        if self._once_more:
            plan, self._once_more = _nothing(len(load.keys)), False
        elif not due and self._again is not None and self._again[0] in load.keys:
            plan = self._probed(load, stood, *self._again)
        elif due or self._credit >= self._next_probe:
            plan = self._with_probe(load, stood)
        self._settled = plan is stood and self._complete and self._again is None
        self._resting = self._settled and not any(plan.lengths)
        self._users = self._drafting(plan)
        return plan._replace(whole=self._is_whole(plan), again=True)

    def _goes_on(self) -> bool:
        """Whether the next round's plan will be this one's too, as far as can be told."""
        stays = self._age + 1 < self._every or (self._plan.whole and self._steady)
        return self._settled and stays and self._credit + self._earned < self._next_probe

    def _replan(self, load: Load) -> None:
        """Think about everyone, and for how long that shall stand."""
        self._age, self._who, self._many, self._settled = 0, tuple(load.keys), len(load.keys), False
        before = self._standing
        self._best(load)
        self._steady = before == self._standing
        drafting = [key for key, (_, length) in self._standing.items() if length]
        if self._tried or any(key in before and not before[key][1] for key in drafting):
            self._every = _TRIAL  # what was begun anew is soon looked at
        elif drafting:
            self._every = max(_REPLAN, len(load.keys) // 2)
        else:
            self._every = min(2 * max(self._every, _REPLAN), _LONGEST)

    def _is_whole(self, plan: Plan) -> bool:
        """Whether the drafts may go on unseen: to be pruned they would have to be waited for."""
        used = {arm for arm, length in zip(plan.arms, plan.lengths, strict=True) if length}
        return len(used) == 1 and self.arms[used.pop()].ahead

    def _stands(self, load: Load) -> bool:
        """Whether the last round's plan is this one's too: the same sequences, and nothing to think over or to try."""
        if not self._settled or self._age >= self._every or self._credit >= self._next_probe:
            return False
        if len(load.keys) != len(self._who) or not all(map(is_, load.keys, self._who)):
            return False
        return self._resting or all(map(ge, load.room, self._plan.lengths))

    def _is_due(self, load: Load) -> bool:
        """Whether to think again: the plan is old, was made for more sequences, or somebody could draft who is not in it."""
        if self._age >= self._every or len(load.keys) < _FEWER * self._many:
            return True
        keys, who = load.keys, self._who
        if self._complete and len(keys) == len(who) and all(map(is_, keys, who)):
            return False
        self._who, self._complete = tuple(keys), all(key in self._standing for key in keys)
        if self._complete:
            return False
        new = sum(room > 0 and key not in self._standing for key, room in zip(keys, load.room, strict=True))
        return new > 0 and (new * _FEW >= len(keys) or self._age >= _REPLAN)

    def _stood(self, load: Load) -> Plan:
        """The standing plan for those who run now, as far as they have room."""
        if not any(length for _, length in self._standing.values()):
            return _nothing(len(load.keys))
        settings = [self._standing.get(key, _NEVER) for key in load.keys]
        lengths = tuple(min(length, room) for (_, length), room in zip(settings, load.room, strict=True))
        return Plan(lengths, arms=tuple(arm for arm, _ in settings))

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        """Keep the nodes whose tokens pay for their rows, over all sequences at once."""
        if not any(self._plan.lengths):
            return drafts
        pool: list[tuple[float, int, int]] = []
        rows = zip(load.keys, self._plan.arms, self._plan.lengths, drafts.on_host(), drafts.survival.tolist(), strict=True)
        turn, many = self._priced * _HEARD, len(load.keys)
        for b, (key, arm, length, tree, says) in enumerate(rows):
            if length and not self._woke(key, arm, len(tree.tokens)):
                heard = (b - turn) % many < _HEARD or (self._probe is not None and key is self._probe[0])
                if heard or not self._plan.whole:
                    survival = self._record.expect(key, arm, length, tree.parents, says, heard)
                    pool += [(-own, b, i) for i, own in enumerate(survival)]
        if self._plan.whole:
            if self._age + 1 >= self._every:
                self._replan(load)  # the next round's, while the forward runs
                self._pondered = True
            return drafts
        pool.sort()
        count = self._worthwhile([-node[0] for node in pool], load)
        if count == len(pool):
            return drafts
        kept: list[list[int]] = [[] for _ in load.keys]
        for _, b, i in pool[:count]:
            kept[b].append(i)
        if self._probe is not None:  # a probe shows something only where a node is judged
            b = load.keys.index(self._probe[0])
            kept[b] = kept[b] or [i for _, own, i in pool if own == b][:1]
        for key, nodes in zip(load.keys, kept, strict=True):
            nodes.sort()
            self._record.keep(key, nodes)
        return drafts.subset(kept)

    def _woke(self, key: Hashable, arm: int, nodes: int) -> bool:
        """Whether this is a probe's first try and brought nothing: the arm may have slept, and can guess after this round."""
        first = self._probe == (key, arm) and self._again is None and nodes == 0
        if self._probe is not None and key is self._probe[0]:
            self._again = (key, arm) if first else None
        return first

    def observe(self, stats: RoundStats) -> None:
        """Learn what was accepted and what it cost."""
        load, self._load = self._load, None
        if load is None:
            return
        self._priced += 1
        seconds = stats.propose_s + stats.forward_s + stats.rest_s
        self._earned = _PROBES * seconds
        self._credit = min(self._credit + self._earned, _SAVED * seconds)
        if self._resting and self._priced % _SAMPLED:
            return
        many = len(load.keys)
        drafted = [(key, arm) for arm, own in self._users.items() for key in map(load.keys.__getitem__, own)]
        began, self._drafted = not self._drafted.issuperset(drafted), set(drafted)
        often = 1 if self._priced < _LEARNT or self._probe is not None else _SAMPLED_DRAFTS if drafted else _SAMPLED
        before, self._was_plain = self._was_plain, not drafted
        pondered, self._pondered = self._pondered, False
        if self._priced % often == 0 and (drafted or before) and stats.rows and not pondered:
            asked = [(self.arms[arm].name, len(own), max(self._plan.lengths[b] for b in own)) for arm, own in self._users.items()]
            self._timed.append(_Timed(stats, load.context, many, asked, began))
        if self._priced % _REPRICE == 0 or self._priced in (8, 16, 32, 64):
            self._price_lists, self._times, self._expected = {}, {}, {}
        if self._probe is not None:  # it cost what it took: a drafter that sat out long has much to read
            self._pay(max(seconds - self._round_times(load, 1)[0] - self._paid, 0.0), granted=True)
        if not drafted:
            return
        when = many, self._age == 0
        usual = self._thought.get(when, 0.0)  # at first it is taken to cost nothing: else it would never be tried
        self._thought[when] = usual + (stats.think_s - usual) / _THOUGHTS
        if load.rows == load.emitting:
            self._judge_plan(seconds, stats, load, began)
        for key, path in zip(load.keys, stats.paths, strict=True):
            self._record.learn(key, path)
            if self._probe is not None and key is self._probe[0]:
                self._credit += min(len(path) / self._rate, self._paid)  # what it brought, it did not cost
                if path:
                    self._every = 0  # worth thinking over
        self._probe = None

    def _judge_plan(self, seconds: float, stats: RoundStats, load: Load, began: bool) -> None:
        """Charge a trial what it lost against plain rounds; call for another plan after poor rounds."""
        plain = self._round_times(load, 1)[0] * (1.0 + sum(map(len, stats.paths)) / load.emitting)
        if self._tried:
            self._credit -= max(seconds + stats.think_s - plain, 0.0)
        elif not began:
            brought = self._brought
            brought[0] += 1
            brought[1] += load.emitting + sum(map(len, stats.paths))
            brought[2] += seconds + self._thinking(len(load.keys))
            if brought[0] >= _ENOUGH and brought[1] < _POOR * self._rate * brought[2]:
                self._every = 0  # think again at once

    def _enter(self, timed: _Timed) -> None:
        """What a round's parts took; arms that drafted side by side share the time as they were expected to.

        Where somebody has just begun to use its arm, it took less at most: reading what came before costs once.
        """
        stats, context, many, asked, began = timed
        self.costs.observe_forward(stats.rows, context, stats.forward_s)
        self.costs.observe_rest(many, stats.rest_s)
        if not asked:
            return
        expected = [self.costs.proposal(*one, context) for one in asked]
        known = began and all(self.costs.knows_proposal(name) for name, _, _ in asked)
        if known and stats.propose_s > sum(expected):
            return
        for one, share in zip(asked, expected, strict=True):
            part = share / sum(expected) if sum(expected) > 0 else 1 / len(asked)
            self.costs.observe_proposal(*one, stats.propose_s * part)

    def forget(self, key: Hashable) -> None:
        """A sequence is over; nothing here may keep its text alive."""
        self._record.forget(key)
        self._who, self._again, self._drafted, self._settled = (), None, set(), False
        self._standing.pop(key, None)
        self._gains.pop(key, None)

    def _best(self, load: Load) -> None:
        """Plan for everyone: the arm and length that make tokens over time largest.

        First the best single setting for all gives the rate a token must earn its time at; then every
        sequence takes whatever brings it most beyond that price, or nothing.
        """
        self._gains, self._hopeless, self._brought = {}, set(), [0, 0.0, 0.0]
        self._think()
        self._record.now = self._priced
        self._record.meet(load.keys, load.kinds or [0] * len(load.keys))
        lengths, arms = [0] * len(load.room), [0] * len(load.room)
        self._tried = False
        able = self._able(load)
        if able and self.arms:
            every = range(len(self.arms))
            gains = self._record.curves([load.keys[b] for b in able])[:, :, _LENGTHS - 1]
            if len(able) > 1:  # what is hardly known is tried by one, not by all
                gains[self._record.strange([load.keys[b] for b in able])] = 0.0
            base, price = self._prices(load, len(able))
            rates = (load.emitting + gains.sum(0)) / (base + price * len(able))
            self._rate = max(float(rates.max()), _worth(load) * load.emitting / base)
            hopes = (load.emitting + len(able) * _LENGTHS) / (base + price * len(able))  # if every guess came true
            self._hopeless = {arm for arm in every if hopes[arm].max() < self._rate}
            steps = rates.argmax(1)  # those who share an arm share its length: the longest draft makes all of them wait
            worth = (gains - self._rate * price)[:, every, steps]
            for own, b in zip(worth, able, strict=True):
                if (allowed := load.arms[b] if load.arms else None) is not None:
                    own[[arm for arm in every if arm not in allowed]] = -np.inf
                arm = int(own.argmax())
                best = max(float(own[arm]), 0.0)
                self._gains[load.keys[b]] = best / self._rate
                if best > 0:
                    lengths[b], arms[b] = int(_LENGTHS[steps[arm]]), arm
            self._drop_the_lonely(load, dict(zip(able, gains, strict=True)), lengths, arms)
            if not any(lengths) and not any(load.arms):
                self._try_together(load, able, rates, base, lengths, arms)
        self._standing = {key: (arms[b], lengths[b]) for b, key in enumerate(load.keys) if load.room[b]}
        self._complete = len(self._standing) == len(load.keys)

    def _try_together(self, load: Load, able: Seq[int], rates: Floats, base: float, lengths: list[int], arms: list[int]) -> None:
        """Where drafting nearly seems to pay, all do it for a few rounds if what may be lost on probes covers it.

        What is believed of costs and texts may be wrong, and one sequence's probe shows little of what it is when all draft.
        """
        arm, step = np.unravel_index(int(rates.argmax()), rates.shape)
        plain = load.emitting / base
        rate = float(rates[arm, step])
        if _NEARLY * plain < rate and _TRIAL * base * (plain / rate - 1.0) <= self._credit:
            self._tried = True
            for b in able:
                lengths[b], arms[b] = int(_LENGTHS[step]), int(arm)

    def _able(self, load: Load) -> list[int]:
        """Who may draft: near its end nobody begins, for a drafter would read the whole text to guess a few tokens."""
        return [
            b
            for b, (key, room) in enumerate(zip(load.keys, load.room, strict=True))
            if room >= _SHORT or (room > 0 and self._standing.get(key, _NEVER)[1])
        ]

    def _think(self) -> None:
        """Enter what the last rounds showed: many at once, because the first of them fetches everything it touches."""
        self._record.think()
        for timed in self._timed:
            self._enter(timed)
        self._timed.clear()

    def _thinking(self, many: int) -> float:
        """Seconds that deciding about drafts takes in a round."""
        return self._thought.get((many, False), 0.0) + self._thought.get((many, True), 0.0) / _REPLAN

    def _prices(self, load: Load, able: int) -> tuple[float, Floats]:
        """Seconds of a plain round, and (arms, lengths) what it costs one of the sequences when all draft so."""
        found = self._price_lists.get(key := (load.rows, load.emitting, able, load.context.bit_length()))
        if found is None:
            found = self._price_lists[key] = self._price(load, able)
        return found

    def _base(self, load: Load) -> float:
        """Seconds of a plain round of those who emit. Prompts read beside them make no draft worth more."""
        rest = self.costs.rest(len(load.keys))
        return self.costs.forward(min(load.emitting or load.rows, load.rows), load.context) + rest

    def _price(self, load: Load, able: int) -> tuple[float, Floats]:
        base, read = self._base(load), self.costs.forward(load.rows, load.context)
        price = np.full((len(self.arms), len(_LENGTHS)), np.inf)
        thinking = self._thinking(len(load.keys))
        for s, length in enumerate(_LENGTHS.tolist()):
            extra = self.costs.forward(load.rows + length * able, load.context) - read
            for a, arm in enumerate(self.arms):
                if length <= arm.most:
                    price[a, s] = (self.costs.proposal(arm.name, able, length, load.context) + extra + thinking) / able
        return base, price

    def _drop_the_lonely(self, load: Load, gains: Mapping[int, Floats], lengths: list[int], arms: list[int]) -> None:
        """An arm that few chose costs each of them more than its share among all."""
        for arm, own in self._drafting(Plan(tuple(lengths), arms=tuple(arms))).items():
            if len(own) < len(gains):
                gain = sum(float(gains[b][arm, _STEP[lengths[b]]]) for b in own)
                rows = sum(lengths[b] for b in own)
                cost = self.costs.forward(load.rows + rows, load.context) - self.costs.forward(load.rows, load.context)
                cost += self.costs.proposal(self.arms[arm].name, len(own), max(lengths[b] for b in own), load.context)
                if gain < self._rate * cost:
                    for b in own:
                        lengths[b] = 0

    def _worthwhile(self, survival: Seq[float], load: Load) -> int:
        """How many of the likeliest nodes to keep; drafting them is paid for already."""
        times, spent = self._round_times(load, len(survival) + 1), self._spent(load)
        if load.rows > load.emitting:
            spent -= times[0] - self._base(load)
        tokens, count = float(load.emitting), 0
        best = tokens / (times[0] + spent)
        for n, own in enumerate(survival, 1):
            tokens += own
            if (rate := tokens / (times[n] + spent)) > best:
                best, count = rate, n
        return count

    def _spent(self, load: Load) -> float:
        """Seconds that the plan's proposals took, as expected."""
        key = (self._plan.arms, self._plan.lengths)
        if key not in self._expected:
            self._expected[key] = self._thinking(len(load.keys)) + sum(
                self.costs.proposal(self.arms[arm].name, len(own), max(self._plan.lengths[b] for b in own), load.context)
                for arm, own in self._users.items()
            )
        return self._expected[key]

    def _round_times(self, load: Load, count: int) -> list[float]:
        """Seconds of a round with 0, 1, ... further rows."""
        known = self._times.setdefault((load.rows, len(load.keys), load.context.bit_length()), [])
        if len(known) < count:
            rest = self.costs.rest(len(load.keys))
            known += (self.costs.forward(load.rows + n, load.context) + rest for n in range(len(known), max(count, 17)))
        return known

    def _drafting(self, plan: Plan) -> dict[int, list[int]]:
        """Sequences that draft, by arm."""
        users: dict[int, list[int]] = {}
        for b, (arm, length) in enumerate(zip(plan.arms, plan.lengths, strict=True)):
            if length:
                users.setdefault(arm, []).append(b)
        return users

    def _with_probe(self, load: Load, plan: Plan) -> Plan:
        """Now and then one sequence tries something else, as far as the probes' share of the time allows.

        One of the things tried is that nobody drafts, so that the cost of plain rounds stays known.
        """
        if self._grant is None:
            self._grant = _FIRST_PROBES * (1.0 - self._record.known) * self.costs.forward(1, load.context)
        able = self._able(load)
        if not able or not self.arms:
            return plan
        b, arm = able[self._turn // (len(self.arms) + 1) % len(able)], self._turn % (len(self.arms) + 1)
        cost = self._probe_cost(load, plan, b, arm)
        granted = arm < len(self.arms) and bool(self._record.strange([load.keys[b]])[0, arm])
        self._next_probe = 0.0 if cost == math.inf else cost - granted * self._grant
        if self._credit < self._next_probe:
            return plan  # until there is enough
        self._turn += 1
        self._next_probe = 0.0  # the next in turn is looked at in the next round
        if cost == math.inf:
            return plan
        self._paid = cost
        self._pay(cost, granted)
        if arm == len(self.arms):
            self._once_more = True
            return _nothing(len(plan.lengths))
        return self._probed(load, plan, load.keys[b], arm)

    def _probe_length(self, arm: int) -> int:
        return min(_PROBE_LENGTHS[self._turn // (len(self.arms) + 1) % len(_PROBE_LENGTHS)], self.arms[arm].most)

    def _pay(self, seconds: float, granted: bool) -> None:
        """For a probe: as far as it goes from what is granted to strangers."""
        gift = min(seconds, self._grant or 0.0) if granted else 0.0
        self._grant = (self._grant or 0.0) - gift
        self._credit -= seconds - gift

    def _probed(self, load: Load, plan: Plan, key: Hashable, arm: int) -> Plan:
        """The plan with a change: one sequence tries an arm."""
        b = load.keys.index(key)
        lengths, arms = list(plan.lengths), list(plan.arms)
        lengths[b], arms[b] = min(self._probe_length(arm), load.room[b]), arm
        if lengths[b] == 0:
            self._again = None
            return plan
        self._probe = (key, arm)
        return plan._replace(lengths=tuple(lengths), arms=tuple(arms))

    def _probe_cost(self, load: Load, plan: Plan, b: int, arm: int) -> float:
        """Seconds lost if sequence b tries an arm for nothing; infinite where it may not, does so anyway or has no hope."""
        if arm == len(self.arms):
            return 2 * sum(self._gains.values()) if any(plan.lengths) else math.inf
        allowed = load.arms[b] if load.arms else None
        if arm in self._hopeless or (plan.lengths[b] and plan.arms[b] == arm) or (allowed is not None and arm not in allowed):
            return math.inf
        name, length = self.arms[arm].name, self._probe_length(arm)
        users = self._drafting(plan).get(arm, [])
        proposal = self.costs.proposal(name, len(users) + 1, length, load.context)
        if users:
            proposal -= self.costs.proposal(name, len(users), length, load.context)
        rows = load.rows + sum(plan.lengths)
        extra = self.costs.forward(rows + length, load.context) - self.costs.forward(rows, load.context)
        return self._gains.get(load.keys[b], 0.0) + max(proposal, 0.0) + extra


def _worth(load: Load) -> float:
    return _WORTH + _WORTH_TOGETHER * math.log2(len(load.keys))


@lru_cache(maxsize=256)
def _nothing(batch: int) -> Plan:
    return Plan((0,) * batch, arms=(0,) * batch)
