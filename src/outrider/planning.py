"""Planning from Python: what a draft is worth before anything is loaded. `outrider plan` does the same with measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.bench.plan.formulas import best_length as _quickest
from outrider.bench.plan.formulas import expected_tokens, survival_of
from outrider.bench.plan.recommend import DraftOption, Fit, Machine, Recommendation, recommend

__all__ = ["DraftOption", "Fit", "Machine", "Recommendation", "best_length", "expected_speedup", "recommend_draft"]

_LONGEST = 64


def expected_speedup(
    chance: float | Sequence[float], draft_tokens: int, cost_ratio: float, row_cost: float = 0.0, batch: int = 1
) -> float:
    """Expected tokens of a round over its time in plain rounds.

    `chance` is the probability that a draft token is accepted once those before it were (or one for each position, the last
    going on). A draft token costs `cost_ratio` plain forwards, a further row of a forward `row_cost`. With a batch, rows of all
    sequences count, in the target's forward and in every forward of the draft model.
    """
    tokens = expected_tokens(survival_of(chance, draft_tokens))
    plain = 1.0 + row_cost * (batch - 1)
    verify = 1.0 + row_cost * (batch * (1 + draft_tokens) - 1)
    return tokens * plain / (draft_tokens * cost_ratio * plain + verify)


def best_length(
    chance: float | Sequence[float], cost_ratio: float, row_cost: float = 0.0, batch: int = 1, max_length: int = _LONGEST
) -> int:
    """The draft length with the highest expected speed-up; 0 where plain decoding is quicker."""
    speedups = [expected_speedup(chance, length, cost_ratio, row_cost, batch) for length in range(max_length + 1)]
    return _quickest(speedups, [1.0] * len(speedups))


def recommend_draft(
    target: str | Path,
    candidates: Sequence[Path] = (),
    machine: Machine = Machine(),  # noqa: B008 (frozen)
) -> list[Recommendation]:
    """Published draft models and heads for a directory, a hub id or a size such as "70B" (which may mean several targets).

    Each `Recommendation` lists its drafts by expected speed-up, with the source of the acceptance or that it is a guess, the
    memory of both models and the concurrency that is left, and lookups, which need no weights.
    """
    return recommend(target, candidates, machine)
