"""Measuring one replica: what its rounds take while it works, and what every arm drafts for some texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from outrider.bench.environment import environment
from outrider.bench.plan.fleet.replica_costs import ReplicaCosts
from outrider.bench.plan.trace import DraftRecord, Recorder, Trace
from outrider.config import EngineConfig
from outrider.control import Controller, Costs, Load, RoundStats
from outrider.control.curve import steady_mean
from outrider.core import Arm, Drafts, Plan, RoundReport
from outrider.core import Sequence as Generation
from outrider.engine.llm import LLM
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = ["RoundSample", "RoundTimes", "costs_from", "measure_replica", "plan_seconds", "record_texts", "replica_of"]

_FEW_ROWS = 64  # rows of a round that reads no prompt, mostly
_ENOUGH = 3  # samples of a size that make its time known
_DIGITS = 3  # of a recorded confidence
_BATCHES = (1, 2, 4, 8)


class RoundSample(NamedTuple):
    """What one round took. Its host time lasts until the next round, where the same sequences ran in both."""

    began: float  # on the clock of time.perf_counter
    rows: int
    batch: int
    context: int
    prefill: bool
    users: list[tuple[str, int, int]]  # arms that drafted, for how many sequences, nodes of the longest draft
    begun: int  # sequences that used their arm for the first time
    propose_s: float
    forward_s: float
    host_s: float
    plan_s: float
    replanned: bool


class RoundTimes:
    """A listener that keeps what every round took."""

    def __init__(self, policy: Controller) -> None:
        self.samples: list[RoundSample] = []
        self._policy = policy
        self._sequences: list[Generation] = []
        self._met: dict[Generation, set[int]] = {}

    def observe(self, report: RoundReport) -> None:
        sequences, phases, plan = report.batch.sequences, report.phases, report.plan
        if self.samples and sequences == self._sequences:
            last = self.samples[-1]
            host = report.began - last.began - last.propose_s - last.forward_s - last.plan_s
            self.samples[-1] = last._replace(host_s=max(host, 0.0))
        users: dict[int, tuple[int, int]] = {}
        begun = 0
        for seq, arm, length, tree in zip(
            sequences, plan.arms or [0] * len(sequences), plan.lengths, report.drafts.per_sequence, strict=True
        ):
            if length:
                count, longest = users.get(arm, (0, 1))
                users[arm] = count + 1, max(longest, len(tree.tokens))
                met = self._met.setdefault(seq, set())
                begun += arm not in met
                met.add(arm)
            if seq.finish_reason is not None:
                self._met.pop(seq, None)
        self._sequences = list(sequences)
        names = [(self._policy.arms[arm].name, count, longest) for arm, (count, longest) in users.items()]
        think, context = phases.plan + phases.select, sum(len(seq.tokens) for seq in sequences)
        self.samples.append(
            RoundSample(
                report.began, report.rows, len(sequences), context, report.prefill, names, begun,
                phases.propose, phases.forward, phases.verify + phases.commit + phases.record + phases.schedule, think,
                self._policy.replanned,
            )
        )  # fmt: skip


def costs_from(samples: Sequence[RoundSample], known: Costs) -> Costs:
    """The costs that these rounds show. Sizes that did not occur keep what is known, as much slower or quicker as the others."""
    if not samples:
        raise InvalidParameter("costs", "no round was recorded")
    table = known.as_dict()
    rounds = _typical({s.rows: [] for s in samples}, ((s.rows, s.forward_s) for s in samples if not s.begun), few=True)
    drift = _ratio([(seconds, known.forward(rows, 0)) for rows, seconds in rounds.items() if rows <= _FEW_ROWS])
    forward = {rows: seconds * drift for rows, seconds in _sizes(table["forward"]).items()} | rounds
    proposals: dict[str, dict[int, dict[int, float]]] = {}
    for name, curves in table["propose"].items():
        seen = [s for s in samples if len(s.users) == 1 and s.users[0][0] == name and not s.begun]
        scale = _ratio([(s.propose_s, known.proposal(*s.users[0])) for s in seen]) if len(seen) >= _ENOUGH else drift
        proposals[name] = {int(batch): {n: t * scale for n, t in _sizes(curve).items()} for batch, curve in curves.items()}
    rest = _typical({}, ((s.batch, s.host_s) for s in samples if not s.prefill))
    return Costs.from_dict({
        "forward": {str(rows): seconds for rows, seconds in forward.items()},
        "context": table["context"],
        "rest": {str(batch): seconds for batch, seconds in rest.items()},
        "propose": {
            name: {str(batch): {str(n): t for n, t in curve.items()} for batch, curve in curves.items()}
            for name, curves in proposals.items()
        },
        "switch": _switches(samples, known) or table["switch"],
        "accepted": table["accepted"],
    })  # fmt: skip


def plan_seconds(samples: Iterable[RoundSample]) -> tuple[float, float]:
    """The controller's seconds in a round whose plan stands, and in one that it plans anew."""
    split: tuple[list[float], list[float]] = ([], [])
    for sample in samples:
        split[sample.replanned].append(sample.plan_s)
    stands, anew = (steady_mean(times) if times else 0.0 for times in split)
    return stands, anew


