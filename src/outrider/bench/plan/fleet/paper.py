"""A replica without a model: the engine that serves, over a runner and a drafter that only let time pass."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import TypeVar, cast

import torch

from outrider.bench.plan.fleet.load import ANSWER_TOKEN
from outrider.bench.plan.fleet.replica import Replica
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.fleet.texts import Texts
from outrider.cache import PageTable, StateCache
from outrider.control import Controller, Costs, FixedLength, Load, Policy
from outrider.core import Batch, Computed, Drafts, Needs, Plan, Scores, Sequence, Tree, Verdict
from outrider.engine.engine import Engine
from outrider.model import Runner

__all__ = ["CostTable", "PaperClock", "on_paper"]

_NO_LOGITS = torch.empty(0)
_CHOICES = [ANSWER_TOKEN] * 2**16  # the target chooses the same token in every row
_VOCAB = 16
_NOTHING = Tree([], [], [])
_STOPPING = ("draft_model",)  # drafters that end a chain below Plan.confidence_threshold
T = TypeVar("T")


def on_paper(name: str, costs: ReplicaCosts, table: CostTable, texts: Texts) -> Replica:
    """A replica that takes the time of a table and drafts what was recorded of some texts."""
    clock = PaperClock()
    runner = cast(Runner, _Runner(clock, table, costs.context))
    drafter = _Drafter(clock, table, texts, [arm.name for arm in costs.arms])
    pages = PageTable(costs.kv_pages, costs.sizes.page_size)
    engine = Engine(runner, None, drafter, _policy(costs, clock), costs.sizes, pages)
    engine.profile(clock)
    return Replica(name, engine, clock, costs.request_s, costs.context)


def _policy(costs: ReplicaCosts, clock: PaperClock) -> Policy:
    """The controller over the replica's arms, as if it were started with these costs; without arms plain decoding."""
    if not costs.arms:
        return FixedLength(0)
    learned = Costs.from_dict(costs.costs.as_dict())  # each replica goes on learning on its own
    return _TimedPolicy(Controller(costs.arms, learned, named=costs.named), clock, costs.plan_s)


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

    def plan_next(self, load: Load) -> Plan | None:  # noqa: ARG002
        return None  # nothing overlaps on paper


class _Runner:
    """Gives every row the same choice, after the time of a forward."""

    guarantee = None
    separate_prefill = False
    bus_bytes = 0
    device_name = "paper"

    def __init__(self, clock: PaperClock, table: CostTable, context: int) -> None:
        self._clock, self._table = clock, table
        self.decoder = SimpleNamespace(spec=SimpleNamespace(vocab=_VOCAB, context=context), rotary_start=lambda _: 0)
        self.states = StateCache()
        self.pool = SimpleNamespace(clear=lambda _: None, move=lambda *_: None, slots=lambda *_: [])

    def launch(self, batch: Batch, drafts: Drafts, taps: tuple[int, ...] = ()) -> Computed:  # noqa: ARG002
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
        return Computed(Scores(_NO_LOGITS, roots, choices=_CHOICES))


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
