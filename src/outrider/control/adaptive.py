"""The controller: drafts only where that makes the text come sooner. No torch.

Everything is one quotient: expected tokens of a round over its expected time. Before the drafters
work it chooses who drafts and how far (`plan`); after they have, which of their nodes are worth a row
of the target's forward (`select`). Gains come from what was accepted, times from what was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from operator import ge, is_
from pathlib import Path
from typing import Any, NamedTuple

from outrider.control.allowance import Allowance
from outrider.control.beginnings import Beginnings
from outrider.control.costs import Costs
from outrider.control.policy import Load, RoundStats
from outrider.control.prices import REPLAN, PriceList, Prices
from outrider.control.record import LENGTHS, Record
from outrider.core import Arm, Drafts, Plan

__all__ = ["Adaptive"]

_SAMPLED, _SAMPLED_DRAFTS = 8, 4  # every so many plain rounds are timed, and rounds that draft
_LEARNT = 64  # rounds; before that all are timed
_REPRICE = 128  # rounds for which prices stand, when many have been seen
_WORTH = 1.05  # a draft must promise this much more than none: catching up and changing course cost too
_WORTH_TOGETHER = 0.06  # more for twice as many: they end one by one, and who is left shares its rounds with fewer
_HEARD = 8  # sequences whose verdicts a round thinks over, in turn
_TRIAL, _NEARLY = 4, 0.95  # rounds in which all try what does not quite seem to pay, and how near to that it must be
_PROBE_LENGTHS = (8, 2)  # in turn
_STEADY = 24  # where thinking it over changed nothing
_LONGEST = 128  # where nothing has paid for long
_FEWER = 0.75  # of the sequences that a plan was made for: where many do not pay, few may
_FEW = 4  # sequences among which one newcomer is planned for at once, or as many in proportion
_POOR, _ENOUGH = 0.8, 4  # of the rate promised, and the rounds over which less than that calls for another plan
_HIGHEST = 0.7  # floor under a draft
_SHORT = 8  # tokens left to a sequence for which drafting is not begun any more
_NEVER = (0, 0)


class _Timed(NamedTuple):
    """A round and what it took."""

    stats: RoundStats
    context: int
    many: int  # sequences
    asked: list[tuple[str, int, int]]  # arms that drafted, for how many, how many nodes each
    began: bool  # somebody had not used its arm in the round before
    newcomers: int  # sequences that had never used theirs


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
        self._usual = 1.0  # that rounds of it have, if it is right
        self._tried = False  # it is a trial of all
        self._gains: dict[Hashable, float] = {}  # seconds that the standing plan saves each sequence
        self._hopes = [math.inf] * len(arms)  # by arm, the rate if every guess came true
        self._promising: Seq[int] = ()  # arms that may be better than what is used, for all that has been seen of them
        self._prices = PriceList(arms, costs, self._record)
        self._proposed: dict[int, int] = {}  # most nodes of a sequence, by arm, this round
        self._priced = 0  # rounds
        self._spent = 0.0  # seconds that the plan's proposals take, as expected
        self._brought = [0, 0.0, 0.0]  # by the standing plan: rounds, tokens, seconds
        self._allowance = Allowance()
        self._turn = 0  # of probes, over sequences and arms
        self._probes = 0  # so far
        self._granted = [0] * len(arms)  # those by arm that the grant for what is hardly known was meant for
        self._probe: tuple[Hashable, int] | None = None  # who tries which arm this round
        self._again: tuple[Hashable, int] | None = None  # a probe that brought no draft is tried once more: its arm just woke
        self._paid = 0.0  # seconds expected to be lost on it
        self._once_more = False  # what is tried is that nobody drafts: the first such round is not like others
        self._was_plain = True  # the last round
        self._pondered = False  # while its forward ran: that may have ended long before it was heard of
        self._steady = False  # thinking it over changed nothing last time
        self._timed: list[_Timed] = []  # rounds not entered in the costs yet
        self._beginnings = Beginnings()
        self._load: Load | None = None
        self._plan = Plan(())
        self._users: dict[int, list[int]] = {}  # sequences that draft by it, by arm
        self._settled = False  # it is the standing one, made for everyone, and nothing is tried
        self._resting = False  # and nobody drafts

    @property
    def accepted(self) -> dict[str, Any]:
        """What is known about each arm, as plain data."""
        return self._record.as_dict()

    def keep(self, path: Path) -> None:
        """Write what was measured and what was accepted, for the next start on this machine."""
        self._think()
        self.costs.accepted = self.accepted
        self.costs.save(path)

    def arms_named(self, method: str) -> list[int]:
        """Arms a request may use that asked for one method: its own, without company."""
        return [i for i, arm in enumerate(self.arms) if arm.name == method]

    def plan(self, load: Load) -> Plan:
        """Who drafts, with what, how far."""
        self._load, self._probe = load, None
        self._age += 1
        if self._stands(load):
            self._beginnings.none()
        else:
            self._plan = self._anew(load)
            self._note_users(load)
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
        elif due or self._allowance.is_enough:
            plan = self._with_probe(load, stood)
        self._settled = plan is stood and self._complete and self._again is None
        self._resting = self._settled and not any(plan.lengths)
        return plan._replace(whole=self._is_whole(plan), floor=self._floor(load, plan), again=True)

    def _floor(self, load: Load, plan: Plan) -> float:
        """The survival under which a further node brings less than drawing it and verifying it take."""
        users = self._drafting(plan)
        if len(users) != 1 or self._probe is not None:
            return 0.0
        ((arm, own),) = users.items()
        return min(self._rate * self._prices.node(load, arm, len(own)), _HIGHEST)

    def _note_users(self, load: Load) -> None:
        """Who drafts by which arm in this round's plan, who of them begins, and what their proposals should take."""
        self._users = self._drafting(self._plan)
        self._beginnings.note(self._users, load.keys)
        self._spent = self._prices.thinking(len(load.keys))
        for arm, own in self._users.items():
            length = max(self._plan.lengths[b] for b in own)
            nodes = self._record.nodes(load.keys[own[0]], arm)[bisect_left(LENGTHS, length)]
            self._spent += self.costs.proposal(self.arms[arm].name, len(own), min(nodes, length), load.context)

    def _goes_on(self) -> bool:
        """Whether the next round's plan will be this one's too, as far as can be told."""
        stays = self._age + 1 < self._every or (self._plan.whole and self._steady)
        return self._settled and stays and not self._allowance.will_be_enough

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
            self._every = max(_STEADY if self._steady else REPLAN, len(load.keys) // 2)
        else:
            self._every = min(2 * max(self._every, REPLAN), _LONGEST)

    def _is_whole(self, plan: Plan) -> bool:
        """Whether the drafts may go on unseen: to be pruned they would have to be waited for."""
        used = {arm for arm, length in zip(plan.arms, plan.lengths, strict=True) if length}
        return len(used) == 1 and self.arms[used.pop()].ahead

    def _stands(self, load: Load) -> bool:
        """Whether the last round's plan is this one's too: the same sequences, and nothing to think over or to try."""
        if not self._settled or self._age >= self._every or self._allowance.is_enough:
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
        return new > 0 and (new * _FEW >= len(keys) or self._age >= REPLAN)

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
        rows = zip(load.keys, self._plan.arms, self._plan.lengths, drafts.per_sequence, drafts.survival, strict=True)
        turn, many = self._priced * _HEARD, len(load.keys)
        self._proposed = {}
        for b, (key, arm, length, tree, says) in enumerate(rows):
            if length:
                self._proposed[arm] = max(self._proposed.get(arm, 0), len(tree.tokens))
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
        many = len(load.keys)
        self._allowance.earn(seconds, many)
        if self._resting and self._priced % _SAMPLED:
            return
        drafted = bool(self._users)
        often = 1 if self._priced < _LEARNT or self._probe is not None else _SAMPLED_DRAFTS if drafted else _SAMPLED
        before, self._was_plain = self._was_plain, not drafted
        pondered, self._pondered = self._pondered, False
        if self._priced % often == 0 and (drafted or before) and stats.rows and not pondered:
            asked = [(self.arms[arm].name, len(own), self._proposed.get(arm, 0)) for arm, own in self._users.items()]
            self._timed.append(_Timed(stats, load.context, many, asked, self._beginnings.begun, self._beginnings.newcomers))
        if self._priced % _REPRICE == 0 or self._priced in (8, 16, 32, 64):
            self._prices.drop()
        if self._probe is not None:  # it cost what it took: a drafter that sat out long has much to read
            self._probes += 1
            tokens = load.emitting + sum(map(len, stats.paths))
            self._allowance.pay(seconds + stats.think_s - tokens / self._usual - self._paid, many, granted=True)
        if not drafted:
            return
        self._prices.note_thinking(many, self._age == 0, stats.think_s)
        if load.rows == load.emitting:
            self._judge_plan(seconds, stats, load)
        for key, path in zip(load.keys, stats.paths, strict=True):
            self._record.learn(key, path)
            if path and self._probe is not None and key is self._probe[0]:
                self._every = 0  # worth thinking over
        self._probe = None

    def _judge_plan(self, seconds: float, stats: RoundStats, load: Load) -> None:
        """Charge a trial what it lost against plain rounds; call for another plan after poor rounds."""
        tokens = load.emitting + sum(map(len, stats.paths))
        if self._tried:
            plain = self._prices.times(load, 1)[0] * tokens / load.emitting
            self._allowance.pay(max(seconds + stats.think_s - plain, 0.0), len(load.keys), granted=False)
        elif not self._beginnings.begun:
            brought = self._brought
            brought[0] += 1
            brought[1] += tokens
            brought[2] += seconds + self._prices.thinking(len(load.keys))
            if brought[0] >= _ENOUGH and brought[1] < _POOR * self._rate * brought[2]:
                self._every = 0  # think again at once, and of what things cost too
                self._prices.drop()

    def _enter(self, timed: _Timed) -> None:
        """What a round's parts took; arms that drafted side by side share the time as they were expected to.

        Where somebody has just begun to use its arm, it took less at most: reading what came before costs once.
        """
        stats, context, many, asked, began, newcomers = timed
        self.costs.observe_forward(stats.rows, context, stats.forward_s)
        if not asked:
            self.costs.observe_rest(many, stats.rest_s)
            return
        usual = self.costs.rest(many) or stats.rest_s
        drafts_s = stats.propose_s + max(stats.rest_s - usual, 0.0)  # they take time after the forward too
        asleep = began and not all(nodes for _, _, nodes in asked)  # who proposes nothing at first has not been awake
        asked = [(name, own, max(nodes, 1)) for name, own, nodes in asked]
        expected = [self.costs.proposal(*one, context) for one in asked]
        known = began and all(self.costs.knows_proposal(name) for name, _, _ in asked)
        if asleep or (known and drafts_s > sum(expected)):
            extra = drafts_s - sum(expected)
            if len(asked) == 1 and newcomers and extra > 0.0:
                (arm,) = self.arms_named(asked[0][0])
                self._beginnings.learn(arm, newcomers, extra)
            return
        for one, share in zip(asked, expected, strict=True):
            part = share / sum(expected) if sum(expected) > 0 else 1 / len(asked)
            self.costs.observe_proposal(*one, drafts_s * part)

    def forget(self, key: Hashable) -> None:
        """A sequence is over; nothing here may keep its text alive."""
        self._record.forget(key)
        self._beginnings.forget(key)
        self._who, self._again, self._settled = (), None, False
        self._standing.pop(key, None)
        self._gains.pop(key, None)

    def _best(self, load: Load) -> None:
        """Plan for everyone: the arm and length that make tokens over time largest.

        First the best single setting for all gives the rate a token must earn its time at; then every
        sequence takes whatever brings it most beyond that price, or nothing.
        """
        self._gains, self._brought = {}, [0, 0.0, 0.0]
        self._think()
        self._record.now = self._priced
        self._record.meet(load.keys, load.kinds or [0] * len(load.keys))
        self._tried = False
        able = self._able(load)
        chosen: dict[int, tuple[int, int]] = {}  # arm and step, by sequence
        if able and self.arms:
            curves = {b: self._record.curves(load.keys[b]) for b in able}
            if len(able) > 1:
                self._leave_out_strangers(load, curves)
            prices = self._prices.of(load, len(able))
            rates = self._rates(load, list(curves.values()), prices)
            steps = [max(range(len(own)), key=own.__getitem__) for own in rates]  # who shares an arm shares its length
            plain = load.emitting / prices.base
            self._rate = max(*map(max, rates), _worth(load) * plain)
            self._usual = plain
            self._hopes = prices.hopes
            promised = self._rates(load, [self._record.hopes(load.keys[able[0]])] * len(able), prices)
            untimed = self._untimed()
            self._promising = [a for a, own in enumerate(promised) if a in untimed or max(own, default=0.0) > self._rate]
            for b, own in curves.items():
                arm, worth = self._worth_most(load, b, own, prices, steps)
                self._gains[load.keys[b]] = worth / self._rate
                if worth > 0:
                    chosen[b] = arm, steps[arm]
            self._drop_the_lonely(load, curves, chosen)
            if chosen:
                self._usual = max(map(max, rates))
            if not chosen and not any(load.arms):
                arm = max(range(len(rates)), key=lambda a: max(rates[a]))
                beginning = sum(self._beginnings.seconds(load.keys[b], arm) for b in able)
                if self._nearly_pays(plain, rates[arm][steps[arm]], prices.base, beginning):
                    self._tried = True
                    chosen = dict.fromkeys(able, (arm, steps[arm]))
        settings = {b: (arm, LENGTHS[step]) for b, (arm, step) in chosen.items()}
        self._standing = {key: settings.get(b, _NEVER) for b, key in enumerate(load.keys) if load.room[b]}
        self._complete = len(self._standing) == len(load.keys)

    def _untimed(self) -> list[int]:
        """Arms that have hardly drafted on this machine."""
        return [a for a, arm in enumerate(self.arms) if not self.costs.knows_proposal(arm.name, well=True)]

    def _leave_out_strangers(self, load: Load, curves: Mapping[int, list[list[float]]]) -> None:
        """What is hardly known is tried by one, not by all."""
        for b, own in curves.items():
            for arm in range(len(own)):
                if self._record.is_strange(load.keys[b], arm):
                    own[arm] = [0.0] * len(LENGTHS)

    def _rates(self, load: Load, curves: Seq[Seq[Seq[float]]], prices: Prices) -> list[list[float]]:
        """By arm and length: tokens a second when all draft so."""
        rates: list[list[float]] = []
        for arm, each in enumerate(prices.each):
            gains = curves[0][arm] if len(curves) == 1 else map(sum, zip(*(own[arm] for own in curves), strict=True))
            rates.append([
                (load.emitting + gain) / (prices.base + price * len(curves)) for gain, price in zip(gains, each, strict=False)
            ])  # fmt: skip
        return rates

    def _worth_most(self, load: Load, b: int, curves: list[list[float]], prices: Prices, steps: list[int]) -> tuple[int, float]:
        """The arm that brings a sequence most beyond the price of its time, in tokens."""
        allowed = load.arms[b] if load.arms else None
        best, most = 0, 0.0
        for arm, step in enumerate(steps):
            worth = curves[arm][step] - self._rate * prices.each[arm][step]
            if worth > most:  # it is brought for as many tokens as are left
                worth -= self._rate * self._beginnings.seconds(load.keys[b], arm) / load.room[b]
            if worth > most and (allowed is None or arm in allowed):
                best, most = arm, worth
        return best, most

    def _nearly_pays(self, plain: float, rate: float, base: float, beginning: float) -> bool:
        """Whether all shall do for a few rounds what does not quite seem to pay, if what may be lost on probes covers it.

        What is believed of costs and texts may be wrong, and one sequence's probe shows little of what it is when all draft.
        """
        return _NEARLY * plain < rate and _TRIAL * base * (plain / rate - 1.0) + beginning <= self._allowance.credit

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

    def _drop_the_lonely(self, load: Load, curves: Mapping[int, list[list[float]]], chosen: dict[int, tuple[int, int]]) -> None:
        """An arm that few chose costs each of them more than its share among all."""
        for arm in {arm for arm, _ in chosen.values()}:
            own = [b for b in chosen if chosen[b][0] == arm]
            if len(own) < len(curves):
                step = chosen[own[0]][1]
                gain = sum(curves[b][arm][step] for b in own)
                if gain < self._rate * self._prices.drafts(load, arm, LENGTHS[step], len(own)):
                    for b in own:
                        del chosen[b]

    def _worthwhile(self, survival: Seq[float], load: Load) -> int:
        """How many of the likeliest nodes to keep; drafting them is paid for already."""
        times, spent = self._prices.times(load, len(survival) + 1), self._spent
        if load.rows > load.emitting:
            spent -= times[0] - self._prices.base(load)
        tokens, count = float(load.emitting), 0
        best = tokens / (times[0] + spent)
        for n, own in enumerate(survival, 1):
            tokens += own
            if (rate := tokens / (times[n] + spent)) > best:
                best, count = rate, n
        return count

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
        allowance, many = self._allowance, len(load.keys)
        if not allowance.begun:
            unknown = max(1.0 - self._record.known, len(self._untimed()) / max(len(self.arms), 1))
            allowance.begin(self.costs.forward(1, load.context), unknown)
        able = self._able(load)
        if not able or not self.arms:
            return plan
        turns, gift = len(self.arms) + 1, allowance.gift(many)
        b = able[self._turn // turns % len(able)]
        costs = {arm: own for arm in range(turns) if (own := self._probe_cost(load, plan, b, arm)) < math.inf}
        if not costs:
            self._turn += turns
            allowance.next = math.inf
            return plan
        strange = [arm for arm in self._promising if arm in costs]
        if strange and gift > 0.0:  # what is hardly known is tried first, twice in a row: reading what came before costs once
            arm = min(strange, key=lambda own: (self._granted[own] // 2, costs[own]))
        else:
            arm = min(costs, key=lambda own: (own - self._turn) % turns)
        cost, granted = costs[arm], arm in strange
        allowance.next = cost - granted * gift if granted or self._every > _TRIAL else math.inf
        if not allowance.is_enough:
            return plan
        if granted:
            self._granted[arm] += 1
        self._turn += 1 if granted else (arm - self._turn) % turns + 1
        allowance.next = 0.0 if granted else math.inf  # of others one at most, until the plan is thought over
        self._paid = cost
        allowance.pay(cost, many, granted)
        if arm == len(self.arms):
            self._once_more = True
            return _nothing(len(plan.lengths))
        return self._probed(load, plan, load.keys[b], arm)

    def _probe_length(self, arm: int) -> int:
        return min(_PROBE_LENGTHS[self._probes % len(_PROBE_LENGTHS)], self.arms[arm].most)

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
        if (
            self._hopes[arm] < self._rate
            or (plan.lengths[b] and plan.arms[b] == arm)
            or (allowed is not None and arm not in allowed)
        ):
            return math.inf
        name, length = self.arms[arm].name, self._probe_length(arm)
        users = self._drafting(plan).get(arm, [])
        proposal = self.costs.proposal(name, len(users) + 1, length, load.context)
        if users:
            proposal -= self.costs.proposal(name, len(users), length, load.context)
        rows = load.rows + sum(plan.lengths)
        extra = self.costs.forward(rows + length, load.context) - self.costs.forward(rows, load.context)
        return self._gains.get(load.keys[b], 0.0) + max(proposal, 0.0) + extra + self._beginnings.seconds(load.keys[b], arm)


def _worth(load: Load) -> float:
    return _WORTH + _WORTH_TOGETHER * math.log2(len(load.keys))


@lru_cache(maxsize=256)
def _nothing(batch: int) -> Plan:
    return Plan((0,) * batch, arms=(0,) * batch)
