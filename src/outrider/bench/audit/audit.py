"""A whole audit: cases alone and at once, samples, acceptance, speed, verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.bench.audit.cases import AuditSize, Case, build_cases
from outrider.bench.audit.records import Drafting, Side
from outrider.bench.audit.run import Budget, Outcome, Runner, Spent, Waves
from outrider.bench.audit.sampled import SampledPrompt, sample_prompts, sampling_result
from outrider.bench.audit.summary import summarise_kinds
from outrider.bench.audit.verdict import judge

__all__ = ["AuditPlan", "Progress", "audit", "planned_requests", "run_audit"]

Progress = Callable[[str, int], None]  # the stage, and requests sent so far


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to send and how to judge it."""

    prompts: Sequence[str]
    size: AuditSize
    seed: int = 0
    near_tie: float = 0.25  # nats
    seconds: float = 1800.0
    requests: int = 20_000


@dataclass(slots=True)
class _Collected:
    """What was measured before the end, or before the budget was used up."""

    outcomes: list[Outcome] = field(default_factory=list)
    drawn: list[SampledPrompt] = field(default_factory=list)


def audit(plain: Side, speculative: Side, plan: AuditPlan, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Run an audit and return its card as plain data."""
    return asyncio.run(run_audit(plain, speculative, plan, progress))


def planned_requests(plan: AuditPlan) -> int:
    """Requests that an audit sends at least, where both sides take several at once."""
    size = plan.size
    warm = 2 * min(len(set(plan.prompts)), max(size.prompts, size.few, size.concurrent))
    return warm + 2 * len(build_cases(plan.prompts, size, plan.seed)) + 2 * size.sampled_prompts * size.samples


async def run_audit(plain: Side, speculative: Side, plan: AuditPlan, progress: Progress) -> dict[str, Any]:
    stage, budget = "warming up", Budget(plan.seconds, plan.requests)
    runner = Runner(plain, speculative, budget, plan.size.at_once, lambda: progress(stage, budget.sent))
    collected, before = _Collected(), await speculative.counters()
    try:
        cases = build_cases(plan.prompts, plan.size, plan.seed, runner.parallel)
        await runner.warm_up([case.request.prompt for case in cases])
        for i, case in enumerate(case for case in cases if not case.concurrent):
            stage = case.kind
            collected.outcomes.append(await runner.alone(case, plain_first=i % 2 == 0))
        stage = "concurrent"
        for i, group in enumerate(_groups([case for case in cases if case.concurrent], 2 * plan.size.at_once)):
            collected.outcomes += await runner.at_once(group, plain_first=i % 2 == 0)
        if plan.size.samples:
            stage, size = "sampling", plan.size
            async for drawn in sample_prompts(runner, plan.prompts, size.sampled_prompts, size.samples, plan.seed):
                collected.drawn.append(drawn)
    except Spent:
        pass
    finally:
        after = await speculative.counters()
        for side in (plain, speculative):
            await side.close()
    counted = after - before if before is not None and after is not None else None
    skipped = () if runner.parallel else ("concurrent", "seeded concurrent")
    return _result(plan, budget, collected, counted, runner.waves, skipped)


def _groups(cases: Sequence[Case], size: int) -> list[Sequence[Case]]:
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def _result(
    plan: AuditPlan, budget: Budget, collected: _Collected, counted: Drafting | None, waves: Waves, skipped: Sequence[str]
) -> dict[str, Any]:
    kinds = summarise_kinds(collected.outcomes, skipped)
    sampling = sampling_result(collected.drawn)
    verdict = judge(kinds, sampling, plan.near_tie)
    tokens = sum(o.speculative.tokens for o in collected.outcomes if o.case.greedy and o.speculative.good and not o.differs)
    return {
        "verdict": verdict.word,
        "reasons": list(verdict.reasons),
        "notes": list(verdict.notes),
        "near_tie_nats": plan.near_tie,
        "requests": budget.sent,
        "cut_short": budget.cut,
        "tokens_compared": tokens,
        "fault_rate_seen_with_95_percent": 3 / tokens if tokens else None,
        "kinds": kinds,
        "sampling": sampling,
        "acceptance": _acceptance(collected.outcomes, counted),
        "speed": _speed(kinds, waves),
        "size": asdict(plan.size) | {"seed": plan.seed},
    }


def _acceptance(outcomes: Sequence[Outcome], counted: Drafting | None) -> dict[str, Any] | None:
    """Accepted tokens over drafted ones, from the answers, else from the engine's counters over the whole audit."""
    said = [o.speculative.drafting for o in outcomes if o.speculative.drafting is not None]
    total, source = sum(said, Drafting(0, 0)), "answers"
    if not said:
        if counted is None:
            return None
        total, source = counted, "/metrics"
    length = 1 + total.accepted / total.rounds if total.rounds else None
    rate = total.accepted / total.drafted if total.drafted else None
    return {"drafted": total.drafted, "accepted": total.accepted, "rate": rate, "mean_length": length, "source": source}


def _speed(kinds: dict[str, dict[str, Any]], waves: Waves) -> dict[str, Any]:
    """Tokens per second of whole requests: greedy and seeded ones alone, and all that were sent at once."""
    out: dict[str, Any] = {}
    for name in ("greedy", "seeded"):
        row = kinds.get(name)
        if row and row["compared"] and row["plain_s"] and row["speculative_s"]:
            out[name] = _ratio(row["plain_tokens"] / row["plain_s"], row["tokens"] / row["speculative_s"])
    if waves.plain_s and waves.speculative_s:
        out["concurrent"] = _ratio(waves.plain_tokens / waves.plain_s, waves.speculative_tokens / waves.speculative_s)
    return out


def _ratio(plain: float, speculative: float) -> dict[str, float | None]:
    return {"plain_tok_s": plain, "speculative_tok_s": speculative, "speedup": speculative / plain if plain else None}