def _sizes(curve: Mapping[str, float]) -> dict[int, float]:
    return {int(size): seconds for size, seconds in curve.items()}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(seen / expected for seen, expected in pairs) if pairs else 1.0


def _typical(groups: dict[int, list[float]], times: Iterable[tuple[int, float]], few: bool = False) -> dict[int, float]:
    """Mean times by size; `few`: of large sizes, which seldom occur twice, one is enough."""
    for size, seconds in times:
        groups.setdefault(size, []).append(seconds)
    return {
        size: steady_mean(seen) for size, seen in groups.items() if len(seen) >= _ENOUGH or (seen and few and size > _FEW_ROWS)
    }


def _switches(samples: Sequence[RoundSample], known: Costs) -> dict[str, float]:
    """Seconds per token that beginning with an arm takes."""
    seen: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.begun and len(sample.users) == 1:
            more = sample.propose_s - known.proposal(*sample.users[0])
            seen[sample.users[0][0]].append(max(more, 0.0) / (sample.begun * sample.context / sample.batch))
    return {name: steady_mean(times) for name, times in seen.items()}


class _Pinned:
    """A policy in which one arm drafts as far as it can for everybody, and everything is verified."""

    def __init__(self, arms: Sequence[Arm], arm: int) -> None:
        self.arms = arms
        self._arm = arm

    def arms_named(self, method: str) -> list[int]:  # noqa: ARG002
        return []

    def plan(self, load: Load) -> Plan:
        length = self.arms[self._arm].max_nodes
        return Plan(tuple(min(length, room) for room in load.room), arms=(self._arm,) * len(load.room))

    def plan_next(self, load: Load) -> Plan | None:
        return self.plan(load)

    def select(self, drafts: Drafts, load: Load) -> Drafts:  # noqa: ARG002
        return drafts

    def observe(self, stats: RoundStats) -> None:
        pass

    def forget(self, key: Hashable) -> None:
        pass


def record_texts(llm: LLM, prompts: Sequence[Sequence[int] | str], params: SamplingParams) -> list[dict[str, Trace]]:
    """What every arm of the engine's controller drafts for the answers to some prompts."""
    controller, recorder = _controller(llm), Recorder()
    stop = llm.engine.listen(recorder)
    texts: list[dict[str, Trace]] = []
    try:
        for prompt in prompts:
            texts.append({})
            for number, arm in enumerate(controller.arms):
                llm.engine.policy = _Pinned(controller.arms, number)
                llm.generate([prompt], params)
                drafts = [_rounded(r.drafts[0]) for r in recorder.take() if not r.prefill and r.drafts[0].room]
                first = drafts[0].at if drafts else 0
                texts[-1][arm.name] = Trace(arm.name, 0, arm.max_nodes, [draft._replace(at=draft.at - first) for draft in drafts])
    finally:
        llm.engine.policy = controller
        stop()
    return texts


def _rounded(draft: DraftRecord) -> DraftRecord:
    return draft._replace(survival=[round(chance, _DIGITS) for chance in draft.survival])


def _controller(llm: LLM) -> Controller:
    if not isinstance(llm.engine.policy, Controller) or not llm.engine.policy.arms:
        raise InvalidParameter("--model", "has no drafter: nothing can be said of speculation; name a model with a draft model")
    return llm.engine.policy


def replica_of(llm: LLM, samples: Sequence[RoundSample], texts: Sequence[Mapping[str, Trace]]) -> ReplicaCosts:
    """A replica on paper of a loaded model, its recorded rounds and texts."""
    controller, config = _controller(llm), llm.engine.scheduler
    known = Costs.from_dict(controller.costs.as_dict())
    known.accepted = controller.accepted
    sizes = EngineConfig(max_num_seqs=config.max_num_seqs, page_size=llm.engine.pages.page_size)
    return ReplicaCosts(
        costs_from(samples, known), tuple(controller.arms), texts, sizes, llm.engine.pages.count, llm.max_model_len,
        plan_s=plan_seconds(samples), measured=environment() | {"model": llm.directory.name, "rounds": len(samples)},
    )  # fmt: skip


def measure_replica(
    model: str | None, dtype: str, prompts: Sequence[str], tokens: int, say: Callable[[str], None]
) -> ReplicaCosts:
    """Load a model, record its texts, and time its rounds under `auto` in batches of several sizes."""
    llm = LLM(model, speculation="auto", dtype=dtype, max_num_seqs=max(_BATCHES), share=False)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=tokens, ignore_eos=True)
    say("what drafts come to")
    texts = record_texts(llm, prompts, params)
    times = RoundTimes(_controller(llm))
    llm.engine.listen(times)
    for batch in _BATCHES:
        say(f"rounds of {batch} sequences")
        for first in range(0, max(len(prompts), batch), batch):
            llm.generate([prompts[(first + i) % len(prompts)] for i in range(batch)], params)
    replica = replica_of(llm, times.samples, texts)
    return replace(replica, request_s=0.0)
