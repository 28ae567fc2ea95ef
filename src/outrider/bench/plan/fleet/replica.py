"""One replica in virtual time: the engine that serves, over a runner and a drafter that only let time pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from types import SimpleNamespace
from typing import Protocol, TypeVar, cast

import torch

from outrider.bench.plan.fleet.load import ANSWER_TOKEN, FleetRequest
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.fleet.texts import Texts
from outrider.cache import PageTable
from outrider.control import Controller, Costs, FixedLength, Load, Policy
from outrider.core import Batch, Drafts, Needs, Plan, Request, RoundProfile, Scores, Sequence, Tree, Verdict
from outrider.engine.engine import Engine
from outrider.errors import QueueFull
from outrider.model import Runner
from outrider.routing import ReplicaLoad
from outrider.sampling import SamplingParams

__all__ = ["Clock", "CostTable", "Live", "PaperClock", "Replica"]

_NO_LOGITS = torch.empty(0)
_CHOICES = [ANSWER_TOKEN] * 2**16  # the target chooses the same token in every row
_VOCAB = 16
_NOTHING = Tree([], [], [])
_STOPPING = ("draft_model",)  # drafters that end a chain below Plan.confidence_threshold
T = TypeVar("T")


class CostTable:
    """The true costs of a replica, each looked up once. All replicas share it, and none of them learns it."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._forward: dict[tuple[int, int], float] = {}
        self._rest: dict[int, float] = {}
        self._proposal: dict[tuple[str, int, int], float] = {}

    def forward(self, rows: int, context: int) -> float:
        key = (rows, (context - 1).bit_length())  # contexts are told apart by powers of two
        seconds = self._forward.get(key)
        if seconds is None:
            seconds = self._forward[key] = self._costs.forward(rows, context)
        return seconds

    def rest(self, batch: int) -> float:
        seconds = self._rest.get(batch)
        if seconds is None:
            seconds = self._rest[batch] = self._costs.rest(batch)
        return seconds

    def proposal(self, drafter: str, batch: int, length: int) -> float:
        key = (drafter, batch, length)
        seconds = self._proposal.get(key)
        if seconds is None:
            seconds = self._proposal[key] = self._costs.proposal(drafter, batch, length)
        return seconds

    def switch(self, drafter: str, tokens: int) -> float:
        return self._costs.switch(drafter, tokens)


class Clock(RoundProfile, Protocol):
    """Virtual seconds: the profile of a replica's engine."""

    @property
    def now(self) -> float: ...

    def begin(self, now: float, scale: float) -> None:
        """A round begins at this time, and takes `scale` times as long as it costs."""


