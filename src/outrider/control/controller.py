"""The controller: drafts only where that makes the text come sooner. No torch.

One rule: maximise expected tokens over expected seconds. The options of a sequence are an arm (a drafter) with a length, and
plain decoding, which is length 0. Before the drafters work, `plan` chooses among them; after they have, `select` keeps the
nodes that are worth a row of the target's forward. An option that may be better than it seems is explored as far as a budget
of lost seconds allows.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from operator import ge, is_
from pathlib import Path
from typing import Any, NamedTuple

from outrider.control.acceptance import Acceptance
from outrider.control.costs import Costs
from outrider.control.ladder import ladder
from outrider.control.policy import Load, RoundStats
from outrider.core import Arm, Drafts, Plan

__all__ = ["Controller"]

MARGIN = 0.04  # a draft must promise this much more than none
SHARE = 0.008  # of the time that exploration may lose: in tests/control/worlds.py 0.012 costs useless drafters 0.5 % more, and
#     with 0.004 a good drafter that starts badly is found again too late
GRANT = 4.0  # plain rounds that exploration may lose at first, and save up
LEAST = 0.25  # of a round, that an explored one is taken to lose: with 0.1 what brings nothing is explored in each tenth round
BONUS = 0.8  # standard deviation of what one round shows of a curve, against the prior curve
SHORTEST, LONGEST = 2, 16  # rounds that a plan stands: twice as many whenever replanning changed nothing
REST = 8  # times as many where nobody drafts
OVERHEAD = 0.005  # of the time that replanning may take
SAMPLED = 4  # rounds of which one is timed, once many have been
LEARNT_FROM = 8  # sequences whose verdicts a round learns from, in turn
_NOBODY = (0, -1)  # arm and step of a sequence that does not draft


class _Exploration(NamedTuple):
    """A plan that may be better than the standing one."""

    budget: int  # that pays for it: the arm's, or -1 for another length of the arms in use, and for none
    plan: Plan
    loss: float  # seconds


class _Planned(NamedTuple):
    """A round that was planned and is not observed yet."""

    load: Load
    users: dict[int, list[int]]  # sequences that draft, by arm
    begun: int  # see Controller


class _Timed(NamedTuple):
    """A round and what it took."""

    stats: RoundStats
    context: int
    batch: int
    users: list[tuple[int, int, int]]  # arms that drafted, for how many, the most nodes of a sequence
    begun: int  # sequences that used their arm for the first time; -1: none did, and the round before was alike


class Controller:
    """Chooses arm and length for every sequence, prunes what they propose, and learns from every round.

    A plan stands for a few rounds, and for more and more of them while it stays the same: what is off must cost nothing.
    """

    def __init__(
        self, arms: Seq[Arm], costs: Costs, named: bool = False, min_length: int = 1, disable_at: int | None = None
    ) -> None:
        self.arms = arms
        self.costs = costs
        self._named = named  # the user named the arms: they are believed in until they have been seen
        self._lengths = [ladder(arm.unit).lengths for arm in arms]
        self._min_steps = [bisect_left(lengths, min_length) for lengths in self._lengths]
        self._disable_at = math.inf if disable_at is None else disable_at
        self._acceptance = Acceptance(arms)
        self._acceptance.restore(costs.accepted)
        self._unobserved: deque[_Planned] = deque()  # rounds that are planned
        # the standing plan
        self._plan = Plan(())
        self._standing: dict[Hashable, tuple[int, int]] = {}  # arm and step of everyone planned for
        self._keys: Seq[Hashable] = ()  # the sequences of the last round
        self._age, self._interval = 0, 0  # in rounds
        self._rate = 1.0  # tokens per second that it promises
        self._usual = 1.0  # tokens per second without exploration
        self._steady = False  # replanning changed nothing last time
        self._users: dict[int, list[int]] = {}  # sequences that draft, by arm
        self._met: dict[Hashable, set[int]] = {}  # arms that a sequence has used
        self._begun = 0  # sequences that use theirs for the first time; -1: this round is like the one before
        # exploration
        self._budgets: dict[int, float] = {}  # seconds that exploration may lose: for each unused arm, and -1 for those in use
        self._last = 0.0  # seconds of the last round
        self._plain_s = 0.0  # of a plain round
        self._candidate: _Exploration | None = None  # what to explore next
        self._exploring: _Exploration | None = None
        self._turn = 0
        # measurements
        self._round = 0
        self._timed: list[_Timed] = []
        self._proposed: dict[int, int] = {}  # most nodes of a sequence, by arm, this round
        self._replanned = self._overlapped = False  # in this round; while its forward ran
        self._overhead: dict[tuple[int, bool], float] = {}  # the controller's seconds, by batch and whether it replanned
        self._prices: dict[tuple[int, ...], list[float]] = {}
        self._times: dict[tuple[str, int, int, int], list[float]] = {}
        self._reprice_at = 8

    @property
    def accepted(self) -> dict[str, Any]:
        """What is known about each arm, as plain data."""
        return self._acceptance.as_dict()

    @property
    def replanned(self) -> bool:
        """Whether this round's plan was made anew, or the next one's already; until the round is observed."""
        return self._replanned

    def keep(self, path: Path) -> None:
        """Write what was measured and what was accepted, for the next start on this machine."""
        self._learn()
        for bucket, arms in self.accepted.items():
            self.costs.accepted[bucket] = self.costs.accepted.get(bucket, {}) | arms
        self.costs.save(path)

    def arms_named(self, method: str) -> list[int]:
        """Arms that a request may use which names a method."""
        return [i for i, arm in enumerate(self.arms) if arm.name == method]

    def plan(self, load: Load) -> Plan:
        """Who drafts, with what, how far."""
        self._unobserved.clear()
        return self._planned(load)

    def plan_next(self, load: Load) -> Plan | None:
        """The standing plan, where it is neither too old nor an exploration and serves those who run then."""
        if self._age + 1 >= self._interval or self._exploring is not None or self._may_explore(SHARE * self._last):
            return None
        if any(room > 0 and key not in self._standing for key, room in zip(load.keys, load.room, strict=True)):
            return None
        return None if 4 * len(load.keys) < 3 * len(self._standing) else self._planned(load)

    def _planned(self, load: Load) -> Plan:
        self._round += 1
        self._age += 1
        if self._stands(load):
            self._begun = -1
        else:
            if self._candidate is not None and not self._is_for(self._candidate.plan, load):
                self._candidate = None
            if self._is_due(load):
                self._replan(load)
            if self._may_explore():
                assert self._candidate is not None
                self._plan, self._exploring, self._age, self._interval = self._candidate.plan, self._candidate, 0, 2
            elif self._exploring is None:
                self._plan = self._standing_plan(load)
            self._keys = tuple(load.keys)
            self._note_users(load)
        self._unobserved.append(_Planned(load, self._users, self._begun))
        return self._plan

    def _stands(self, load: Load) -> bool:
        """Whether the last round's plan is this one's too: the same sequences, and nothing to plan or to explore."""
        if self._age >= self._interval or len(self._standing) < len(load.keys) or not self._is_same(load.keys):
            return False  # it is old, somebody was reading a prompt when it was made, or others run
        if self._may_explore():
            return False
        return not self._users or all(map(ge, load.room, self._plan.lengths))

    def _may_explore(self, more: float = 0.0) -> bool:
        """Whether the budget pays for the next exploration, with so many seconds more."""
        one = self._candidate
        if one is None or self._exploring is not None:
            return False
        return self._budgets[one.budget] + more >= one.loss

    def _is_for(self, plan: Plan, load: Load) -> bool:
        """Whether a plan that was made before the last round is for the sequences that run now, and they have room for it."""
        return self._is_same(load.keys) and all(map(ge, load.room, plan.lengths))

    def _is_same(self, keys: Seq[Hashable]) -> bool:
        return len(keys) == len(self._keys) and all(map(is_, keys, self._keys))

    def _is_due(self, load: Load) -> bool:
        """Whether to plan again: the plan is old, was made for more sequences, or somebody could draft who is not in it."""
        if self._age >= self._interval or self._exploring is not None or 4 * len(load.keys) < 3 * len(self._standing):
            return True
        new = sum(room > 0 and key not in self._standing for key, room in zip(load.keys, load.room, strict=True))
        return new > 0 and (4 * new >= len(load.keys) or self._age >= LONGEST // 2)

    def _standing_plan(self, load: Load) -> Plan:
        """The plan that was made, for those who run now."""
        return self._plan_of(load, {b: self._standing.get(key, _NOBODY) for b, key in enumerate(load.keys)})

    def _plan_of(self, load: Load, chosen: Mapping[int, tuple[int, int]]) -> Plan:
        """Arm and step by sequence as a plan, as far as there is room."""
        settings = [chosen.get(b, _NOBODY) for b in range(len(load.keys))]
        if all(step < 0 for _, step in settings):
            return _nothing(len(load.keys))
        rooms = zip(settings, load.room, strict=True)
        lengths = tuple(min(self._lengths[arm][step], room) if step >= 0 else 0 for (arm, step), room in rooms)
        return self._flagged(load, Plan(lengths, arms=tuple(arm for arm, _ in settings)))

    def _flagged(self, load: Load, plan: Plan) -> Plan:
        users = _users(plan)
        if len(users) != 1:
            return plan
        ((arm, drafting),) = users.items()
        name = self.arms[arm].name
        ends = 2 * self.arms[arm].unit, 8 * self.arms[arm].unit
        few, more = self.costs.proposals(name, len(drafting), ends, load.context)
        short, long = (self.costs.forward(load.rows + n * len(drafting), load.context, name) for n in ends)
        node = (more - few + long - short) / ((ends[1] - ends[0]) * len(drafting))  # seconds to draw and to verify one more
        return plan._replace(verify_all=self.arms[arm].can_overlap, confidence_threshold=min(self._rate * node, 0.7))

    def _note_users(self, load: Load) -> None:
        """Who drafts by which arm in this round, and who of them for the first time."""
        self._users, self._begun = _users(self._plan), 0
        for arm, drafting in self._users.items():
            for b in drafting:
                met = self._met.setdefault(load.keys[b], set())
                self._begun += arm not in met
                met.add(arm)

    def _replan(self, load: Load) -> None:
        """Choose for everyone, and for how long that shall stand."""
        self._learn()
        self._replanned, self._exploring, self._candidate = True, None, None
        self._acceptance.now = self._round
        self._acceptance.meet(load.keys, load.temperature_buckets or [0] * len(load.keys))
        if self._round >= self._reprice_at:
            self._prices.clear()
            self._times.clear()
            self._reprice_at = self._round + min(self._round, REST * LONGEST)
        before, batch = self._standing, len(load.keys)
        able = [b for b, room in enumerate(load.room) if room > 0] if batch < self._disable_at and self.arms else []
        chosen = self._best(load, able)
        self._standing = {key: chosen.get(b, _NOBODY) for b, key in enumerate(load.keys) if load.room[b]}
        self._steady = before == self._standing
        shortest = self._overhead.get((batch, True), 0.0) / (OVERHEAD * self._base(load))
        longest = LONGEST if chosen else REST * LONGEST
        self._interval = math.ceil(max(min(2 * self._interval, longest) if self._steady else SHORTEST, shortest))
        if self._named and chosen and any(self._acceptance.is_unseen(load.keys[b], arm) for b, (arm, _) in chosen.items()):
            self._interval = 1  # to stop soon where it does not pay
        self._age = 0
        if able and not self._budgets:
            new = [arm for arm in range(len(self.arms)) if self._is_stale(load.keys[able[0]], arm)]
            self._budgets = dict.fromkeys(range(-1, len(self.arms)), 0.0)
            self._budgets |= dict.fromkeys(new, GRANT * self._base(load) / len(self.arms))
        self._plain_s = self._base(load)
        if able:
            self._candidate = self._exploration(load, able, chosen)

    def _best(self, load: Load, able: Seq[int]) -> dict[int, tuple[int, int]]:
        """Arm and step by sequence: the options that make tokens over seconds largest (Dinkelbach's iteration)."""
        plain = load.emitting / self._base(load)
        self._rate = plain * (1.0 + MARGIN)  # what a second must bring, at least
        best: dict[int, tuple[int, int]] = {}
        while chosen := self._assigned(load, able):
            tokens, seconds = self._expected(load, chosen)
            rate = tokens / seconds
            if rate <= self._rate:
                break
            best, self._rate, able = chosen, rate, list(chosen)
        return best

    def _assigned(self, load: Load, able: Seq[int]) -> dict[int, tuple[int, int]]:
        """Whom drafts bring more than their seconds at the present price. Sequences that may use the same arms share one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        every = tuple(range(len(self.arms)))
        for b in able:
            allowed = load.arms[b] if load.arms else None
            groups.setdefault(every if allowed is None else tuple(allowed), []).append(b)
        chosen: dict[int, tuple[int, int]] = {}
        for arms, group in groups.items():
            options = (self._shared(load, group, arm) for arm in arms)
            _, arm, step, users = max(options, default=(0.0, 0, 0, []))
            chosen |= dict.fromkeys(users, (arm, step))
        return chosen

    def _shared(self, load: Load, group: Seq[int], arm: int) -> tuple[float, int, int, list[int]]:
        """The tokens that an arm brings beyond the price of its seconds, the arm, the best step, and whom it brings some."""
        curves = [self._curve(load.keys[b], arm) for b in group]
        prices = [self._rate * seconds for seconds in self._each(load, arm, len(group))]
        gains = curves[0] if len(group) == 1 else [sum(gains) / len(group) for gains in zip(*curves, strict=True)]
        step = max(range(self._min_steps[arm], len(prices)), key=lambda step: gains[step] - prices[step], default=-1)
        total, users = 0.0, []
        for b, curve in zip(group, curves, strict=True) if step >= 0 else ():
            value = curve[step] - prices[step]
            if value > 0.0 and (switch := self._switch(load, b, arm)):  # it is paid once, for as many rounds as are left
                remaining = load.remaining[b] if load.remaining else load.room[b]
                value -= self._rate * switch * (1.0 + curve[step]) / max(remaining, 1)
            if value > 0.0:
                total += value
                users.append(b)
        return total, arm, step, users

    def _curve(self, key: Hashable, arm: int) -> list[float]:
        if self._named and self._acceptance.is_unseen(key, arm):
            return self._acceptance.upper(key, arm, BONUS)
        return self._acceptance.curve(key, arm)

    def _switch(self, load: Load, b: int, arm: int) -> float:
        """Seconds that a sequence takes to begin with an arm: it reads all that came before."""
        if arm in self._met.get(load.keys[b], ()):
            return 0.0
        return self.costs.switch(self.arms[arm].name, load.context / len(load.keys))

    def _expected(self, load: Load, chosen: dict[int, tuple[int, int]]) -> tuple[float, float]:
        """Tokens and seconds of a round in which these draft."""
        tokens, rows = float(load.emitting), 0.0
        longest: dict[int, tuple[float, int]] = {}  # by arm: nodes of the longest draft, how many sequences
        for b, (arm, step) in chosen.items():
            key = load.keys[b]
            nodes = self._acceptance.nodes(key, arm)[step]
            tokens += self._curve(key, arm)[step]
            rows += nodes
            length, count = longest.get(arm, (0.0, 0))
            longest[arm] = max(length, nodes), count + 1
        seconds = self._base(load) + self._extra_rows(load, rows, self._name_of(longest)) + self._thinking(len(load.keys))
        for arm, (nodes, count) in longest.items():
            seconds += self.costs.proposal(self.arms[arm].name, count, nodes, load.context)
        return tokens, seconds

    def _base(self, load: Load) -> float:
        """Seconds of a plain round of those who emit. Prompts read beside them make no draft worth more."""
        rows = min(load.emitting or load.rows, load.rows)
        return self.costs.forward(rows, load.context) + self.costs.rest(len(load.keys))

    def _extra_rows(self, load: Load, rows: float, drafter: str) -> float:
        return self.costs.forward(load.rows + rows, load.context, drafter) - self.costs.forward(load.rows, load.context)

    def _name_of(self, arms: Collection[int]) -> str:
        """The drafter of a round whose drafts are all by one arm; "" where there is none, or where several draft."""
        return self.arms[next(iter(arms))].name if len(arms) == 1 else ""

    def _thinking(self, batch: int) -> float:
        """Seconds that the controller takes in a round with drafts."""
        return self._overhead.get((batch, False), 0.0) + self._overhead.get((batch, True), 0.0) / LONGEST

    def _each(self, load: Load, arm: int, users: int) -> list[float]:
        """By step: the seconds that a draft costs one of so many sequences that draft alike."""
        bucket = load.temperature_buckets[0] if load.temperature_buckets else 0
        place = (arm, users, load.rows, len(load.keys), load.context.bit_length(), bucket)
        if place not in self._prices:
            nodes = self._acceptance.nodes(load.keys[0], arm)[: bisect(self._lengths[arm], self.arms[arm].max_nodes)]
            name = self.arms[arm].name
            drafts = self.costs.proposals(name, users, nodes, load.context)
            fixed = self._thinking(len(load.keys))
            self._prices[place] = [
                (draft + self._extra_rows(load, users * n, name) + fixed) / users for draft, n in zip(drafts, nodes, strict=True)
            ]
        return self._prices[place]

    def _exploration(self, load: Load, able: Seq[int], chosen: dict[int, tuple[int, int]]) -> _Exploration | None:
        """The plan with one change, which some budget pays for the soonest.

        Every arm may lose a share of the time, so each has its turn, however little it seems to bring: what it showed first
        may have been a slow moment of the machine, or a hard text.
        """
        self._usual = self._rate if chosen else load.emitting / self._base(load)
        self._turn += 1
        remaining = load.remaining or load.room
        b = max(able, key=lambda one: (remaining[one], (one + self._turn) % len(load.keys)))
        unused = [arm for arm in self._allowed(load, b) if chosen.get(b, (-1, 0))[0] != arm]
        options = [self._explored(load, able if self._turn % 2 else [b], arm, chosen) for arm in unused]
        if chosen:
            options.append(self._varied(load, chosen))
        return max(options, key=lambda one: self._budgets[one.budget] - one.loss, default=None)

    def _explored(self, load: Load, who: Seq[int], arm: int, chosen: dict[int, tuple[int, int]]) -> _Exploration:
        """These draft by an arm, as far as its upper confidence bound says."""
        users = [b for b in who if arm in self._allowed(load, b)]
        uppers = [self._acceptance.upper(load.keys[b], arm, BONUS) for b in users]
        gains = [sum(gains) for gains in zip(*uppers, strict=True)]
        seconds = self._each(load, arm, len(users))
        steps = range(min(self._min_steps[arm], len(seconds) - 1), len(seconds))
        step = max(steps, key=lambda step: gains[step] - self._usual * seconds[step] * len(users))
        switch = sum(self._switch(load, b, arm) for b in users)
        return self._two_rounds(load, arm, chosen | dict.fromkeys(users, (arm, step)), switch)

    def _varied(self, load: Load, chosen: dict[int, tuple[int, int]]) -> _Exploration:
        """Those who draft go a step further, less far, or do not draft, in turn."""
        shift = self._turn % 3 - 1
        varied: dict[int, tuple[int, int]] = {}
        for b, (arm, step) in chosen.items():
            last = bisect(self._lengths[arm], self.arms[arm].max_nodes) - 1
            varied |= {b: (arm, min(max(step + shift, self._min_steps[arm]), last))} if shift else {}
        return self._two_rounds(load, -1, varied)

    def _two_rounds(self, load: Load, budget: int, chosen: dict[int, tuple[int, int]], switch: float = 0.0) -> _Exploration:
        """These draft for two rounds: one shows little where a drafter has a text to read first."""
        tokens, seconds = self._expected(load, chosen)
        loss = 2.0 * max(seconds - tokens / self._usual, LEAST * seconds) + switch
        return _Exploration(budget, self._plan_of(load, chosen), loss)

    def _is_stale(self, key: Hashable, arm: int) -> bool:
        """Whether an arm was not used for long, or too seldom to know what it costs."""
        return arm >= 0 and (self._acceptance.rounds(key, arm) < 1.0 or not self.costs.knows_proposal(self.arms[arm].name, True))

    def _allowed(self, load: Load, b: int) -> Seq[int]:
        """Arms that a sequence may use."""
        allowed = load.arms[b] if load.arms else None
        return range(len(self.arms)) if allowed is None else allowed

    def select(self, drafts: Drafts, load: Load) -> Drafts:
        """Keep the nodes whose tokens pay for their rows, over all sequences at once."""
        if not self._users:
            return drafts
        pool: list[tuple[float, int, int]] = []
        rows = zip(load.keys, self._plan.arms, self._plan.lengths, drafts.per_sequence, strict=True)
        turn, batch, prunes = self._round * LEARNT_FROM, len(load.keys), not self._plan.verify_all and drafts.resume is None
        self._proposed = {}
        for b, (key, arm, length, tree) in enumerate(rows):
            if not length:
                continue
            self._proposed[arm] = max(self._proposed.get(arm, 0), len(tree.tokens))
            learn = (b - turn) % batch < LEARNT_FROM
            if learn or prunes:
                survival = self._acceptance.predict(key, arm, length, (tree.parents, tree.survival), learn)
                pool += [(-chance, b, i) for i, chance in enumerate(survival)]
        if not prunes:
            if self._plan.verify_all and self._age + 1 >= self._interval:
                self._replan(load)  # the next round's, while the forward runs
                self._overlapped = True
            return drafts
        pool.sort()
        count = self._paying([-node[0] for node in pool], load)
        if self._exploring is not None:  # it shows something only where a node is judged
            count = max(count, min(len(pool), 1))
        if count == len(pool):
            return drafts
        kept: list[list[int]] = [[] for _ in load.keys]
        for _, b, i in pool[:count]:
            kept[b].append(i)
        for key, nodes in zip(load.keys, kept, strict=True):
            nodes.sort()
            self._acceptance.keep(key, nodes)
        return drafts.subset(kept)

    def _paying(self, survival: Seq[float], load: Load) -> int:
        """How many of the likeliest nodes to keep; drawing them is paid for already."""
        name = self._name_of(self._users)
        times = self._times.setdefault((name, load.rows, len(load.keys), load.context.bit_length()), [])
        if len(times) <= len(survival):
            rest = self.costs.rest(len(load.keys))
            longer = range(len(times), max(len(survival) + 1, 17))
            times += (self.costs.forward(load.rows + n, load.context, name if n else "") + rest for n in longer)
        spent = self._thinking(len(load.keys)) + self._base(load) - times[0]
        for arm, drafting in self._users.items():
            spent += self.costs.proposal(self.arms[arm].name, len(drafting), self._proposed.get(arm, 0) or 1, load.context)
        tokens, count = float(load.emitting), 0
        best = tokens / (times[0] + spent)
        for n, chance in enumerate(survival, 1):
            tokens += chance
            if (rate := tokens / (times[n] + spent)) > best:
                best, count = rate, n
        return count

    def observe(self, stats: RoundStats) -> None:
        """Learn what was accepted and what it cost."""
        if not self._unobserved:
            return
        load, drafting_by, begun = self._unobserved.popleft()
        seconds = self._last = stats.propose_s + stats.forward_s + stats.rest_s
        most = max(GRANT * self._plain_s, self._candidate.loss if self._candidate is not None else 0.0)
        for arm, budget in self._budgets.items():
            share = SHARE / (2 if arm < 0 else len(self.arms))
            self._budgets[arm] = min(budget + share * seconds, most)
        overlapped, self._overlapped = self._overlapped, False
        replanned, self._replanned = self._replanned, False
        batch = len(load.keys)
        if drafting_by or replanned:
            usual = self._overhead.get((batch, replanned), 0.0)  # at first it is taken to cost nothing
            self._overhead[batch, replanned] = usual + (stats.think_s - usual) / 32
        if self._exploring is not None:  # what it lost, for what it brought
            tokens = load.emitting + sum(map(len, stats.paths))
            lost = seconds + stats.think_s - tokens / self._usual
            self._budgets[self._exploring.budget] -= min(max(lost, self._exploring.loss / 4.0), GRANT * self._plain_s)
        often = self._exploring is not None or begun > 0 or self._round < 16 * SAMPLED
        if stats.rows and not overlapped and begun != 0 and (often or self._round % SAMPLED == 0):
            users = [(arm, len(drafting), self._proposed.get(arm, 0)) for arm, drafting in drafting_by.items()]
            self._timed.append(_Timed(stats, load.context, batch, users, begun))
        if drafting_by:
            for key, path in zip(load.keys, stats.paths, strict=True):
                self._acceptance.observe(key, path)

    def _learn(self) -> None:
        """From the last rounds: many at once, because the first of them fetches everything it touches."""
        self._acceptance.learn()
        for timed in self._timed:
            self._enter(timed)
        self._timed.clear()

    def _enter(self, timed: _Timed) -> None:
        """What a round's parts took. Arms that drafted side by side share the time as they were expected to."""
        stats, context, batch, users, begun = timed
        if begun < 0:
            drafter = None if len(users) > 1 else self._name_of([arm for arm, _, _ in users])
            self.costs.observe_forward(stats.rows, context, stats.forward_s, stats.experts, drafter)
        if not users:
            self.costs.observe_rest(batch, stats.rest_s)
            return
        seconds = stats.propose_s + max(stats.rest_s - (self.costs.rest(batch) or stats.rest_s), 0.0)  # drafts cost there too
        asked = [(self.arms[arm].name, drafting, max(nodes, 1)) for arm, drafting, nodes in users]
        expected = [self.costs.proposal(*one, context) for one in asked]
        if begun > 0:
            if len(asked) == 1 and self.costs.knows_proposal(asked[0][0]):
                self.costs.observe_switch(asked[0][0], begun * context / batch, max(seconds - expected[0], 0.0))
            return
        for one, share in zip(asked, expected, strict=True):
            self.costs.observe_proposal(*one, seconds * (share / sum(expected) if sum(expected) > 0.0 else 1.0 / len(asked)))

    def forget(self, key: Hashable) -> None:
        """A sequence is over; nothing here may keep its text alive."""
        self._acceptance.forget(key)
        self._standing.pop(key, None)
        self._met.pop(key, None)
        self._keys = ()


def _users(plan: Plan) -> dict[int, list[int]]:
    """Sequences that draft, by arm."""
    users: dict[int, list[int]] = {}
    for b, (arm, length) in enumerate(zip(plan.arms, plan.lengths, strict=True)):
        if length:
            users.setdefault(arm, []).append(b)
    return users


@lru_cache(maxsize=256)
def _nothing(batch: int) -> Plan:
    return Plan((0,) * batch, arms=(0,) * batch)
