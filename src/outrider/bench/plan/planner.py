"""The plan: for each drafter its best length and tree, break-even batch and memory; and what if acceptance were other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from outrider.bench.plan.costs import RoundCosts
from outrider.bench.plan.formulas import best_tree, break_even, closed_form_length, expected_tokens, survival_of
from outrider.bench.plan.profile import Profile
from outrider.bench.plan.subject import Prompt, Subject, learn_from
from outrider.errors import InvalidParameter
from outrider.sampling import SamplingParams

__all__ = [
    "CHANCES",
    "LENGTHS",
    "PlanRow",
    "assumed_costs",
    "costs_of",
    "measure",
    "plan_chain",
    "plan_rows",
    "plan_tree",
    "read_costs",
    "what_if",
]

CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_BATCHES = (4, 16)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What to expect of one drafter."""

    method: str
    tokens_per_round: float
    speedup: float  # at the length it was measured with
    best_length: int
    best_speedup: float
    break_even_batch: int
    by_position: list[float]
    tree: dict[str, Any] | None  # the best static tree from the ranks of what was accepted; None: it drafts chains
    weights_bytes: int
    kv_bytes_per_token: int
    curve: list[tuple[int, float]] = field(default_factory=list)  # speed-up by length
    experts: float = 0.0  # distinct ones that its rounds of one sequence read, the mean over layers; 0: the target has none

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    subjects: Sequence[Subject], prompts: Sequence[Prompt], params: SamplingParams, batches: bool, say: Callable[[str], None]
) -> None:
    """Fill every subject's profile: acceptance on all prompts, interleaved, then costs at shorter drafts and in batches."""
    learn_from(subjects, prompts, params, say)
    for length in (1, 2, 4, 8, 16):
        for subject in subjects:
            if length < subject.profile.max_length:
                say(f"costs at {length} drafted")
                subject.learn_costs(prompts[:1], params, length)
    for batch in _BATCHES if batches else ():
        for subject in subjects:
            say(f"costs at batch {batch}")
            several = [prompts[i % len(prompts)] for i in range(batch)]
            subject.learn_costs(several, params, subject.profile.max_length)


def plan_rows(plain: Profile, profiles: Sequence[Profile], max_batch: int = 1024) -> list[PlanRow]:
    """A row for every drafter, the quickest first."""
    rows = []
    for profile in profiles:
        best, ranks = profile.best_length(), profile.ranks()
        branches = sum(rank > 0 for rank in ranks) > 1
        curve = [(k, profile.speedup(plain, k)) for k in LENGTHS if k <= profile.max_length]
        rows.append(
            PlanRow(
                profile.method,
                profile.tokens(profile.max_length),
                profile.speedup(plain, profile.max_length),
                best,
                profile.speedup(plain, best) if best else 1.0,
                profile.break_even(plain, max_batch),
                profile.by_position(),
                plan_tree(profile.costs, plain.costs, ranks, profile.max_length) if branches else None,
                profile.memory.weights,
                profile.memory.kv_per_token,
                curve,
                profile.costs.experts,
            )
        )
    return sorted(rows, key=lambda row: -row.best_speedup)


def plan_tree(costs: RoundCosts, plain: RoundCosts, ranks: Sequence[float], max_nodes: int, batch: int = 1) -> dict[str, Any]:
    """The static tree whose expected tokens per second are highest, each level costing as its nodes do."""
    base = plain.round_s(0, 0, batch)
    trees: list[dict[str, Any]] = []
    for nodes in (size for size in LENGTHS if size <= max_nodes):
        tokens, parents = best_tree(ranks, nodes)
        speedup = tokens * base / costs.round_s(nodes, nodes, batch)
        trees.append({"nodes": nodes, "parents": parents, "tokens": tokens, "speedup": speedup})
    return max(trees, key=lambda tree: tree["speedup"]) | {"ranks": [round(rank, 4) for rank in ranks]}


def plan_chain(
    costs: RoundCosts, plain: RoundCosts, chances: float | Sequence[float], max_length: int, batch: int = 1
) -> dict[str, Any]:
    """For a chain of known acceptance: expected tokens and speed-up by length, the best length, and the break-even batch."""
    survival = survival_of(chances, max_length)
    lengths = range(max_length + 1)
    tokens = [expected_tokens(survival, k) for k in lengths]

    def speedups(size: int) -> list[float]:
        base = plain.round_s(0, 0, size)
        return [tokens[k] * base / (costs.round_s(k, k, size) if k else base) for k in lengths]

    speedup = speedups(batch)
    best = max(lengths, key=lambda k: (speedup[k], -k))
    cost = (costs.time("propose", 1, max_length) / max_length) / plain.round_s(0, 0, batch) if max_length else 0.0
    return {
        "acceptance": chances if isinstance(chances, float) else list(chances),
        "batch": batch,
        "tokens": tokens,
        "speedup": speedup,
        "best_length": best,
        "best_speedup": speedup[best],
        "break_even_batch": break_even(lambda size: max(speedups(size)[1:], default=0.0)),
        "closed_form_length": closed_form_length(chances, cost) if isinstance(chances, float) and cost > 0 else None,
    }


def what_if(costs: RoundCosts, plain: RoundCosts, max_length: int, batch: int = 1) -> dict[float, list[tuple[int, float]]]:
    """Speed-up of a chain by acceptance and length, at these costs."""
    out = {}
    for chance in CHANCES:
        speedup = plan_chain(costs, plain, chance, max_length, batch)["speedup"]
        out[chance] = [(k, speedup[k]) for k in LENGTHS if k <= max_length]
    return out


def assumed_costs(draft: float, row: float, host: float, knee: int = 1) -> tuple[RoundCosts, RoundCosts]:
    """Costs in units of a plain forward: a draft token, a row beyond the first `knee`, the host; with a drafter and without."""
    plain, drafter = RoundCosts(), RoundCosts()
    for table in (plain, drafter):
        for rows in (1, knee, knee + 1024):
            table.add("forward", 1, rows, 1.0 + row * max(rows - knee, 0))
    for batch in (1, 4096):  # shared by all sequences
        for table in (plain, drafter):
            table.add("host", batch, batch, host)
    for batch, length in product(sorted({1, knee, knee + 1023}), (1, 64)):  # a draft token is a forward over all sequences
        drafter.add("propose", batch, length, draft * length * (1.0 + row * max(batch - knee, 0)))
    return drafter, plain


def costs_of(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Measured costs by method, for a file."""
    return {"methods": {subject.profile.method: subject.profile.costs.as_dict() for subject in subjects}}


def read_costs(path: Path) -> dict[str, RoundCosts]:
    """RoundCosts by method, from `--save-costs`, or from the file in which the controller keeps what it measured."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "methods" in data:
            return {name: RoundCosts.from_dict(table) for name, table in data["methods"].items()}
        shared = {"forward": {"1": data["forward"]}}
        return {"none": RoundCosts.from_dict(shared)} | {
            name: RoundCosts.from_dict(shared | {"propose": table}) for name, table in data["propose"].items()
        }
    except OSError as error:
        raise InvalidParameter("--costs", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidParameter("--costs", f"{path} is no table of costs ({type(error).__name__}: {error})") from None