class PaperClock:
    """Time stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scale = 1.0

    def begin(self, now: float, scale: float) -> None:
        self.now, self.scale = now, scale

    def advance(self, seconds: float) -> None:
        self.now += seconds * self.scale

    def clock(self) -> float:
        return self.now

    def around(self, round_: Callable[[], T]) -> T:
        return round_()

    def scored(self) -> None:
        pass


class _TimedPolicy:
    """A policy whose planning takes time."""

    def __init__(self, policy: Controller, clock: PaperClock, plan_s: tuple[float, float]) -> None:
        self._policy, self._clock, self._plan_s = policy, clock, plan_s
        self.arms = policy.arms
        self.arms_named, self.select, self.observe, self.forget = (
            policy.arms_named, policy.select, policy.observe, policy.forget
        )  # fmt: skip

    def plan(self, load: Load) -> Plan:
        plan = self._policy.plan(load)
        self._clock.advance(self._plan_s[self._policy.replanned])
        return plan


class _Runner:
    """Gives every row the same choice, after the time of a forward."""

    guarantee = None
    separate_prefill = overlaps_rounds = False
    device_name = "paper"

    def __init__(self, clock: PaperClock, table: CostTable, context: int) -> None:
        self._clock, self._table = clock, table
        self.decoder = SimpleNamespace(spec=SimpleNamespace(vocab=_VOCAB, context=context), rotary_start=lambda _: 0)
        self.pool = SimpleNamespace(clear=lambda _: None, move=lambda *_: None, slots=lambda *_: [])

    def score(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Scores:  # noqa: ARG002
        roots: list[int] = []
        rows = wanted = context = 0
        for seq, fed, tree in zip(batch.sequences, batch.feeds, drafts.per_sequence, strict=True):
            nodes, tokens = len(tree.tokens), len(seq.tokens)
            rows += fed + nodes
            context += tokens
            samples = seq.cached + fed == tokens
            roots.append(wanted if samples else -1)
            wanted += 1 + nodes if samples else 0
        self._clock.advance(self._table.forward(rows, context))
        return Scores(_NO_LOGITS, roots, choices=_CHOICES)


class _Drafter:
    """Drafts what was recorded of the texts."""

    needs = Needs()

    def __init__(self, clock: PaperClock, table: CostTable, texts: Texts, arms: Seq[str]) -> None:
        self._clock, self._table, self._texts, self._arms = clock, table, texts, arms
        self._met: dict[Sequence, set[int]] = {}

    def begin(self, seq: Sequence) -> None:
        self._met[seq] = set()

    def end(self, seq: Sequence) -> None:
        self._met.pop(seq, None)

    def propose(self, batch: Batch, plan: Plan) -> Drafts:
        trees: list[Tree] = []
        users: dict[int, list[int]] = {}  # by arm: places in the batch
        arms = plan.arms or (0,) * len(plan.lengths)
        for seq, arm, nodes in zip(batch.sequences, arms, plan.lengths, strict=True):
            if not nodes:
                trees.append(_NOTHING)
                continue
            users.setdefault(arm, []).append(len(trees))
            trees.append(self._texts.draft(seq.request.seed, arm, len(seq.tokens) - len(seq.request.prompt_ids), nodes))
            if arm not in self._met[seq]:
                self._met[seq].add(arm)
                self._clock.advance(self._table.switch(self._arms[arm], len(seq.tokens)))
        for arm, places in users.items():
            name = self._arms[arm]
            if plan.confidence_threshold and name in _STOPPING:
                _stop_early(trees, places, plan.confidence_threshold)
            longest = max([len(trees[b].tokens) for b in places])
            self._clock.advance(self._table.proposal(name, len(places), longest or 1))
        return Drafts(trees)

    def commit(self, batch: Batch, drafts: Drafts, verdicts: list[Verdict], scores: Scores) -> None:  # noqa: ARG002
        self._clock.advance(self._table.rest(len(batch.sequences)))


def _stop_early(trees: list[Tree], places: Seq[int], threshold: float) -> None:
    """End all chains with the first step after which none of them is likely to survive."""
    steps, longest = 0, max([len(trees[b].tokens) for b in places])
    while steps < longest:
        steps += 1
        if all(len(trees[b].survival) < steps or trees[b].survival[steps - 1] < threshold for b in places):
            break
    for b in places:
        tokens, parents, survival = trees[b]
        if len(tokens) > steps:
            trees[b] = Tree(tokens[:steps], parents[:steps], survival[:steps])


class Live:
    """A request on its way: when it came and when its tokens came."""

    __slots__ = ("at", "first", "last", "request")

    def __init__(self, request: FleetRequest) -> None:
        self.request = request
        self.at = request.at
        self.first = self.last = 0.0


class Replica:
    """An engine, the requests that wait for its next round, and its own time."""

    def __init__(self, name: str, engine: Engine, clock: Clock, request_s: float, context: int) -> None:
        """The engine's profile must be `clock`: what it says before and after a round is what the round took."""
        self.name = name
        self.engine = engine
        self.rounds = 0
        self.busy_s = 0.0
        self.refused = 0
        self._clock = clock
        self._request_s = request_s
        self._context = context
        self._inbox: deque[Live] = deque()
        self._live: dict[Sequence, Live] = {}
        self._submitted = 0

    @classmethod
    def on_paper(cls, name: str, costs: ReplicaCosts, table: CostTable, texts: Texts) -> Replica:
        """A replica without a model."""
        clock = PaperClock()
        runner = cast(Runner, _Runner(clock, table, costs.context))
        drafter = _Drafter(clock, table, texts, [arm.name for arm in costs.arms])
        pages = PageTable(costs.kv_pages, costs.sizes.page_size)
        engine = Engine(runner, None, drafter, _policy(costs, clock), costs.sizes, pages)
        engine.profile(clock)
        return cls(name, engine, clock, costs.request_s, costs.context)

    @property
    def load(self) -> ReplicaLoad:
        """What the router is told."""
        scheduler = self.engine.scheduler
        return ReplicaLoad(len(scheduler.running), scheduler.waiting + len(self._inbox), scheduler.max_num_seqs)

    @property
    def idle(self) -> bool:
        return not self._inbox and not self.engine.has_work

    def send(self, request: FleetRequest) -> float:
        """Take a request, and say when it can be in the engine's queue."""
        self._inbox.append(Live(request))
        return request.at + self._request_s

    def round(self, now: float, scale: float = 1.0) -> tuple[float, list[Live]]:
        """One round that begins now and takes `scale` times as long as it costs: when it is over, and who has ended in it."""
        clock, engine, inbox = self._clock, self.engine, self._inbox
        clock.begin(now, scale)
        while inbox and inbox[0].at + self._request_s <= now:
            self._admit(inbox.popleft())
        if not engine.has_work:
            return (inbox[0].at + self._request_s if inbox else now), []
        changed = engine.round()
        after = clock.now
        self.rounds += 1
        self.busy_s += after - now
        ended: list[Live] = []
        for processor in changed:
            seq = processor.seq
            live = self._live[seq]
            if not live.first:
                live.first = after
            if seq.finish_reason is not None:
                live.last = after
                ended.append(self._live.pop(seq))
        return after, ended

    def _admit(self, live: Live) -> None:
        request = live.request
        if len(request.prompt) + request.output > self._context:
            self.refused += 1
            return
        self._submitted += 1
        made = Request(
            f"{self.name}-{self._submitted}", request.prompt, _params(request.temperature), request.text, frozenset(),
            request.output, tenant=request.tenant, memory="",
        )  # fmt: skip
        try:
            processor = self.engine.submit(made, "paper")
        except QueueFull:
            self.refused += 1
            return
        self._live[processor.seq] = live


def _policy(costs: ReplicaCosts, clock: PaperClock) -> Policy:
    """The controller over the replica's arms, as if it were started with these costs; without arms plain decoding."""
    if not costs.arms:
        return FixedLength(0)
    learned = Costs.from_dict(costs.costs.as_dict())  # each replica goes on learning on its own
    return _TimedPolicy(Controller(costs.arms, learned, named=costs.named), clock, costs.plan_s)


@lru_cache(maxsize=64)
def _params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, ignore_eos=True)
